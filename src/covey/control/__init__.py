"""The world of Gymnasium environments.

From an observation to a gradient:

    task.EpisodeStarts.draw            reset seeds
    sampler.EpisodeSampler.sample      (or FragmentSampler, branches.BranchSampler)
        tape.play                      environments.step and policy.act, side by side in N copies, onto a tape
        tape.FinishedTape.rollout      a piece of the tape as a Rollout: T + 1 observations, T actions
        rewards.RewardScale.scale      what the environment paid, in the size that is learnt from
    covey.data.collate                 rollouts as one Batch; from here on the code is that of language models
    covey.train.annotate               values, old log-probabilities, advantages
    covey.train.update                 policy.ControlPolicy.evaluate, the loss, backward, an optimizer step
    sampler.refresh                    the scale of observations takes in what was seen
"""
