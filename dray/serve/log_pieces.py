"""Pieces of a trial's output: its end first, then what is added, asked for by where the last piece ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray.records.directory import ExperimentDirectory
from dray.records.logs import STAMP
from dray.serve.answers import BadInput
from dray.storage.disk import scratch_until_exit
from dray.storage.logs import EVERY_S, NAME, fetch_logs

TAIL_BYTES = 64 << 10
"""How much of a rank's output the first piece has."""
MOST_BYTES = 256 << 10
"""The most of a rank's output that a piece has."""


def piece(places: list[Path], after: str, *, whole: bool = False) -> dict[str, Any]:
    """The output of a trial's ranks since a place, sorted by time; with several ranks, each line begins with its rank.

    Args:
        places: directories with logs of the trial.
        after: ``next`` of the piece before; "" for the end of the output.
        whole: from the beginning, all of it.

    Returns:
        ``lines``; ``next``; and ``skipped``, how many bytes before the first line are left out.
    """
    starts = _parsed(after)
    files = {
        path.name: path for place in places for path in sorted(place.glob("rank_*.log")) if NAME.fullmatch(path.name)
    }
    many = len({_rank(name) for name in files}) > 1
    lines: list[tuple[str, str]] = []
    skipped, ends = 0, {}
    for name, path in sorted(files.items()):
        size = path.stat().st_size
        start = starts.get(name, 0 if whole or after else max(0, size - TAIL_BYTES))
        start = start if start <= size else 0  # it was begun anew
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(size if whole else MOST_BYTES)
        if not whole and data.count(b"\n") == 0 and len(data) == MOST_BYTES:
            data += b"\n"  # an endless line
            end = start + len(data) - 1
        else:
            end = start + data.rfind(b"\n") + 1 if not whole else size
        if start > 0 and name not in starts:  # not from the middle of a line
            cut = data.find(b"\n") + 1
            data, skipped = data[cut:], skipped + start + cut
        at = ""
        for line in data[: data.rfind(b"\n") + 1 if not whole else len(data)].split(b"\n"):
            text = line.decode(errors="replace")
            stamp = STAMP.match(text)
            at = stamp.group() if stamp else at
            lines.append((at, f"rank {_rank(name)} | {text}" if many and text else text))
        if lines and lines[-1][1] == "":
            lines.pop()
        ends[name] = end
    lines.sort(key=lambda each: each[0])
    return {"lines": [line for _, line in lines], "next": _encoded(ends), "skipped": skipped}


class Fetched:
    """Logs of trials that ran on other machines, copied from the object store; again every ten seconds at most."""

    def __init__(self) -> None:
        self._directory = scratch_until_exit("logs")
        self._at: dict[tuple[Path, int], float] = {}
        self._lock = threading.Lock()

    def places(self, directory: ExperimentDirectory, trial: int) -> list[Path]:
        """The directories that have logs of a trial, for `piece`.

        Raises:
            StorageError: the object store can't be read.
        """
        here = directory.trial(trial) / "logs"
        if directory.storage.is_local:
            return [here]
        copy = self._directory / directory.path.name / str(trial)
        with self._lock:
            if time.monotonic() - self._at.get((directory.path, trial), -EVERY_S) >= EVERY_S:
                copy.mkdir(parents=True, exist_ok=True)
                fetch_logs(directory.storage.child(f"trial_{trial}"), here, copy)
                self._at[directory.path, trial] = time.monotonic()
        return [copy, here]


def _rank(name: str) -> int:
    match = NAME.fullmatch(name)
    assert match is not None
    return int(match.group(1))


def _encoded(ends: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{end}" for name, end in ends.items()) or "-"


def _parsed(after: str) -> dict[str, int]:
    starts = {}
    for part in after.split(",") if after not in ("", "-") else []:
        name, _, number = part.rpartition(":")
        if not NAME.fullmatch(name) or not number.isdecimal() or len(number) > 18:
            raise BadInput(f"after={after[:80]}: must be `next` of the piece before")
        starts[name] = int(number)
    return starts
