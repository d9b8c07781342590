"""Reward models: classifiers that score completions (outcome) or their steps (process).

encoding                  prompts with completions as token ids, and where scores are read
loading, trial            from a name to a model; whether its prompts can be shared
model                     scores of rows, with the prompt of a group computed once
training, examples        losses on pairs, grades and step labels; optimizer steps with exact resume
evaluation                accuracy, AUC and calibration on held-out examples
reward                    a reward model as a reward of a run
continuation_labels       labels of steps by continuations from them (Math-Shepherd)
graded_groups             examples from the completions of a run, which the verifier has graded
iteration                 trains the reward model between iterations of the policy's training (iterative GRPO)
"""
