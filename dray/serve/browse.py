"""What the page and the API do where no server is up: they show experiments, and change nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

from dray._version import __version__
from dray.serve.control import NotSubmitted, Status, Submitted, WrongState


class Browsing:
    """A `Control` without a server, for ``dray ui``."""

    def __init__(self, results: Path) -> None:
        self._results, self._since = results, time.time()

    def experiments(self) -> list[Submitted]:
        return []

    def experiment(self, name: str) -> Submitted:
        raise NotSubmitted(f"experiment {name} was not submitted to a server")

    def status(self) -> Status:
        return Status(
            version=__version__,
            cluster="no server is up",
            results=str(self._results),
            since=self._since,
            slots=0,
            busy=0,
            groups=0,
            experiments={},
        )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise WrongState("no server is up; to change or run experiments here, end dray ui and start: dray serve")

    submit = act = extend = change = _refuse
