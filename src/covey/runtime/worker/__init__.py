"""User code in a process under a deadline.

child      the process in which the code runs, under a supervisor that ends it with everything that it started
process    starts a child, exchanges requests and replies with it, and ends it
sessions   many conversations with forks of one child
"""
