"""``dray bisect``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Json
from dray.cli.errors import BadUse
from dray.cli.server import tell
from dray.text import counted, shown, some

if TYPE_CHECKING:
    from dray.bisect.history import History
    from dray.bisect.runs import Found, Goal

STAT_LINES = 40
"""Most lines of the changes of the commit that are printed."""


def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="Commit at which the metric was good.")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="Later commit at which it may be worse.")],
    metric: Annotated[str, typer.Argument(metavar="METRIC", help="Validation metric.")],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Experiment config file, of which each commit runs its own version. By default, the only one here.",
        ),
    ] = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(metavar="MODEL_DIR", help="Directory with the model's code; by default, the directory of CONFIG."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Batches of each run; by default, the max_length of each commit's config.", min=1)
    ] = None,
    least: Annotated[
        float, typer.Option(help="Least difference that counts as worse, in percent of GOOD's value.", min=0.0)
    ] = 1.0,
    larger_is_better: Annotated[
        bool,
        typer.Option(
            "--larger-is-better",
            help="Larger values of METRIC are better. Not needed if it is the metric of CONFIG, and CONFIG says so.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Find the git commit that made a metric worse, with short runs of some commits.

    Commits that change only comments, docstrings, formatting or documents are not run. Runs use the server that is up.
    If there is none, one is started for their duration.

    \b
    dray bisect v1.0 HEAD -- validation_loss
    dray bisect v1.0 HEAD --config gpt/const.yaml --length 100 -- validation_loss
    """
    from dray.bisect.history import History, NoHistory
    from dray.bisect.runs import Goal, a_server, find, on_server

    goal = Goal(metric=metric, batches=length, larger_is_better=larger_is_better, least=least / 100)
    try:
        history = History(config or _only_config(), good, bad, model_dir)
        history.config_text(history.commits[-1])
        with a_server(tell) as server, on_server(server, history, goal, tell) as train:
            found = find(history, goal, train, tell)
    except NoHistory as error:
        raise BadUse(str(error)) from None
    lines = told(history, found, goal)
    if json:
        show.as_json(found.to_json(history))
    else:
        show.lines(lines)


def _only_config() -> Path:
    """The only experiment config file in the working directory."""
    from dray.config.yaml_file import parsed

    found = []
    for file in sorted(Path().glob("*.y*ml")):
        content, _ = parsed(file.read_text(errors="replace"))
        if isinstance(content, dict) and "searcher" in content:
            found.append(file)
    if len(found) != 1:
        has = f"there are several here: {some(found, 5)}" if found else "there is none here"
        raise BadUse(f"give the experiment's config file with --config; {has}")
    return found[0]


def told(history: History, found: Found, goal: Goal) -> list[str]:
    """The verdict, for people. `BadUse` if an end of the history does not run."""
    from dray.bisect.search import EndFails, NoRegression

    runs = f"{counted(len(found.values), 'run')}, of {counted(len(history.commits), 'commit')}"
    last = len(found.versions) - 1
    match found.verdict:
        case EndFails(version=version):
            end = history.good if version == 0 else history.bad
            raise BadUse(f"{end} ({found.versions[version][0].short}) does not run; give a commit that does")
        case NoRegression():
            ends = f"{_values(found, 0)} at {history.good} and {_values(found, last)} at {history.bad}"
            what = f"no certain regression of {100 * goal.least:g}% or more between {history.good} and {history.bad}"
            return [f"{what}: {goal.metric} is {ends}", runs]
        case verdict:
            commits = found.suspects
            those = "one of these commits; those before the last do not run" if len(commits) > 1 else "this commit"
            return [
                f"{goal.metric} is worse since {those}:",
                *[f"{each.hash[:12]}  {each.date[:10]}  {each.author}  {each.subject}" for each in commits],
                f"{goal.metric}: {_values(found, verdict.good)} before, {_values(found, verdict.bad)} after",
                *history.stat(commits[0], commits[-1])[-STAT_LINES:],
                runs,
            ]


def _values(found: Found, version: int) -> str:
    values = found.values_of(version)
    texts = ["NaN" if value is not None and math.isnan(value) else shown(value) for value in values]
    return ", ".join(texts) + (f" ({len(values)} seeds)" if len(values) > 1 else "") or "the same"
