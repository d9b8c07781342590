"""Reward functions.

builtin                   the rewards that come with covey
runner                    calls a function under a deadline: in this process or through a worker
worker                    the process in which a function of the user's own runs
reward_call               one call and the check of what it returns
process_state             what a function may change of its process by accident, put back
step_splitter             where the reasoning steps of a completion end
unfinished_call           a note while a function is called, for the run that resumes
"""
