"""Language models: from a prompt to a gradient.

tasks.*.draw                       prompts with their columns
sampler.LanguageSampler.sample     completions, token by token, with their log-probabilities
    generation.local_generator     requests -> completions or failures
    generation.batch               continuous batching; completions share a row until their tokens differ
    generation.backend             selects the decoder and the kernels
grader.RewardGrader.grade          rewards.runner calls the reward functions with a deadline
    reward_models.reward           scores of reward models, which reward_models.training trains
covey.data.collate                 rollouts -> Batch; from here on the code is shared with control
covey.train.prepare                values, old and reference log-probabilities, advantages
covey.train.update                 policy.LanguagePolicy.evaluate, the loss, backward, an optimizer step
    model.prefix_tree              tokens that rollouts share are fed once
    model.prefix_attention         attention over packed rollouts with shared prefixes
    model.logprobs                 log-probabilities from hidden states, chunk by chunk
sampler.refresh                    the next completions are sampled with the new weights
"""
