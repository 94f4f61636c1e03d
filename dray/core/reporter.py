"""What a program reports, and what the host answers: shared by the contexts of the core API."""

from __future__ import annotations

from dray.training.host import ProgramHost, Report


class Reporter:
    """Passes a program's reports on to its host.

    Args:
        host: gets the reports.

    Attributes:
        stop_requested: whether the answer to a report was a request to stop.
        steps_completed: of the last report; None before the first.
        uses_operations: whether the search compares metrics of completed operations instead of reported validations.
    """

    def __init__(self, host: ProgramHost) -> None:
        self._host = host
        self._calls = 0
        self.stop_requested = False
        self.steps_completed: int | None = None
        self.uses_operations = False
        host.watch(lambda: (self.steps_completed or 0, self._calls))

    def publish(self, report: Report) -> None:
        """Pass a report on to the host. On the chief only."""
        self.pulse()
        self.steps_completed = report.batches
        self.stop_requested = self._host.report(report) or self.stop_requested

    def pulse(self) -> None:
        """Note progress, for `hang_timeout_s`."""
        self._calls += 1
