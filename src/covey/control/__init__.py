"""Policies, samplers and environments of control (Gymnasium).

From an observation to a gradient:

    sampler.ResetSeeds.draw            reset seeds
    sampler.EpisodeSampler.sample      (or FragmentSampler, BranchSampler)
        rollout_buffer.collect_episodes  vector_env.step and policy.act, side by side in N copies
        rollout_buffer.Trajectories    a piece of the buffer as a Rollout: T + 1 observations, T actions
        RewardScale.scale              rewards, scaled for training
    covey.data.collate                 rollouts as one Batch; from here on the code is that of language models
    covey.train.prepare                values, old log-probabilities, advantages
    covey.train.update                 policy.ControlPolicy.evaluate, the loss, backward, an optimizer step
    sampler.refresh                    updates the running scale of observations
"""
