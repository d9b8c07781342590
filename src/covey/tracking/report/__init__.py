"""The report of runs: one HTML file without scripts and without other files.

html        elements whose text is escaped
style       the style sheet
charts      curves as SVG
run_data    the files of a run, read for the report
result, samples, settings   the sections of a run
page        the whole file
"""

from covey.tracking.report.page import write_report

__all__ = ["write_report"]
