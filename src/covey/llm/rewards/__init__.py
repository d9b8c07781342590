"""Reward functions.

builtin                   the rewards that come with covey
runner                    calls a function under a deadline: in this process or through a worker
worker                    the process in which a user's function runs
adapters                  calls functions with the signatures of verl and verifiers
reward_call               one call and the check of its results
process_state             process state that a function may change by accident, saved and restored
weighted_reward           one term of a reward: a function, how it is called, its weight
step_splitter             splits completions into reasoning steps
reasoning_gym_process     problems and scores of the package reasoning_gym, in the worker
judge                     asks a language model behind an OpenAI-compatible address for a score
judge_client              its HTTP requests, with retries and deadlines, in the worker
judge_score               reads the score in a reply
judge_cache               replies on disk, so that a question is asked once
unfinished_call           a record of the current call, for a run that is resumed
"""
