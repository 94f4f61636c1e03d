"""The timeline of the worker groups: written by the driver, read as one table.

The driver records when a group starts, is up, is leased to a trial, and is free again. Workers report the seconds that
their trial spent in each phase (`dray.training.usage`). Together they give a sequence of phases for each group.
"""

from __future__ import annotations

import contextlib
import json
import time
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dray.records.spending import FILE, Spending, check
from searchers import rows

PHASES = ("starting", "training", "data", "validating", "checkpointing", "waiting", "ending", "idle", "booting")
"""Phases of a trial: "starting", before its first batch; "data", waiting for data; "waiting", for the search's
decisions and for other ranks; "ending", from its last report to its end. Phases of a group: "idle", up without a trial;
"booting", its processes are starting."""
COLUMNS = ("group", "slots", "trial_id", "phase", "start", "end", "gpu_type")


class Timeline:
    """Records the events of groups in `directory`; used only by the experiment's driver.

    Args:
        lent: whether a server lends the groups.
        spending: what earlier runs have spent; each event is added to it.
    """

    def __init__(self, directory: Path, *, lent: bool = False, spending: Spending | None = None) -> None:
        self._slots: dict[str, float] = {}  # by group
        self._trains: set[str] = set()  # groups that have a trial
        path = directory / FILE
        rows.cut_incomplete(path)
        self._file = path.open("ab")
        self.spending = spending or Spending()
        self._note("opened", **({"lent": True} if lent else {}))

    def starts(self, group: str, slots: float, at: float | None = None) -> None:
        """A group with this many slots, or a fraction of one, is being started, or is lent by a server."""
        self._slots[group] = slots
        self._note("starts", at, group=group, slots=slots)

    def ends(self, group: str, at: float | None = None) -> None:
        """A group has ended, or is returned to the server."""
        self._slots.pop(group, None)
        self._trains.discard(group)
        self._note("ends", at, group=group)

    def alive(self) -> None:
        """The run goes on: a run that is killed counts up to this time."""
        self._note("alive")

    def arrived(self, group: str, at: float) -> None:
        """A process of a group runs, so that the group has its slots."""
        self._note("arrived", at, group=group)

    def ready(self, group: str, at: float) -> None:
        """All processes of a group were up at this time (Unix time in s)."""
        self._note("joined", at, group=group)

    def granted(self, group: str, trial: int, at: float, *, gpu_type: str = "", slot_type: str = "") -> None:
        """A trial has a group. `slot_type`: as in the config's prices."""
        self._trains.add(group)
        known = {"gpu_type": gpu_type, "slot_type": slot_type}
        self._note("granted", at, group=group, trial=trial, **{name: kind for name, kind in known.items() if kind})

    def left(self, group: str, trial: int, at: float) -> None:
        self._trains.discard(group)
        self._note("left", at, group=group, trial=trial)

    @property
    def busy_slots(self) -> float:
        """Slots of the groups that have a trial."""
        return sum(self._slots.get(group, 0) for group in self._trains)

    def close(self) -> None:
        """The run has ended. Idempotent."""
        if not self._file.closed:
            self._note("closed")
            self._trains.clear()
            with contextlib.suppress(OSError):
                self._file.close()

    def _note(self, event: str, at: float | None = None, **fields: Any) -> None:
        record = {"event": event, "time": time.time() if at is None else at, **fields}
        self.spending.add(record)
        with contextlib.suppress(OSError):  # a full disk; a later event writes the buffer
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()


def read_timeline(directory: Path, system: pd.DataFrame) -> pd.DataFrame:
    """One row per phase: group, slots, trial_id (-1 without one), phase (one of `PHASES`), start, end (Unix time in s),
    gpu_type (Ray's name; "" without a GPU, or if unknown).

    Args:
        directory: the directory of the metrics.
        system: the result of `dray.records.metrics.read_system`. A trial's report covers at most five seconds, and
            becomes one row for each of its phases, in the order of `PHASES`.
    """
    reports, times = _Reports(system), sorted(system["time"].unique())
    found = [row for stretch in _stretches(_events(directory), times) for row in reports.split(stretch)]
    slots = "float64" if any(isinstance(row[1], float) for row in found) else "int64"
    return pd.DataFrame(found, columns=list(COLUMNS)).astype({"slots": slots, "trial_id": "int64"})


def leases(directory: Path, times: Iterable[float]) -> dict[int, list[tuple[float, float, float]]]:
    """When each trial had its slots: pairs of start and end (Unix time in s), with the number of slots, in order.

    Args:
        directory: the directory of the metrics.
        times: those of the trials' reports; a lease whose end is not known lasts up to the last one.
    """
    found: dict[int, list[tuple[float, float, float]]] = {}
    for _, slots, trial, phase, start, end, _ in _stretches(_events(directory), sorted(set(times))):
        if trial >= 0 and not phase:
            found.setdefault(trial, []).append((start, end, slots))
    return found


