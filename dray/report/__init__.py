"""Reports on experiments: self-contained HTML files to read, print and send to others."""

from dray.report.report import write_report

__all__ = ["write_report"]
