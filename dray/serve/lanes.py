"""Which slot trained which trial, and when: the lanes of the queue's page.

A lane is one GPU or CPU of the cluster. A worker group takes as many lanes as it has slots, or a part of one, from the
arrival of its processes to their end; the numbers are the server's own. Pure, with a given clock: `ServerCore` passes
every effect, and `keep` gets a record of each trial that has left its lanes, for the next server.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dray.groups.effects import EndGroup, StartGroup
from dray.groups.lender import OnPool
from dray.groups.slots import Slots
from dray.leases.effects import Tell
from dray.leases.messages import GroupEnded, GroupFreed, GroupReady, LeaseGranted, LeaseOver, TrialLeft, WorkerArrived
from dray.serve.control import Bar, Lane, LanesView
from dray.serve.scheduler import experiment_of
from searchers import rows
from searchers.errors import DamagedFile
from searchers.rows import NUMBER, has_fields

MAX_BARS = 4000  # most trials that have left their lanes and are remembered
KEEP_S = 24 * 3600  # how long they are at most
PIXELS = 1200
"""A view's length in pixels, about: trials shorter than one are shown together."""
MAX_LANES = 256  # most lanes that a view lists; more are counted


FIELDS = tuple(each.name for each in fields(Bar))
_has_fields = has_fields(
    {"experiment": (str,), "trial": (int,), "kind": (str,), "lanes": (list,), "part": (int,), "parts": (int,)}
    | {"began": NUMBER, "ended": NUMBER, "outcome": (str,), "trials": (int,)}
)


def _is_bar(record: Any) -> str:
    if what := _has_fields(record):
        return what
    if more := record.keys() - FIELDS:
        return f"{min(more)} is not a field"
    return "" if all(type(lane) is int for lane in record["lanes"]) else f"lanes is {record['lanes']!r:.60}"


@dataclass(slots=True)
class _Group:
    """A worker group's start."""

    start: int
    slots: Slots
    lanes: list[int] = field(default_factory=list)  # [] until its processes have arrived
    part: int = 0
    since: float = 0.0  # when they arrived
    ready: bool = False  # it has been able to train


