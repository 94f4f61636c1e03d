"""An experiment's events and its trials' output as lines of text, also while it runs."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from dray.config.schema import ExperimentConfig
from dray.environment import TRACEBACK
from dray.leases.failure import LOG_TAIL, has_users_frames, users_traceback
from dray.records.journal import GrowingJournal
from dray.records.trial_record import flatten, unread_line
from dray.storage.logs import NAME
from dray.text import cut, printable, shown
from dray.training.units import amount
from searchers.domains import searched
from searchers.journal import Journal
from searchers.rows import regular
from searchers.space import Space

POLL_S = 0.3
MAX_LETTERS = 400
"""Most letters of a line of a short error."""
"""How often a growing file is read."""
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
"""The UTC time that begins each line of a trial's output."""
_WHERE = re.compile(r"[^\s:]+ at (.+:\d+ in \S+)")
TRACEBACK_HEAD = "Traceback (most recent call last):\n"
_HEAD_ENDS = re.compile(rf"\n\n(?:{re.escape(TRACEBACK_HEAD)}|{LOG_TAIL})")


class OutputLine(NamedTuple):
    """A line of a trial's output: when it was printed, where, and its place among the lines that were read there."""

    at: str
    rank: int
    file: str
    place: int
    text: str


def log_files(places: Iterable[Path]) -> dict[str, tuple[int, Path]]:
    """The ranks and paths of a trial's logs by name. Sorted by name, a rank's files are in the order of age, with this
    machine's own file last."""
    found = {path.name: path for place in places for path in place.glob("rank_*.log")}
    return {name: (int(match[1]), found[name]) for name in sorted(found) if (match := NAME.fullmatch(name))}


def read_output(
    places: Iterable[Path], starts: Mapping[str, int], *, rank: int | None = None, most: int = -1, final: bool = False
) -> tuple[list[OutputLine], dict[str, int]]:
    """A trial's output, sorted by time.

    Args:
        places: directories with logs of the trial.
        starts: the offset to begin at in each file, in bytes; 0 by default.
        rank: only this rank's output; None: all ranks.
        most: the most bytes to read from each file; -1: all.
        final: whether incomplete last lines are included.

    Returns:
        The lines, and the offsets for the next call.
    """
    lines, ends = list[OutputLine](), dict[str, int]()
    for name, (number, path) in log_files(places).items():
        if rank not in (None, number):
            continue
        with open(path, "rb", opener=regular) as file:
            file.seek(starts.get(name, 0))
            data = file.read(most)
        if not final:
            data = data[: data.rfind(b"\n") + 1] or (data if len(data) == most else b"")  # or an endless line
        ends[name], at = starts.get(name, 0) + len(data), ""
        for place, line in enumerate(data.removesuffix(b"\n").decode(errors="replace").split("\n") if data else ()):
            stamp = STAMP.match(line)
            at = stamp.group() if stamp else at
            lines.append(OutputLine(at, number, name, place, line))
    return sorted(lines, key=lambda one: one.at), ends


def with_ranks(lines: Sequence[OutputLine], ranks: Collection[int]) -> list[str]:
    """The texts of lines; with several ranks, each begins with its rank."""
    return [f"rank {each.rank} | {each.text}" if len(ranks) > 1 else each.text for each in lines]


def trial_lines(*logs: Path, rank: int | None = None) -> Callable[[bool], list[str]]:
    """A function that returns the new lines of a trial's output since its last call, see `read_output`. Its argument
    tells whether incomplete last lines are included."""
    starts: dict[str, int] = {}

    def new(final: bool) -> list[str]:
        nonlocal starts
        lines, starts = read_output(logs, starts, rank=rank, final=final)
        ranks = {number for number, _ in log_files(logs).values()} if rank is None else {rank}
        return with_ranks(lines, ranks)

    return new


