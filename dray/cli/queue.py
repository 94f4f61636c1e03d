"""``dray experiment pause``, ``activate``, ``kill`` and ``set``, which need a server, and ``wait``, which does not."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any

import typer

from dray.cli import server
from dray.cli.arguments import ExperimentArg
from dray.cli.errors import FAILED, SOME_FAILED, BadUse
from dray.serve.control import Verb
from dray.text import counted

POLL_S = 0.3

sets = typer.Typer(help="Change an experiment's share of the slots, its tags or its notes.", no_args_is_help=True)


def pause(experiment: ExperimentArg) -> None:
    """Pause an experiment on the server, running or queued. Its running trials save a checkpoint first.

    \b
    dray experiment pause latest
    """
    _act(experiment, "pause", without="stop", then="continue it with: dray experiment activate {}")


def activate(experiment: ExperimentArg) -> None:
    """Queue a paused or stopped experiment on the server again; it continues where it left off.

    \b
    dray experiment activate latest
    """
    _act(experiment, "activate", without="resume", then="follow it with: dray experiment logs {} -f")


def kill(experiment: ExperimentArg) -> None:
    """End an experiment on the server at once. Its running trials lose all training since their last checkpoints.

    \b
    dray experiment kill latest
    """
    _act(experiment, "kill", without="stop", then="continue it with: dray experiment activate {}")


def wait(experiment: ExperimentArg) -> None:
    """Wait until an experiment has ended, and exit as create would: 0, 1 if it failed or was stopped, 3 if some of its
    trials failed.

    \b
    dray experiment wait latest && dray report latest
    """
    found = server.find(experiment)
    if found is not None:
        server.wait(*found)
        server.finish(*found, summary=False)
        return
    from dray.records.listing import open_experiment
    from dray.records.overview import COMPLETED
    from searchers.journal import Journal

    with open_experiment(experiment) as stored:
        if stored.is_copy:
            raise BadUse(f"{stored.where} is in an object store; wait for it on the machine of its driver")
        while Journal.writer(stored.directory.journal) is not None:
            time.sleep(POLL_S)
        seen = stored.overview()
    if seen.state not in COMPLETED:
        server.tell(f"dray: {seen.name} is {seen.state}")
        raise typer.Exit(FAILED)
    if seen.failed:
        raise typer.Exit(SOME_FAILED)


@sets.command()
def priority(
    experiment: ExperimentArg,
    value: Annotated[int, typer.Argument(metavar="PRIORITY", help="1 to 99; smaller numbers go first.", min=1, max=99)],
) -> None:
    """Set an experiment's priority: smaller numbers go first, and take the slots of others at once.

    \b
    dray experiment set priority latest 10
    """
    _set(experiment, priority=value)


@sets.command()
def weight(
    experiment: ExperimentArg,
    value: Annotated[float, typer.Argument(metavar="WEIGHT", help="More than 0; by default, 1.")],
) -> None:
    """Set an experiment's weight: its share of the slots relative to experiments of the same priority.

    \b
    dray experiment set weight latest 2
    """
    if not 0 < value < math.inf:
        raise BadUse(f"WEIGHT must be a number > 0, got {value:g}")
    _set(experiment, weight=value)


@sets.command(name="max-slots")
def max_slots(
    experiment: ExperimentArg,
    value: Annotated[str, typer.Argument(metavar="SLOTS", help="Maximum number of slots, or 'none'.")],
) -> None:
    """Limit the number of slots that an experiment's trials use together.

    \b
    dray experiment set max-slots latest 4
    """
    if value != "none" and not (value.isdecimal() and int(value) > 0):
        raise BadUse(f"SLOTS must be an integer from 1, or 'none' for no limit, got {value!r}")
    _set(experiment, max_slots=None if value == "none" else int(value))


@sets.command()
def tags(
    experiment: ExperimentArg,
    values: Annotated[
        list[str] | None, typer.Argument(metavar="[TAG]...", help="New tags; without any, all tags are removed.")
    ] = None,
) -> None:
    """Set an experiment's tags, which the page shows and searches.

    \b
    dray experiment set tags latest baseline paper
    """
    done = server.must(experiment, lambda at, name: at.change(name, tags=values or []))
    server.tell(f"{done.name}: {counted(len(done.tags), 'tag')}{': ' if done.tags else ''}{', '.join(done.tags)}")


@sets.command()
def notes(
    experiment: ExperimentArg,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="New notes; '' removes them.")],
) -> None:
    """Set an experiment's notes, which the page shows.

    \b
    dray experiment set notes latest "the baseline of the paper"
    """
    done = server.must(experiment, lambda at, name: at.change(name, notes=text))
    server.tell(f"{done.name}: notes {'set' if done.notes else 'removed'}")


def _act(experiment: str, verb: Verb, *, without: str, then: str) -> None:
    """Call a verb of the server, and print the state and what to do then; ``{}`` in ``then`` is the experiment."""
    done, typed = server.must(experiment, lambda at, name: (at.act(name, verb), at.typed(name)), without=without)
    server.tell(f"{done.name} is {done.state}; {then.format(typed)}")


def _set(experiment: str, **change: Any) -> None:
    done = server.must(experiment, lambda at, name: at.change(name, **change))
    share = done.share
    most = "no limit of slots" if share.max_slots is None else "at most " + counted(share.max_slots, "slot")
    server.tell(f"{done.name}: priority {share.priority}, weight {share.weight:g}, {most}")
