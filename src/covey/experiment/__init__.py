"""From a config to a run and its summary.

job                  the life of a training: of a policy, of `covey sft`, of `covey reward-model train`
run                  train, resume, check
build                parts of both kinds of run: algorithm, learners, KL coefficient, checkpoints
llm, control         the components of a run on a language model (llm_components), and on an environment
evaluate_llm         greedy answers to held-out problems
inference            `covey eval` of a model
plan                 `covey plan`
reward_models        `covey reward-model train` and `eval`
reward_data          `covey reward-model label`
iteration            the training of the reward model in an iterative run
observers, outcome   observers of the user's own; what a run leaves at its end or where it was stopped
export, model_card   `covey export`
resuming, advice     resuming a run; the next command for the user
"""
