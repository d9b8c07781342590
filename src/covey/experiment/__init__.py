"""From a config to a run and its summary.

job               the life of a training: of a policy, of `covey sft`, of `covey reward-model train`
run               train, resume, check
llm, control      the components of a run on a language model, and on an environment
problem, models   of a language run: rollouts, task and rewards; policy, reference and critic
algorithm         the algorithm, from the config or the user's own, with its controllers and learners
evaluation        answers to held-out problems, `covey eval` and `covey sample`
plan              `covey plan`, and whether ranks must divide the weights
supervised        what sft and reward_models share
sft               `covey sft`
reward_models     `covey reward-model`
iteration         the training of the reward model in an iterative run
export            `covey export`
resuming, advice  resuming a run; the next command for the user
"""
