"""The world of language models.

From a prompt to a gradient:

    tasks.*.draw                       prompts with their columns
    sampler.LanguageSampler.sample     completions, token by token, with their log-probabilities
        generation.local_generator     requests to completions, or to failures
        generation.batch               continuous batching; siblings share a row until they differ
        generation.backend             which decoder runs, on which kernels
    grader.RewardGrader.grade          rewards.runner calls the reward functions under a deadline
    covey.data.collate                 rollouts as one Batch; from here on the code is that of environments
    covey.train.prepare                values, old and reference log-probabilities, advantages
    covey.train.update                 policy.LanguagePolicy.evaluate, the loss, backward, an optimizer step
        model.prefix_tree              tokens that rollouts share are fed once
        model.prefix_attention         and attention knows which token may look at which
        model.logprobs                 log-probabilities from hidden states, a part at a time
    sampler.refresh                    the next completions come from the new weights
"""
