"""The arguments that several commands share, and their shell completion."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from dray.cli.errors import BadUse
from dray.environment import TRACEBACK


def _experiments(incomplete: str) -> list[str]:
    from dray.records.directory import results_root
    from dray.records.lookup import LATEST, experiment_directories, newest_first
    from dray.records.numbering import numbers_by_path

    paths, known = newest_first(experiment_directories(results_root())), numbers_by_path()
    # Numbers only after a first digit: otherwise they would clutter the list of names.
    short = [str(known[path.resolve()]) for path in paths if path.resolve() in known] if incomplete else []
    names = [LATEST, *short, *(path.name for path in paths)]
    return [name for name in names if name.startswith(incomplete)]


def _trials(ctx: typer.Context, incomplete: str) -> list[str]:
    from dray.errors import NoExperiment
    from dray.records.lookup import locate

    try:
        path = Path(locate(str(ctx.params.get("experiment"))))
    except NoExperiment:
        return []
    numbers = sorted(int(number) for each in path.glob("trial_*") if (number := each.name[len("trial_") :]).isdigit())
    return [name for name in ("best", *map(str, numbers)) if name.startswith(incomplete)]


ExperimentArg: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT",
        help="Number, name or unique part of the name of an experiment, 'latest', a path, or s3://BUCKET/...",
        autocompletion=_experiments,
    ),
]
SideArg: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT[/TRIAL]",
        help="Experiment, or one of its trials: a number, or 'best'.",
        autocompletion=_experiments,
    ),
]
TrialArg: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="TRIAL",
        help="Trial number, or 'best'; may be omitted if there is only one trial.",
        autocompletion=_trials,
    ),
]
TrialOrBestArg: TypeAlias = Annotated[
    str, typer.Argument(metavar="TRIAL", help="Trial number, or 'best'.", autocompletion=_trials)
]
TrialOrAllArg: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="TRIAL", help="Trial number, or 'best'; all trials by default.")
]
CheckpointArg: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT|CHECKPOINT",
        help="Experiment, or the directory or URI of a checkpoint.",
        autocompletion=_experiments,
    ),
]
Batches: TypeAlias = Annotated[
    str,
    typer.Option(
        "--at",
        "--batches",
        "-b",
        metavar="best|last|BATCHES",
        help="Take the checkpoint of the trial's best validation, the last one, or the one after this many batches.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
JsonLine: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print what is created as one line of JSON, and anything else on standard error.")
]


def _show_tracebacks(wanted: bool) -> None:
    if wanted:
        os.environ[TRACEBACK] = "1"


Traceback: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--traceback",
        help=f"Show errors with all frames, including those of libraries, as with {TRACEBACK}=1.",
        callback=_show_tracebacks,
    ),
]
Follow: TypeAlias = Annotated[
    bool, typer.Option("--follow", "-f", help="Keep printing new lines until the experiment or trial ends.")
]
TailArg: TypeAlias = Annotated[
    int | None, typer.Option("--tail", "-n", metavar="N", help="Print only the last N lines.", min=0)
]
Config: TypeAlias = Annotated[Path, typer.Argument(metavar="CONFIG", help="Experiment config file (YAML).")]
Changes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        metavar="FIELD=VALUE",
        help="Override a field of CONFIG, such as searcher.max_trials=8; can be repeated.",
    ),
]
ModelDir: TypeAlias = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL_DIR", help="Directory with the model's code; by default, the directory of CONFIG."),
]
Output: TypeAlias = Annotated[
    Path | None, typer.Option("--output", "-o", help="Directory to create; by default, one in the current directory.")
]


def check_follow(follow: bool, json: bool) -> None:
    if json and follow:
        raise BadUse("--json prints one complete value, so it can't be used with --follow; give only one of them")


def values_by_name(option: str, given: list[str] | None) -> dict[str, Any]:
    """The values of a repeated option ``NAME=VALUE``."""
    from dray.config.yaml_file import parsed

    found = {}
    for each in given or ():
        name, _, text = each.partition("=")
        value, fault = parsed(text)
        if not name or not text or fault is not None:
            raise BadUse(f"{option} {each}: must be NAME=VALUE, with a value in YAML")
        if name in found:
            raise BadUse(f"{option} {each}: {name} is given twice; give one value")
        found[name] = value
    return found


def target(output: Path | None, name: str) -> Path:
    """The directory to write to. `BadUse` if it exists and is not empty."""
    path = output if output is not None else Path(name)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise BadUse(f"{path} already exists; give another directory with --output")
    return path
