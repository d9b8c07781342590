"""`covey compare`: recipes x seeds, trained side by side.

compare         the command: jobs, runs, report
parallel_runs   many jobs with bounded parallelism, one process each
estimates       what the run folders say, and how sure a difference is
report, figure  the findings as Markdown, JSON and pictures
"""
