"""Reward functions.

numeric, digits, ...      the built-in rewards, one file each, in the table `covey.config.rewards`
answer_text, final_answer the text of a completion; the answer that it states
read_number               the one number that an answer is, or why a right answer is none
environment               the reward of a conversation's environment
units, plain_numbers      the length of a completion; answers that are numbers, for `math`
runner                    calls of a function: in processes (`covey.runtime.worker`), one by one, in this process
group_calls               the calls for the groups of a step, started while others are sampled
reward_call               one call, in any signature, and the check of its results
weighted_reward           one term of a reward: a function, how it is called, its weight
step_splitter             splits completions into reasoning steps
reasoning_gym_process     problems and scores of the package reasoning_gym, in the worker
judge                     asks a language model behind an OpenAI-compatible address for a score; its replies on disk
judge_score               reads the score in a reply
unfinished_call           a record of the current call, for a run that is resumed
code                      the reward `code`: programs that pass hidden tests
code_tests                the tests in a column of the data
code_judge                runs a program on its tests and decides
code_values               compares results with expected ones
sandbox                   isolation of programs
"""
