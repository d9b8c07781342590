"""`covey compare`: recipes x seeds, trained side by side.

compare         the command: jobs, runs, report
parallel_runs   many jobs with bounded parallelism, one process each
estimates       statistics of the runs: intervals and probability of improvement
report, figure  the results as Markdown, JSON and pictures
"""
