"""The training step, in this order: loop -> collect -> prepare -> update.

    loop.train_step
        collect.GroupSource      Task.draw, Sampler.sample, Grader.grade: the graded groups of the step
        replay.joined            groups of this step and of earlier ones -> Batch [B, T]
        prepare.prepare_batch    values, KL in the reward, advantages, loss weights, old and reference log-probabilities
        update.update            for each learner: epochs -> minibatches -> shards -> microbatches -> optimizer step

iterate           iterations of the loop, each followed by a training of the reward model (iterative GRPO)
learners          the models that an update trains: the policy; with a value loss also the critic; the coefficient of
                  the KL, the control of the entropy
state             components, settings and progress of a run; checkpoints
metrics, record   the metrics of a step; the advantages and tokens that are recorded of its rollouts
supervised        training on given decisions
"""
