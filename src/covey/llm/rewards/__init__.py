"""Reward functions.

rules, numbers, math      the built-in rewards, in the table `covey.config.rewards`
final_answer              the text of a completion, and the answer that it states
runner                    calls of a function: in processes (`covey.runtime.worker`), one by one, in this process
reward_call               one call, in any signature, and the check of its results
weighted_reward           one term of a reward: a function, how it is called, its weight
step_splitter             splits completions into reasoning steps
reasoning_gym_process     problems and scores of the package reasoning_gym, in the worker
judge                     asks a language model behind an OpenAI-compatible address for a score; its replies on disk
code                      the reward `code`: programs that pass hidden tests, run in the sandbox
sandbox                   isolation of programs
"""
