"""`covey compare`: recipes x seeds, trained side by side.

compare         the command: jobs, a process for each run with bounded parallelism, report
estimates       statistics of the runs: intervals and probability of improvement
report          the results as Markdown, JSON and pictures
"""
