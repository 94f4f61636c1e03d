"""A report on an experiment: one HTML file with everything in it, to be looked at, printed, and sent to others."""

from dray.report.page import write_report

__all__ = ["write_report"]
