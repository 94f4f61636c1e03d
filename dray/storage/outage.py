"""Warns once when something that is retried starts to fail, and once when it works again."""

from __future__ import annotations

import logging


class Outage:
    """A failure that comes and goes.

    Args:
        log: receives the warnings.
        fails: the warning at the first failure, and at the first after a success; the error is appended.
        works: the warning at the first success after a failure.
    """

    def __init__(self, log: logging.Logger, *, fails: str, works: str) -> None:
        self._log, self._fails, self._works = log, fails, works
        self._on = False

    def began(self, error: BaseException) -> None:
        """An attempt has failed."""
        if not self._on:
            self._log.warning("%s: %s", self._fails, error)
        self._on = True

    def ended(self) -> None:
        """An attempt has succeeded, and nothing that failed before is missing."""
        if self._on:
            self._log.warning("%s", self._works)
        self._on = False
