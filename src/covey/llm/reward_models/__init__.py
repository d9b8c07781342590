"""Reward models: classifiers that score completions (outcome) or their steps (process).

examples         prompts with completions as token ids, where scores are read, losses on pairs, grades and step labels
loading          from a name to a model; whether its prompts can be shared
model            scores of rows, with the prompt of a group computed once
training         optimizer steps with exact resume; accuracy, AUC and calibration on held-out examples; the
                 training between iterations of the policy's training (iterative GRPO)
reward           a reward model as a reward of a run
graded_groups    examples from the completions of a run: grades of the verifier, labels of steps by continuations
"""
