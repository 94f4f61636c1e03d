"""Reports of what fails and is tried again: when it begins to fail, and when it works again, each time."""

from __future__ import annotations

import logging


class Outage:
    """A kind of failure that comes and goes.

    Args:
        log: for the reports.
        fails: reported with the error when it fails for the first time, or again after it worked.
        works: reported when it works again.
    """

    def __init__(self, log: logging.Logger, *, fails: str, works: str) -> None:
        self._log, self._fails, self._works = log, fails, works
        self._on = False

    def began(self, error: BaseException) -> None:
        """It has failed."""
        if not self._on:
            self._log.warning("%s: %s", self._fails, error)
        self._on = True

    def ended(self) -> None:
        """All of it has worked, with what failed before."""
        if self._on:
            self._log.warning("%s", self._works)
        self._on = False
