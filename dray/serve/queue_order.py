"""The order of the queue, why its trials wait, and what a change of shares will do.

Pure. The order is that of priorities, then of submission. Experiments of equal priority share the slots by weight, so
among them the order only says whose turn is first if nothing else does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dray.cluster.view import ClusterView
from dray.config.searcher import SingleSearcher
from dray.groups.capacity import slot_kind
from dray.leases.shares import QUANTUM, TINY, Demand, fits_account
from dray.records.directory import ExperimentDirectory
from dray.serve.scheduler import MAX_PROCESSES, experiment_of
from dray.text import counted, some

FIRST, LAST = 1, 99
"""The range of priorities."""
NAMED = 3  # most experiments that a sentence names


# ---------------------------------------------------------------------------------------------------------- the order
def in_order(priorities: Mapping[str, int]) -> list[str]:
    """The experiments in the order of the queue. `priorities`: in the order of their submission."""
    return sorted(priorities, key=priorities.__getitem__)


def moved(
    priorities: Mapping[str, int],
    name: str,
    before: str | None,
    may: Callable[[str, int], bool] = lambda name, priority: True,
) -> dict[str, int] | None:
    """The new priorities that put an experiment directly before another one, or at the end; None if none do.

    Others keep their order, and change as little as possible: only if two of one priority leave no room between them.
    Among ways that are equal for them, the experiment itself changes by the least.

    Args:
        priorities: of all experiments in the queue, in the order of their submission.
        may: whether an experiment may get a priority.

    >>> moved({"a": 42, "b": 42, "c": 42}, "c", "a"), moved({"a": 42, "b": 42, "c": 42}, "c", "b")
    ({'c': 41}, {'b': 43})
    """
    submitted = {each: number for number, each in enumerate(priorities)}
    order = [each for each in in_order(priorities) if each != name]
    at = len(order) if before is None else order.index(before)
    above, below = order[:at][::-1], order[at:]
    found = []
    for priority in range(FIRST, LAST + 1):
        new = {name: priority}
        last = name
        for each in above:
            new[each] = min(priorities[each], new[last] - (submitted[each] > submitted[last]))
            last = each
        last = name
        for each in below:
            new[each] = max(priorities[each], new[last] + (submitted[last] > submitted[each]))
            last = each
        changes = {each: value for each, value in new.items() if value != priorities[each]}
        if all(FIRST <= value <= LAST and may(each, value) for each, value in changes.items()):
            steps = sum(abs(new[each] - priorities[each]) for each in changes if each != name)
            found.append((steps, abs(priority - priorities[name]), changes))
    return min(found, key=lambda each: each[:2])[2] if found else None


# -------------------------------------------------------------------------------------------------------- why they wait
def why_waits(demand: Demand, demands: Iterable[Demand], given: Mapping[str, int], slots: float, groups: str) -> str:
    """The reason why trials of an experiment wait, in one line.

    Args:
        demands: of all experiments.
        given: how many groups each of them is to have, by `dray.leases.shares.Shares`.
        slots: of the cluster, of the demand's kind, after it has scaled up.
        groups: what its worker groups wait for, if slots are free for them.
    """
    others = [each for each in demands if each.name != demand.name and each.kind == demand.kind and each.groups]
    free = slots - sum(each.has * each.size for each in (*others, demand))
    needs = slots_text(demand.size / demand.unit)
    if given.get(demand.name, 0) > demand.has:
        over = [each for each in others if each.has > given.get(each.name, 0)]
        if free >= demand.size - TINY or not over:
            return groups
        if lower := [each for each in over if each.priority > demand.priority]:
            return f"takes slots of {_named(lower)}, whose trials save first"
        return f"gets slots of {_named(over)} as trials end"
    if demand.max_slots is not None and demand.has >= demand.most:
        return f"at its most slots ({demand.max_slots / demand.unit:g})"
    if demand.size > slots + TINY:
        return f"a trial needs {needs} of {demand.kind.upper()}s, and the cluster has {slots / demand.unit:g}"
    mates = sum(each.has * each.size / each.unit for each in demands if each.account == demand.account)
    if not fits_account(demand, mates):
        return f"token {demand.account} has its most slots ({demand.account_slots:g})"
    if first := [each for each in others if each.priority < demand.priority]:
        first.sort(key=lambda each: each.priority)
        more = f", and {len(first) - 1} more" if len(first) > 1 else ""
        return f"behind {experiment_of(first[0].name)}, which has priority {first[0].priority}{more}"
    if TINY < free < demand.size - TINY:
        return f"a trial needs {needs}, and {free / demand.unit:g} of {slots / demand.unit:g} are free"
    if peers := [each for each in others if each.priority == demand.priority and each.has]:
        if demand.has:
            return f"has its share: {_named(peers)} of the same priority have theirs"
        return f"a trial needs {needs}, which it gets in its turn, as trials of {_named(peers)} end"
    return "it has all slots itself" if demand.has else groups


def slots_text(slots: float) -> str:
    """
    >>> slots_text(1), slots_text(0.25)
    ('1 slot', '0.25 slots')
    """
    return counted(round(slots, 6), "slot", "g")


def named(names: Sequence[str]) -> str:
    """
    >>> named(["a"]), named(["a", "b"]), named(["a", "b", "c", "d", "e"])
    ('a', 'a and b', 'a, b, c and 2 more')
    """
    if len(names) > NAMED:
        return some(names, NAMED)
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + list(names[-1:]))


def _named(demands: Iterable[Demand]) -> str:
    return named([experiment_of(each.name) for each in demands])


# ------------------------------------------------------------------------------------------------ what a change does
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An experiment's part of the slots, as the shares divide them."""

    slots: float  # that it is to have
    has: float
    priority: int
    first: tuple[float, ...] | None  # the order of those that wait for a free slot; None: it waits for none
    is_up: bool  # its process is connected; else its demand is a guess, from its config


