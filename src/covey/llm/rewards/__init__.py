"""Reward functions.

builtin                   the rewards that come with covey
runner                    calls a function under a deadline: in this process or through a worker
worker                    the process in which a user's function runs
reward_call               one call and the check of its results
process_state             process state that a function may change by accident, saved and restored
weighted_reward           one term of a reward: a function, how it is called, its weight
step_splitter             splits completions into reasoning steps
unfinished_call           a record of the current call, for a run that is resumed
code                      the reward `code`: programs that pass hidden tests
code_tests                the tests in a column of the data
code_judge                runs a program on its tests and decides
code_values               compares results with expected ones
sandbox                   isolation of programs
"""