class Lanes:
    """The record. `kept`: the records of earlier servers."""

    def __init__(
        self,
        kept: Iterable[Mapping[str, Any]] = (),
        keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keep, self._clock = keep, clock
        self._since = clock()
        self._bars = deque((Bar(**each) for each in kept), maxlen=MAX_BARS)  # in the order of their ends
        self.live: dict[int, Bar] = {}  # by the lease's number
        self._groups: dict[str, _Group] = {}
        self._left_at = {(bar.kind, lane): bar.ended for bar in self._bars for lane in bar.lanes}
        """When a trial has last left each lane."""

    # ------------------------------------------------------------------ events
    def on(self, effect: Any) -> None:
        """Note an effect of the server's decisions, if it is about groups or leases."""
        match effect:
            case OnPool(_, StartGroup(group=name, start=start, slots=slots)):
                self._groups[name] = _Group(start, slots)
            case OnPool(_, EndGroup(group=name, start=start)) | Tell(_, GroupEnded(group=name, start=start)):
                if (group := self._groups.get(name)) is not None and group.start == start:
                    del self._groups[name]
            case Tell(_, WorkerArrived(group=name)):
                self._sit(name)
            case Tell(_, GroupReady(group=name)):
                self._sit(name, ready=True)
            case Tell(client, LeaseGranted(group=name, lease=lease, trial=trial)):
                # The groups' owner gets the message too, second.
                if lease not in self.live and (group := self._sit(name, ready=True)) is not None:
                    self.live[lease] = Bar(
                        experiment=experiment_of(client),
                        trial=trial,
                        kind=group.slots.kind,
                        lanes=group.lanes,
                        part=group.part,
                        parts=group.slots.shared_by,
                        began=self._clock(),
                    )
            case Tell(_, TrialLeft(lease=lease, outcome=outcome)):
                if (bar := self.live.get(lease)) is not None:
                    bar.outcome = outcome
            case Tell(_, GroupFreed(lease=lease) | LeaseOver(lease=lease) as message):
                if (bar := self.live.get(lease)) is None:
                    return
                if bar.ended is None:
                    bar.ended = self._clock()
                    self._left_at |= {(bar.kind, lane): bar.ended for lane in bar.lanes}
                if isinstance(message, LeaseOver):
                    self._bars.append(self.live.pop(lease))
                    self._keep(asdict(bar))

    def _sit(self, name: str, *, ready: bool = False) -> _Group | None:
        """Give a group its lanes, if it has none: the first free ones."""
        if (group := self._groups.get(name)) is None:
            return None
        group.ready = group.ready or ready
        if not group.lanes:
            mates = [each for each in self._groups.values() if each.lanes and each.slots.kind == group.slots.kind]
            group.lanes, group.part = _seat(group.slots, mates)
            group.since = self._clock()
        return group

    # ------------------------------------------------------------------ what is known
    def bars(self, since: float) -> list[Bar]:
        """The trials that were on a lane after `since`, those that still are last."""
        return [each for each in self._bars if (each.ended or 0) > since] + list(self.live.values())

    def view(self, seconds: float, slots: Mapping[str, float]) -> LanesView:
        """The lanes in the last `seconds`. `slots`: of the cluster, by kind."""
        now = self._clock()
        since = now - min(seconds, KEEP_S)
        bars = self.bars(since)
        since = max(since, min([self._since, *(bar.began for bar in bars)]))
        if len(self._bars) == MAX_BARS:  # older ones may be missing
            since = max(since, self._bars[0].ended or since)
        is_gpu = slots.get("gpu", 0) > 0  # then a slot is a GPU, and CPUs are listed as far as trials have used them
        lanes = [
            self._lane(kind, lane)
            for kind, count in slots.items()
            for lane in range(max(self._used(kind, bars), 0 if kind == "cpu" and is_gpu else int(count)))
        ]
        return {
            "now": now,
            "from": since,
            "since": self._since,
            "lanes": lanes[:MAX_LANES],
            "more_lanes": max(0, len(lanes) - MAX_LANES),
            "bars": merged(bars, (now - since) / PIXELS),
        }

    def _used(self, kind: str, bars: Iterable[Bar]) -> int:
        """The number of lanes of this kind that these trials, or groups that are up, have used."""
        groups = (each.lanes for each in self._groups.values() if each.slots.kind == kind)
        mine = (bar.lanes for bar in bars if bar.kind == kind)
        return max((max(lanes) + 1 for lanes in itertools.chain(mine, groups) if lanes), default=0)

    def _lane(self, kind: Any, lane: int) -> Lane:
        if any(bar.kind == kind and lane in bar.lanes and bar.ended is None for bar in self.live.values()):
            return {"kind": kind, "lane": lane, "state": "training", "since": None}
        groups = [each for each in self._groups.values() if each.slots.kind == kind and lane in each.lanes]
        if groups and not any(each.ready for each in groups):
            return {"kind": kind, "lane": lane, "state": "starting", "since": min(each.since for each in groups)}
        since = max(self._left_at.get((kind, lane)) or 0.0, self._since)
        return {"kind": kind, "lane": lane, "state": "idle", "since": since}


def _seat(slots: Slots, mates: Iterable[_Group]) -> tuple[list[int], int]:
    """Lanes for a new group, and its part of them. Groups that share a slot sit on the same lanes."""
    mates = list(mates)
    if slots.shared_by > 1:
        rooms: dict[tuple[int, ...], set[int]] = {}
        for each in mates:
            if (each.slots.shared_by, each.slots.unit) == (slots.shared_by, slots.unit):
                rooms.setdefault(tuple(each.lanes), set()).add(each.part)
        for lanes, parts in rooms.items():
            if len(parts) < slots.shared_by:
                return list(lanes), next(part for part in itertools.count() if part not in parts)
    taken = {lane for each in mates for lane in each.lanes}
    free = (lane for lane in itertools.count() if lane not in taken)
    return list(itertools.islice(free, math.ceil(slots.per_trial * slots.unit))), 0


def _is_short(bar: Bar, least: float) -> bool:
    return bar.ended is not None and bar.ended - bar.began < least


def merged(bars: Iterable[Bar], least: float) -> list[Bar]:
    """These bars, with those that are shorter than `least` seconds joined to their neighbours of the same experiment,
    if less than that is between them. `trials` counts them."""
    found: list[Bar] = []
    last: dict[tuple[str, tuple[int, ...], int], Bar] = {}  # by place
    for bar in bars:
        place = (bar.kind, tuple(bar.lanes), bar.part)
        before = last.get(place)
        if before is not None and before.experiment == bar.experiment and _is_short(bar, least):
            was_short = before.trials > 1 or _is_short(before, least)
            if was_short and before.ended is not None and bar.began - before.ended < least:
                before.ended, before.trials = bar.ended, before.trials + bar.trials
                continue
        last[place] = bar = replace(bar)
        found.append(bar)
    return found


class LaneFile:
    """Keeps the records in a file, which never has more than about twice `MAX_BARS`. A full disk loses some."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.kept = self._read()
        self._rewrite()

    def _read(self) -> list[dict[str, Any]]:
        try:
            found = rows.lenient(rows.read(self._path, missing=b""), self._path, _is_bar)
        except DamagedFile as error:  # the next server has lanes again
            rows.say(str(error))
            return []
        return [each for each in found if each["ended"] > time.time() - KEEP_S][-MAX_BARS:]

    def _rewrite(self) -> None:
        self._lines = len(self.kept)
        with contextlib.suppress(OSError):
            self._path.write_text("".join(f"{json.dumps(each)}\n" for each in self.kept), encoding="utf-8")

    def keep(self, record: Mapping[str, Any]) -> None:
        """Append a record."""
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(record)}\n")
        self._lines += 1
        if self._lines > 2 * MAX_BARS:
            self.kept = self._read()
            self._rewrite()