def effects_of(now: Mapping[str, Part], then: Mapping[str, Part], changed: Collection[str]) -> list[str]:
    """Sentences about what changes. `now`, `then`: without and with the change."""
    gains = {
        name: (then[name].slots if name in then else 0.0) - (now[name].slots if name in now else 0.0)
        for name in {**then, **now}
    }
    yielding = [name for name, part in then.items() if part.has > part.slots + TINY]
    lines = []
    for name in [name for name, gain in gains.items() if gain > TINY]:
        part, lower = then[name], [each for each in yielding if then[each].priority > then[name].priority]
        how = ""
        if part.slots > part.has + TINY and lower:
            how = f", at once: trials of {named(lower)} save, leave, and continue later"
        elif part.slots > part.has + TINY and yielding:
            how = f", as trials of {named(yielding)} end"
        guess, start = ("", "") if part.is_up else ("up to ", "; its process starts first, which takes seconds")
        lines.append(f"{name} {_steps(part, guess)}{how}{start}.")
    losers = {name: then.get(name) or replace(now[name], slots=0.0) for name, gain in gains.items() if gain < -TINY}
    lines += [f"{name} {_steps(part)}." for name, part in losers.items() if part.has]
    if wait := [name for name, part in losers.items() if not part.has]:
        lines.append(f"{named(wait)} {'waits' if len(wait) == 1 else 'wait'} longer.")
    if not lines:
        lines.append("No slots move now.")
    before, first = (next_of({name: part.first for name, part in parts.items()}) for parts in (now, then))
    if first is not None and (first != before or (first in changed and len(lines) == 1)):
        lines.append(f"{first} gets the next free slot.")
    return lines


def _steps(part: Part, guess: str = "") -> str:
    if abs(part.slots - part.has) <= TINY:
        return f"keeps {slots_text(part.has)}"
    return f"goes from {part.has:g} to {guess}{slots_text(part.slots)}"


def order_of(demand: Demand, had: float) -> tuple[float, ...] | None:
    """The place of a demand among those that wait for a slot, as the desk grants them; None if it can't use one."""
    if demand.has >= demand.most:
        return None
    return (demand.priority, had + QUANTUM * demand.has * demand.size / demand.weight)


def next_of(waiting: Mapping[str, tuple[float, ...] | None]) -> str | None:
    """The experiment that gets the next free slot. `waiting`: the place of each, from `order_of`."""
    places = [(place, name) for name, place in waiting.items() if place is not None]
    return min(places)[1] if places else None


def ties(order: Sequence[str], priorities: Mapping[str, int], name: str) -> str:
    """A sentence about those with which an experiment shares its priority, and so the slots; "" if it has its own."""
    mates = [each for each in order if each != name and priorities[each] == priorities[name]]
    if not mates:
        return ""
    what = f"{name} has priority {priorities[name]}, as {named(mates)}"
    return f"{what}: they share the slots by weight, whatever their order."


def guessed(path: Path, view: ClusterView) -> Demand | None:
    """The demand of an experiment without a process, by its config; None if that can't be read."""
    try:
        config = ExperimentDirectory(path).config()
    except (OSError, ValueError):
        return None
    asked, searcher = config.resources, config.searcher
    kind = slot_kind(asked.slot, view) or "gpu"
    unit = 1 if kind == "gpu" else asked.cpus_per_slot
    taken = config.slots_per_trial[0] / asked.trials_per_slot
    limits = (getattr(searcher, name, 0) for name in ("max_trials", "max_concurrent_trials"))
    groups = (
        1 if isinstance(searcher, SingleSearcher) else min((each for each in limits if each), default=MAX_PROCESSES)
    )
    return Demand(name=f"{path.name}-guess", groups=groups, size=taken * unit, kind=kind, unit=unit, shape="guess")
