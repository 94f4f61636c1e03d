"""The events of an experiment and the output of its trials as lines; also while it runs."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dray.config.schema import ExperimentConfig
from dray.desk.failure import PRINTED
from dray.storage.logs import NAME
from searchers.domains import searched
from searchers.errors import JournalError
from searchers.space import Space

POLL_S = 0.3
"""How often a growing file is read."""
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
"""How each line of a trial's output begins: the time in UTC."""
_WHERE = re.compile(r"[^\s:]+ at (.+:\d+ in \S+)")
_HEAD_ENDS = re.compile(rf"\n\n(?:Traceback \(most recent call last\):\n|{PRINTED})")


class Tail:
    """The lines of a file that another process appends to.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0
        self._torn = b""

    def lines(self, *, all_of_it: bool = False) -> list[str]:
        """The lines since the last call; with ``all_of_it`` also an unfinished last line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        self._read += len(data)
        *whole, self._torn = (self._torn + data).split(b"\n")
        if all_of_it and self._torn:
            whole.append(self._torn)
            self._torn = b""
        return [line.decode(errors="replace") for line in whole]


def trial_lines(*logs: Path, rank: int | None = None) -> Callable[[bool], list[str]]:
    """The output of a trial's ranks, sorted by time; with several ranks, each line begins with its rank.

    Args:
        logs: directories with logs of the trial.
        rank: only this rank.

    Returns:
        A function that returns the lines since its last call; its argument is that of ``Tail.lines``.
    """
    tails: dict[Path, tuple[int, Tail]] = {}

    def new(all_of_it: bool) -> list[str]:
        # The names sort a rank's files by age; this machine's own file is the last.
        for path in (path for directory in logs for path in sorted(directory.glob("rank_*.log"))):
            match = NAME.fullmatch(path.name)
            if match and rank in (None, int(match.group(1))):
                tails.setdefault(path, (int(match.group(1)), Tail(path)))
        many = len({number for number, _ in tails.values()}) > 1
        lines, at = [], ""
        for number, tail in tails.values():
            for line in tail.lines(all_of_it=all_of_it):
                stamp = STAMP.match(line)
                at = stamp.group() if stamp else at
                lines.append((at, f"rank {number} | {line}" if many else line))
        return [line for _, line in sorted(lines, key=lambda one: one[0])]

    return new


def followed(new: Callable[[bool], list[str]], goes_on: Callable[[], bool]) -> Iterator[str]:
    """Lines as they are written, until no more can come.

    Args:
        new: returns the lines since its last call.
        goes_on: whether more may come.
    """
    while goes_on():
        yield from new(False)
        time.sleep(POLL_S)
    # Lines that were written after the last read.
    yield from new(True)


def event_lines(config: ExperimentConfig, records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A journal for a person: one line per record, without those that only the driver needs.

    Raises:
        JournalError: a record is not as dray writes it.
    """
    metric, unit, space = config.searcher.metric, config.searcher.unit, config.space
    for record in records:
        try:
            told = _told(record, metric, unit, space)
        except (KeyError, TypeError, AttributeError):
            raise JournalError(f"not a record of an experiment's journal: {record}") from None
        if told is not None:
            time = record.get("time")
            stamp = "" if time is None else datetime.datetime.fromtimestamp(time).strftime("%b %d %H:%M:%S  ")
            yield stamp + told


def in_short(error: object) -> list[str]:
    """An error of the journal in at most three lines: the error, and the line of the user's code that raised it.

    If no line of the user's code is involved, only the last line of the error.
    """
    head, *rest = _HEAD_ENDS.split(str(error or "").strip(), maxsplit=1)
    # The head of an error with a cause may be the cause's traceback.
    return head.splitlines()[:3] if rest and not head.startswith("Traceback") else [last_line(error)]


def last_line(error: object) -> str:
    """The last line of a traceback."""
    lines = str(error or "").strip().splitlines()
    return lines[-1].strip() if lines else "no reason given"


def alike(failures: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Failures of the journal, grouped by the line of the user's code, or else by the error's last line; the largest
    group first."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for failure in failures:
        kinds.setdefault(failure.get("where") or last_line(failure.get("error")), []).append(failure)
    return sorted(kinds.values(), key=len, reverse=True)


def where(failure: Mapping[str, Any]) -> str:
    """The line of the user's code that raised a failure: ``model_def.py:14 in __init__``; "" if there is none."""
    found = _WHERE.fullmatch(failure.get("where") or "")
    return found[1] if found else ""


def _told(record: Mapping[str, Any], metric: str, unit: str, space: Space) -> str | None:
    trial = f"trial {record.get('trial')}"
    match record.get("event"):
        case "opened":
            return f"driver started, dray {record.get('version')}"
        case "started":
            news = [f"{name}={_short(value)}" for name, value in searched(space.root, record.get("hparams") or {})]
            return f"{trial} started: {' '.join(news)}"
        case "reported":
            return f"{trial} at {_short(record['step'])} {unit}: {metric} {_short(record['value'])}{_decided(record)}"
        case "exited":
            return f"{trial} {_ENDED.get(record['reason'], record['reason'])}{_decided(record)}"
        case "restarted":
            return f"{trial} failed and is restarted: {in_short(record.get('error'))[0]}"
        case "gave_up":
            why = record.get("why") or in_short(record.get("error"))[0]
            if kept := record.get("kept"):
                return f"the extension of {trial} failed for good, so it is still {kept}: {why}"
            return f"{trial} failed for good: {why}"
        case "damaged":
            return f"{trial} skipped a checkpoint: {record.get('error')}"
        case "extended":
            wanted = [f"{name} {record[name]}" for name in ("max_trials", "max_length") if record.get(name) is not None]
            return f"search extended: {', '.join(wanted)}"
    return None


_ENDED = {
    "completed": "completed",
    "stopped": "stopped",
    "diverged": "was stopped, because its loss is NaN",
    "errored": "ended with an error",
    "invalid_hp": "has invalid hyperparameters",
    "canceled": "was canceled",
}


def _decided(record: Mapping[str, Any]) -> str:
    """The search's decisions on a record, without the creation of trials that wait."""
    decided = [action for action in record.get("actions", ()) if action["action"] != "create"]
    words = []
    for action in decided:
        if action["action"] == "done":
            words.append(f"search done ({action['reason']})")
        else:
            whose = "" if action["trial"] == record.get("trial") else f" trial {action['trial']}"
            words.append(f"{action['action']}{whose}")
    return f" -> {', '.join(words)}" if words else ""


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
