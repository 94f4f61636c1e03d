"""`dray bisect` on histories of examples/gpt with 64 commits: with a planted regression, and without one.

Each run trains a small GPT for 150 batches. By default, runs are local runs in this process, of the code and config of
the commit, one after another; `--server` sends them to a server of this user, as the command does.

    python bench/bisection.py [--histories 20] [--first-seed 0] [--server] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

import torch
from _histories import COMMITS, REGRESSIONS, Drawn, draw_history, write_repository
from _measure import Paper, command, machine, verdict

from dray.bisect.history import Commit, History
from dray.bisect.runs import Found, Goal, Train, a_server, config_of, find, on_server
from dray.bisect.search import Regression, Run
from dray.config.load import load_config
from dray.environment import variables_set
from dray.experiment.local import run_local
from dray.records.local_runs import LocalRun

METRIC, BATCHES = "validation_loss", 150
MAX_RUNS = 7
FOUND = 0.95


Training = Callable[[History, Goal], AbstractContextManager[Train]]


def local(history: History, goal: Goal) -> contextlib.nullcontext[Train]:
    """Train commits in this process."""

    def value(run: Run, commit: Commit) -> float | None:
        with tempfile.TemporaryDirectory() as scratch:
            code = Path(scratch, "code")
            history.export(commit, code)
            config = config_of(history.config_text(commit), goal, run.seed, f"bisect-{commit.short}")
            try:
                rows = LocalRun(run_local(load_config(config), code, path=Path(scratch, "run"))).rows
            except Exception as error:
                print(f"{commit.short} {commit.subject}: {error!r}", file=sys.stderr)
                return None
        [*_, last] = (row["validation"] for row in rows if row.get("validation"))
        return float(last[METRIC])

    return contextlib.nullcontext(lambda runs: {run: value(run, commit) for run, commit in runs.items()})


def bisected(drawn: Drawn, goal: Goal, training: Training) -> tuple[Found, int | None]:
    """The verdict on a history, and the place of the commit that it blames; None if it blames none."""
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch, "repository")
        write_repository(drawn.commits, repository)
        history = History(repository / "gpt" / "gpt.yaml", f"HEAD~{COMMITS - 1}", "HEAD")
        with training(history, goal) as train:
            found = find(history, goal, train, lambda line: None)
        if not isinstance(found.verdict, Regression):
            return found, None
        assert found.verdict.bad == found.verdict.good + 1, "all versions run"
        return found, history.commits.index(found.versions[found.verdict.bad][0])


@contextlib.contextmanager
def trainings(server: bool) -> Iterator[Training]:
    if not server:
        torch.set_num_threads(1)
        logging.getLogger("dray").setLevel(logging.ERROR)
        yield local
        return
    with a_server(print) as there:
        yield lambda history, goal: on_server(there, history, goal, lambda line: None)


def results_in(home: str) -> AbstractContextManager[None]:
    return variables_set({"DRAY_HOME": home, "DRAY_SERVER": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=len(REGRESSIONS), help="of each kind (default 20)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the histories and of their runs (default 0)")
    parser.add_argument("--server", action="store_true", help="train on a server instead of in this process")
    parser.add_argument("--save", action="store_true", help="write the figures to bench/results/")
    options = parser.parse_args()
    planted = [*REGRESSIONS[: options.histories], *[None] * options.histories]
    rows: list[Sequence[str]] = []
    right, blamed, counts, durations = 0, 0, list[int](), list[float]()
    with tempfile.TemporaryDirectory() as home, results_in(home), trainings(options.server) as training:
        for seed, regression in enumerate(planted, options.first_seed):
            drawn, began = draw_history(seed, regression), time.monotonic()
            goal = Goal(metric=METRIC, batches=BATCHES, first_seed=1 + 10 * seed)
            found, place = bisected(drawn, goal, training)
            durations.append(time.monotonic() - began)
            is_right = place == drawn.planted
            right += is_right and regression is not None
            blamed += place is not None and regression is None
            counts.append(len(found.values))
            difference = getattr(found.verdict, "difference", math.nan)
            first = next(iter(found.values.values())) or math.nan
            what = "none" if regression is None else f"{regression.message} ({drawn.planted})"
            said = "none" if place is None else f"{drawn.commits[place][0]} ({place})"
            row = [what, "the same" if is_right else said, f"{difference / first:+.2%}"]
            rows.append([*row, str(len(found.versions)), str(len(found.values)), f"{durations[-1]:.1f}"])
            print(*rows[-1], sep=" | ", flush=True)
    report(rows, right, blamed, counts, durations, options)


def report(
    rows: Sequence[Sequence[str]],
    right: int,
    blamed: int,
    counts: Sequence[int],
    durations: Sequence[float],
    options: argparse.Namespace,
) -> None:
    paper, half = Paper(), options.histories
    where = "on a server" if options.server else "in one process, without Ray"
    paper.say(f"`{command()}`, {machine()}\n")
    paper.say(f"{COMMITS} commits in each history, runs of {BATCHES} batches {where}.\n")
    good = right >= FOUND * half
    paper.say(f"- found: {right} of {half} planted regressions (goal: {FOUND:.0%}): {verdict(good)}")
    paper.say(f"- blamed in histories without a regression: {blamed} of {half} (goal: 0): {verdict(blamed == 0)}")
    within = sum(count <= MAX_RUNS for count in counts)
    paper.say(
        f"- runs of a history: median {median(counts):g}, most {max(counts)}; at most {MAX_RUNS} in {within} of "
        f"{len(counts)} (goal: all): {verdict(within == len(counts))}"
    )
    paper.say(f"- seconds a history: median {median(durations):.1f}, most {max(durations):.1f}\n")
    paper.say(
        "Runs include GOOD and BAD. Half of the commits change only comments, docstrings, documents and formatting, so "
        "there are about 32 versions, and 2 + log2(31) = 7 runs; without that, there would be 2 + log2(63) = 8. More "
        "runs are second and third seeds, where the difference is less than 3% or a version is in doubt.\n"
    )
    paper.table(["planted (place)", "blamed (place)", "BAD - GOOD", "versions", "runs", "s"], rows)
    if options.save:
        paper.save("bisection", "Finding the commit after which a metric is worse")


if __name__ == "__main__":
    main()
