"""``dray experiment set``, which needs a server."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from dray.cli import server
from dray.cli.arguments import ExperimentArg
from dray.cli.errors import BadUse
from dray.text import counted

sets = typer.Typer(help="Change the share, the tags or the notes of an experiment on a server.", no_args_is_help=True)


@sets.command()
def priority(
    experiment: ExperimentArg,
    value: Annotated[int, typer.Argument(metavar="PRIORITY", help="1 to 99; smaller numbers go first.", min=1, max=99)],
) -> None:
    """Set the priority of an experiment on a server: smaller numbers go first, and take the slots of others at once.

    \b
    dray experiment set priority latest 10
    """
    _set(experiment, priority=value)


@sets.command()
def weight(
    experiment: ExperimentArg,
    value: Annotated[float, typer.Argument(metavar="WEIGHT", help="A number above 0; by default, 1.")],
) -> None:
    """Set the weight of an experiment on a server: its share of slots, relative to others of the same priority.

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
    """Limit the number of slots that the trials of an experiment on a server use together.

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
    """Set the tags of an experiment on a server, which the page shows and searches.

    \b
    dray experiment set tags latest baseline paper
    """
    done = server.change(experiment, tags=values or [])
    server.tell(f"{done.name}: {counted(len(done.tags), 'tag')}{': ' if done.tags else ''}{', '.join(done.tags)}")


@sets.command()
def notes(
    experiment: ExperimentArg,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="New notes; '' removes them.")],
) -> None:
    """Set the notes of an experiment on a server, which the page shows.

    \b
    dray experiment set notes latest "the baseline of the paper"
    """
    done = server.change(experiment, notes=text)
    server.tell(f"{done.name}: notes {'set' if done.notes else 'removed'}")


def _set(experiment: str, **change: Any) -> None:
    done = server.change(experiment, **change)
    share = done.share
    most = "no limit of slots" if share.max_slots is None else "at most " + counted(share.max_slots, "slot")
    server.tell(f"{done.name}: priority {share.priority}, weight {share.weight:g}, {most}")
