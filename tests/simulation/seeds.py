"""Runs schedules by their seeds."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.simulation import alone, commit, served, whole
from tests.simulation.schedule import Schedule, drawn

Kind = Literal["alone", "commit", "whole"]
_MEMORY = Path("/dev/shm")
_ROOT = Path(tempfile.mkdtemp(prefix="dray-simulation-", dir=_MEMORY if _MEMORY.is_dir() else None))
atexit.register(shutil.rmtree, _ROOT, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """What determines a schedule.

    Attributes:
        options: see `tests.simulation.schedule.drawn`.
        preempt_in: the ends of names of files between whose lines threads are interrupted too.
    """

    number: int
    kind: Kind
    options: frozenset[str] = frozenset()
    preempt_in: tuple[str, ...] = ()

    def schedule(self) -> Schedule:
        return drawn(self.number, self.options)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a schedule has given. `why`: its failure, or ""; `lines`: its log."""

    why: str
    steps: int = 0
    switches: int = 0
    digest: int = 0
    lines: list[str] = field(default_factory=list)


def outcome_of(seed: Seed, schedule: Schedule | None = None, *, logs: bool = False) -> Outcome:
    """Run a schedule; by default, that of the seed."""
    lines: list[str] | None = [] if logs else None
    root = _ROOT / f"{os.getpid():08d}"  # in memory: a disk would be slow
    options: dict[str, Any] = {"lines": lines, "preempt_in": seed.preempt_in}
    if seed.kind == "commit":
        world: Any = commit.World(seed.number, root, **options)
    elif seed.kind == "alone":
        world = alone.Alone(schedule or seed.schedule(), root, **options)
    else:
        schedule = schedule or seed.schedule()
        world = (served.Served if schedule.server else whole.World)(schedule, root, **options)
    why = ""
    try:
        world.run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
    finally:
        world.clean()
    kernel = world.kernel
    return Outcome(why=why, steps=kernel.steps, switches=kernel.switches, digest=kernel.digest, lines=lines or [])


def failure_of(number: int, kind: Kind, **options: bool) -> str:
    """Run the schedule of a seed, and return the failure, or ""."""
    return outcome_of(Seed(number=number, kind=kind, options=frozenset(options))).why


def shrunk(seed: Seed, schedule: Schedule, *, at_most: int = 100) -> Schedule:
    """Return a smaller failing schedule. `at_most`: the number of schedules to try."""
    found = True
    while found and at_most > 0:
        found = False
        for smaller in schedule.smaller():
            at_most -= 1
            if outcome_of(seed, smaller).why:
                schedule, found = smaller, True
                break
            if at_most <= 0:
                break
    return schedule