def followed(new: Callable[[bool], list[str]], is_running: Callable[[], bool]) -> Iterator[str]:
    """Yield lines as they are written, until their writer has exited. `new` returns the lines since its last call."""
    while is_running():
        yield from new(False)
        time.sleep(POLL_S)
    yield from new(True)  # lines written after the last read


def followed_events(journal: Path, config: ExperimentConfig, known: int) -> Iterator[str]:
    """Yield the lines of a journal after its first `known` records, as it grows, until its driver has exited."""
    growing = GrowingJournal(journal)

    def new(final: bool) -> list[str]:
        nonlocal known
        records, _ = growing.new_records()
        fresh, known = records[known:], max(0, known - len(records))
        return list(event_lines(config, fresh))

    return followed(new, lambda: Journal.writer(journal) is not None)


def event_lines(config: ExperimentConfig, records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A journal in readable form: one line per record, omitting those that only the driver needs."""
    metric, unit, space = config.searcher.first_metric, config.searcher.unit, config.space
    for record in records:
        if (line := _event_line(record, metric, unit, space)) is not None:
            at = record.get("time")
            stamp = "" if at is None else datetime.datetime.fromtimestamp(at).strftime("%b %d %H:%M:%S  ")
            yield stamp + line


def short_error(error: object) -> list[str]:
    """A journaled error in at most three lines: the error, and the line of the user's code that raised it. An error
    from elsewhere is reduced to its last line."""
    head, *rest = _HEAD_ENDS.split(str(error or "").strip(), maxsplit=1)
    # The head of an error with a cause may be the cause's traceback.
    if rest and not head.startswith("Traceback"):
        return [cut(printable(line), MAX_LETTERS) for line in head.splitlines()[:3]]
    lines = str(error or "").strip().splitlines()
    return [cut(printable(lines[-1].strip()), MAX_LETTERS) if lines else "no reason given"]


def users_error(error: str, code: Path) -> str:
    """A journaled error with the frames of the user's code, as `users_traceback`; else as `short_error`. With
    ``DRAY_TRACEBACK``, with all frames."""
    begin = error.find(TRACEBACK_HEAD)
    if begin >= 0 and os.environ.get(TRACEBACK):
        return printable(error[begin:].strip())
    if begin < 0 or not has_users_frames(error[begin:]):
        return "\n".join(short_error(error))
    return printable(users_traceback(error[begin:], code).strip())


class Failure(TypedDict):
    """A failure of a trial."""

    trial: int
    again: bool  # whether the trial was restarted
    why: str | None  # why it was not
    kept: str | None  # the state before an extension that failed
    where: str | None  # the line of the user's code that raised it
    batches: int | None
    error: str | None
    time: float | None


def failure_fields(record: Mapping[str, Any]) -> Failure:
    """A failure, by its record."""
    return {
        "trial": record["trial"],
        "again": record["event"] == "restarted",
        "why": record.get("why"),
        "kept": record.get("kept"),
        "where": record.get("where") or None,
        "batches": record.get("batches"),
        "error": record.get("error"),
        "time": record.get("time"),
    }


def grouped_failures(records: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Failure records by the line of the user's code, or else by the error's first line; the largest group first."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for failure in records:
        kinds.setdefault(kind_of(failure), []).append(failure)
    return sorted(kinds.values(), key=len, reverse=True)


def kind_of(failure: Mapping[str, Any]) -> str:
    """The line of the user's code that raised a failure, or else the error's first line."""
    return str(failure.get("where") or short_error(failure.get("error"))[0])


def where(failure: Mapping[str, Any]) -> str:
    """The line of the user's code that raised a failure, ``model_def.py:14 in __init__``; "" if there is none."""
    found = _WHERE.fullmatch(failure.get("where") or "")
    return found[1] if found else ""


def _event_line(record: Mapping[str, Any], metric: str, unit: str, space: Space) -> str | None:
    trial = f"trial {record.get('trial')}"
    match record.get("event"):
        case "opened":
            return f"driver started, dray {record.get('version')}"
        case "started":
            drawn = flatten(dict(searched(space.root, record.get("hparams") or {})))
            values = (f" {name}={shown(value)}" for name, value in drawn.items())
            return f"{trial} started{':' if drawn else ''}{''.join(values)}"
        case "reported":
            at = amount(shown(record["step"]), unit)
            return f"{trial} at {at}: {metric} {shown(record.get('value'))}{_decided(record)}"
        case "exited":
            return f"{trial} {_ENDED.get(record['reason'], record['reason'])}{_decided(record)}"
        case "restarted":
            return f"{trial} failed, restarting: {short_error(record.get('error'))[0]}"
        case "gave_up":
            why = record.get("why") or short_error(record.get("error"))[0]
            if kept := record.get("kept"):
                return f"the extension of {trial} failed for good, so it is still {kept}: {why}"
            return f"{trial} failed for good: {why}"
        case "damaged":
            return f"{trial} skipped a checkpoint: {record.get('error')}"
        case "failed":
            return f"experiment failed: {record.get('error')}"
        case "unread":
            return unread_line(record["unread"], record["read"]) or "every searched hyperparameter has been read"
        case "new_processes":
            return str(record["text"])
        case "extended":
            wanted = [f"{name} {record[name]}" for name in ("max_trials", "max_length") if record.get(name) is not None]
            return f"search extended: {', '.join(wanted)}"
        case "ended":
            return f"experiment ended: {record['reason']}"
        case "alert":
            return f"alert: {printable(str(record['text']))}"
        case "told" if error := record.get("error"):
            return f"alert could not be sent: {printable(str(error))}"
        case "limits":
            return f"limits changed: {_limits(record)}"
        case "requested":
            return f"requested: {_requested(record)}"
        case "rejected":
            return f"request rejected: {record.get('error')}"
    return None


def _limits(record: Mapping[str, Any]) -> str:
    budget = {name: total for name, total in (record.get("budget") or {}).items() if total is not None}
    given = {f"budget.{name}": total for name, total in budget.items()}
    given |= flatten({"until": record.get("until") or {}})
    given |= flatten({"prices": record.get("prices") or {}})
    given |= {} if record.get("patience") is None else {"patience": record["patience"]}
    return ", ".join(f"{name} {shown(value)}" for name, value in given.items())


def _requested(record: Mapping[str, Any]) -> str:
    if record.get("trial") is not None:
        return f"stop trial {record['trial']}"
    created = next(action["trial"] for action in record["actions"] if action["action"] == "create")
    source = record.get("source")
    begins = "" if source is None else f", from trial {source['trial']} at batch {source.get('batches')}"
    values = flatten(dict(record.get("hparams") or {}))
    return f"trial {created}{begins}{''.join(f', {name}={shown(value)}' for name, value in values.items())}"


_ENDED = {
    "completed": "completed",
    "stopped": "pruned",
    "diverged": "was stopped, because its loss is NaN",
    "errored": "ended with an error",
    "invalid_hp": "has invalid hyperparameters",
    "out_of_memory": "ran out of memory",
    "canceled": "was stopped by a person",
}


def _decided(record: Mapping[str, Any]) -> str:
    """The search's decisions on a record, except to create trials."""
    decided = [action for action in record.get("actions", ()) if action["action"] != "create"]
    words = []
    for action in decided:
        if action["action"] == "done":
            words.append(f"search done ({action['reason']})")
        else:
            whose = "" if action["trial"] == record.get("trial") else f" trial {action['trial']}"
            words.append(f"{action['action']}{whose}")
    repeats = dict.fromkeys(action["repeat"]["trial"] for action in record.get("actions", ()) if action.get("repeat"))
    words += [f"repeat trial {', '.join(map(str, repeats))}"] if repeats else []
    return f" -> {', '.join(words)}" if words else ""
