"""``dray diff``."""

from __future__ import annotations

from contextlib import ExitStack
from json import dumps as to_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Json, SideArg
from dray.cli.errors import BadUse
from dray.cli.reader import ReadExperiment, read_experiment
from dray.text import counted, printable, shown

if TYPE_CHECKING:
    from dray.exact.parting import Parting
    from dray.records.difference import Side

NAMES = 8
"""Most names of differing values that are printed for people."""
CODE_LINES = 400
"""Most lines of a diff of code that are printed for people."""


def diff(
    a: SideArg,
    b: SideArg,
    exact: Annotated[
        bool, typer.Option("--exact", help="Run both trials again, and show the first batch at which they part.")
    ] = False,
    batches: Annotated[
        int | None, typer.Option(help="With --exact, compare at most this many batches.", min=1, show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Show how two experiments or trials differ: config, code, hyperparameters, versions, data and metrics.

    Each side is a trial, as EXPERIMENT/TRIAL, or an EXPERIMENT, which stands for its best trial.

    \b
    dray diff 11 12
    dray diff latest/7 latest/best
    dray diff digits-1 latest --json | jq '.config[].path'
    dray diff 11 12 --exact --batches 100
    """
    if batches is not None and not exact:
        raise BadUse("--batches limits what --exact compares; give both")
    from dray.records import difference

    with ExitStack() as stack:
        opened: dict[str, ReadExperiment] = {}
        sides = [_side(stack, each, opened) for each in (a, b)]
        names = [name for name, _ in sides]
        one, other = (side for _, side in sides)
        parting = None
        if exact:
            from dray.exact.parting import find_parting

            parting = find_parting(one, other, batches)
        found, code = difference.differences(one, other), difference.code_difference(one, other)
        if json:
            show.as_json({**found, "diff": "\n".join(code), "exact": parting})
            return
        fields = {name: found[name] for name in ("config", "hyperparameters", "versions", "data")}
        metrics, compared = found["metrics"], found["comparison"]
        titles = [f"{letter}: {name}" for letter, name in zip("ab", names, strict=True)]
        rows = [
            (name, each["path"], *(to_json(each[side], default=str) if side in each else "-" for side in ("a", "b")))
            for name, differences in fields.items()
            for each in differences
        ]
        if rows:
            headings = ("", "field", *titles)
            show.table(headings, rows, left=headings)
        else:
            typer.echo(f"{titles[0]}, {titles[1]}")
        same = [name for name in fields if not fields[name] and _is_known(name, one, other)]
        show.fields(
            [
                ("the same", ", ".join([*same, *([] if code else ["code"])])),
                ("unknown", ", ".join(name for name in fields if not _is_known(name, one, other))),
                (f"best {one.reader.metric}", _best(one, other)),
                ("difference", "" if compared is None else str(compared)),
            ]
        )
        if metrics:
            typer.echo()
            table = [(each.kind, each.name, each.batches, each.a, each.b, each.difference) for each in metrics]
            show.table(("kind", "metric", "batches", "a", "b", "b - a"), table, left=("kind", "metric"))
        if parting is not None:
            typer.echo()
            show.lines(_parting_lines(parting))
        if code:
            typer.echo()
            show.lines([printable(line) for line in code[:CODE_LINES]])
        if len(code) > CODE_LINES:
            typer.echo(f"... {len(code) - CODE_LINES:,} more lines: --json has all", err=True)


def _parting_lines(parting: Parting) -> list[str]:
    since = "from the start" if not parting.begin else f"from the checkpoint at batch {parting.begin}"
    if parting.at is None:
        return [f"run again {since}: all {counted(parting.batches, 'batch', ',')} are the same, bit by bit"]
    same = "" if parting.batches == 1 else f" after {counted(parting.batches - 1, 'batch', ',')} that are the same"
    first, *later = parting.stages
    lines = [f"run again {since}: they part at batch {parting.at}{same}", f"first: {first}"]
    for name in parting.stages[first][:NAMES]:
        if name in parting.differences:
            lines.append(f"  {name}, by up to {shown(parting.differences[name])}")
        else:
            lines.append(
                f"  {name}" + ": {} and {}".format(*parting.texts[name]) if name in parting.texts else f"  {name}"
            )
    if (more := len(parting.stages[first]) - NAMES) > 0:
        lines.append(f"  and {more} more")
    unequal = [f"{stage} ({len(parting.stages[stage])})" for stage in later]
    return lines + ([f"then: {', '.join(unequal)}"] if later else [])


def _side(stack: ExitStack, given: str, opened: dict[str, ReadExperiment]) -> tuple[str, Side]:
    """The name and contents of an experiment, or of a trial given as EXPERIMENT/TRIAL."""
    from dray.records.difference import Side
    from dray.records.lookup import locate

    experiment, _, trial = given.rpartition("/")
    is_trial = bool(experiment) and (trial == "best" or trial.removeprefix("trial_").isdecimal())
    if not is_trial or (Path(given) / "experiment.yaml").exists():
        experiment, trial = given, ""
    if (where := locate(experiment)) not in opened:
        opened[where] = stack.enter_context(read_experiment(experiment))
        stack.callback(opened[where].reader.close)
    read = opened[where]
    side = Side(read.reader, read.reader.trials[read.trial(trial)]) if trial else Side.of(read.reader)
    return read.stored.name + ("" if side.trial is None else f"/{side.trial.id}"), side


def _is_known(name: str, a: Side, b: Side) -> bool:
    return name not in ("versions", "data") or all(getattr(side, name) for side in (a, b))


def _best(a: Side, b: Side) -> str:
    best = [None if side.trial is None else side.reader.value_of(side.trial) for side in (a, b)]
    return "" if None in best or a.reader.metric != b.reader.metric else f"a {shown(best[0])}, b {shown(best[1])}"