def slot_seconds(held: Sequence[tuple[float, float, float]], times: Sequence[float]) -> list[float]:
    """How much slot time a trial had taken at each of some times, in slot-seconds; `held`: its leases.

    >>> slot_seconds([(10.0, 20.0, 2), (50.0, 60.0, 2)], [15.0, 30.0, 55.0])
    [10.0, 20.0, 30.0]
    """
    return [sum(slots * min(max(time - start, 0.0), end - start) for start, end, slots in held) for time in times]


def gpu_types(directory: Path) -> dict[int, str]:
    """The GPU types that each trial ran on, in order, as text; {} if all are unknown."""
    found: dict[int, dict[str, None]] = {}
    for event in _events(directory, b'"gpu_type"'):
        if event.get("gpu_type"):
            found.setdefault(event["trial"], {})[event["gpu_type"]] = None
    return {trial: ", ".join(types) for trial, types in found.items()}


def _events(directory: Path, containing: bytes = b"") -> list[dict[str, Any]]:
    path = directory / FILE
    return rows.lenient(rows.read(path, missing=b""), path, check, containing=containing)


_Row = tuple[str, float, int, str, float, float, str]


def _stretches(events: list[dict[str, Any]], report_times: list[float]) -> Iterator[_Row]:
    """The states of each group: booting, idle, or leased to a trial (phase ""). `report_times`: the sorted times of the
    trials' reports."""
    groups: dict[str, tuple[float, int, str, float]] = {}  # slots, trial, phase, since
    now = 0.0
    of_starts, gpu_type = _gpu_types_of_starts(events), dict[str, str]()

    def end(group: str) -> Iterator[_Row]:
        slots, trial, phase, since = groups.pop(group)
        if now > since:
            yield group, slots, trial, phase, since, now, gpu_type.get(group, "")

    for number, event in enumerate(events):
        if event["event"] == "opened":
            # If the previous run was killed, the last trial's report may be its last known time.
            now = max([now, *report_times[: bisect(report_times, event["time"])][-1:]])
            for one in list(groups):
                yield from end(one)
            continue
        # The desk and the driver may be on two machines, with different clocks.
        now, group = max(now, event["time"]), event.get("group", "")
        slots, trial, *_ = groups.get(group, (event.get("slots") or 1, -1))
        match event["event"]:
            case "closed":
                for one in list(groups):
                    yield from end(one)
                continue
            case "left" if trial != event.get("trial"):
                continue
            case "alive" | "arrived":
                continue
        if group in groups:
            yield from end(group)
        match event["event"]:
            case "starts":
                groups[group], gpu_type[group] = (slots, -1, "booting", now), of_starts[number]
            case "joined" | "left":
                groups[group] = (slots, -1, "idle", now)
            case "granted":
                groups[group] = (slots, event["trial"], "", now)
    now = max([now, *report_times[-1:]])
    for one in list(groups):
        yield from end(one)


def _gpu_types_of_starts(events: list[dict[str, Any]]) -> dict[int, str]:
    """The GPU type of each start, by its index among the events; it is known from the group's first trial on."""
    found, later = dict[int, str](), dict[str, str]()
    for number, event in reversed(list(enumerate(events))):
        if event.get("gpu_type"):
            later[event["group"]] = event["gpu_type"]
        elif event["event"] == "starts":
            found[number] = later.pop(event["group"], "")
    return found


class _Reports:
    """The trials' reports of their time, sorted: the time, and the seconds in each phase since the previous report."""

    def __init__(self, system: pd.DataFrame) -> None:
        found: dict[int, dict[float, dict[str, float]]] = {}
        phases = system[system["name"].isin([f"{phase}_s" for phase in PHASES])]
        columns = (phases[name].tolist() for name in ("trial_id", "time", "name", "value"))
        for trial, at, name, value in zip(*columns, strict=True):
            found.setdefault(trial, {}).setdefault(at, {})[name.removesuffix("_s")] = value
        self._by_trial = {trial: sorted(seconds.items(), key=lambda item: item[0]) for trial, seconds in found.items()}

    def split(self, stretch: _Row) -> Iterator[_Row]:
        group, slots, trial, phase, since, end, gpu = stretch
        if phase:
            yield stretch
            return
        samples = [sample for sample in self._by_trial.get(trial, []) if since < sample[0] <= end]
        cursor, first = since, True
        for at, seconds in samples:
            reported_s = sum(seconds.values())
            begin = max(cursor, at - reported_s)
            if begin > cursor:
                yield group, slots, trial, "starting" if first else "waiting", cursor, begin, gpu
            cursor, first = begin, False
            for phase in PHASES:
                if share := seconds.get(phase, 0.0):
                    until = min(at, cursor + share * (at - begin) / reported_s)
                    yield group, slots, trial, phase, cursor, until, gpu
                    cursor = until
        if end > cursor:
            yield group, slots, trial, "starting" if first else "ending", cursor, end, gpu
