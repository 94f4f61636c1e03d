"""The picture, the line, the messages and the final table, as a person reads them."""

from __future__ import annotations

import io
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dray.display import display as display_module
from dray.display.best_trials import SHOWN_TRIALS
from dray.display.board import Board
from dray.display.counts import Counts
from dray.display.display import Display
from dray.display.text import sparkline
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.numbering import take_number
from dray.records.trial_record import TrialRecord
from searchers.asha import ASHA
from searchers.events import Event, Exited, Reason, Reported, Requested, Started
from searchers.method import Method
from searchers.objectives import Metric, Objectives
from searchers.random_search import RandomSearch
from searchers.repeats import Repeats
from searchers.search import Search
from searchers.space import parse
from tests.records.story import happened
from tests.report.simulated import simulated

LONG_PATH = Path("/results/" + "a-long-name/" * 12)


class Clock:
    """It stands still, unless a test moves it: what is shown has the time since the beginning."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests run in: on a dumb one there is no picture, and some want colours everywhere."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


class Screen:
    """A display on a console that is no terminal, unless told otherwise; `text` is what it shows."""

    def __init__(
        self, *, smaller_is_better: bool = True, terminal: bool = False, width: int = 80, path: Path = LONG_PATH
    ) -> None:
        self._file, self.clock = io.StringIO(), Clock()
        self.display = Display(
            name="digits",
            path=path,
            metric="error",
            smaller_is_better=smaller_is_better,
            unit="epochs",
            console=Console(file=self._file, width=width, force_terminal=terminal),
            clock=self.clock,
        )

    @property
    def text(self) -> str:
        return self._file.getvalue()


def search(
    *events: Event, smaller_is_better: bool = True, space: dict[str, Any] | None = None, method: Method | None = None
) -> Search:
    method = method or RandomSearch(max_trials=8, max_concurrent_trials=8, max_length=10)
    made = Search(method, parse(space or {}), seed=0, smaller_is_better=smaller_is_better, log=lambda record: None)
    made.start()
    for event in events:
        made.on(event)
    return made


def ended(trial: int, value: float) -> list[Event]:
    return [
        Started(trial=trial),
        Reported(trial=trial, step=10, value=value),
        Exited(trial=trial, reason="completed"),
    ]


def rows(trial: int, epochs: float, value: float | None = None, speed: float | None = None) -> list[dict[str, Any]]:
    at = {"batches": int(epochs * 23), "epochs": epochs, "time": 0.0}
    told = [{**at, "kind": "training", "name": "loss", "value": 1.0}]
    if value is not None:
        told.append({**at, "kind": "validation", "name": "error", "value": value})
    if speed is not None:
        told.append({**at, "kind": "system", "name": "batches_per_second", "value": speed})
    return told


def line(made: Search, *, groups: int = 2, wanted: int = 2, counts: Counts | None = None, **screen: Any) -> str:
    shown = Screen(**screen)
    shown.display.begin(made)
    shown.display.update(counts or Counts(), groups, wanted)
    return shown.text.splitlines()[-1]


def picture(
    made: Search,
    told: dict[int, list[dict[str, Any]]],
    *,
    width: int = 80,
    height: int = 24,
    groups: int = 2,
    smaller_is_better: bool = True,
) -> list[str]:
    """The lines of a picture."""
    board = Board(name="digits", metric="error", smaller_is_better=smaller_is_better, unit="epochs", clock=Clock())
    board.begin(made, {})
    for trial, reported in told.items():
        board.rows(trial, reported)
    board.update(groups)
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as captured:
        console.print(board.picture(Counts(), groups, groups, width=width, height=height))
    return [line.rstrip() for line in captured.get().splitlines()]


def several(*metrics: tuple[float, float, float]) -> Search:
    """A search with two objectives and a limit of 1, in which each trial has reported once."""
    objectives = Objectives((Metric(name="error"), Metric(name="size"), Metric(name="mb", at_most=1)))
    method = RandomSearch(max_trials=8, max_concurrent_trials=8, max_length=10)
    made = Search(method, parse({}), seed=0, smaller_is_better=True, log=lambda record: None, objectives=objectives)
    made.start()
    for trial, values in enumerate(metrics):
        made.on(Started(trial=trial))
        made.on(Reported(trial=trial, step=1, metrics=values))
    return made


def test_front_and_the_best_within_the_limits_are_shown() -> None:
    made = several((0.5, 3.0, 0.5), (0.25, 9.0, 0.5), (0.75, 4.0, 0.5), (0.1, 1.0, 2.0))
    assert "best error 0.25 (trial 1) · 2 trials on the Pareto front" in line(made)
    told = {trial: rows(trial, 1, value) for trial, value in enumerate((0.5, 0.25, 0.75, 0.1))}
    shown = picture(made, told)
    assert any(each.startswith("best error 0.25, trial 1 at") for each in shown)
    assert "2 trials on the Pareto front" in shown
    assert len(picture(made, told, height=9)) <= 9


REASONS: list[Reason] = ["out_of_memory", "errored", "out_of_memory"]
FAILED = [*(Exited(trial=trial, reason=reason) for trial, reason in enumerate(REASONS)), Started(trial=3)]


@pytest.mark.parametrize(
    ("events", "restarts", "groups", "shown"),
    [
        ([], {}, 0, "digits · 0 of 8 trials ended · starting the first worker group · 0:00"),
        ([], {}, 1, "digits · 0 of 8 trials ended · 0 running · starting 1 of 2 worker groups · 0:00"),
        ([Started(trial=0)], {0: 2, 3: 1}, 2, "digits · 0 of 8 trials ended · 1 running · 3 restarts · 0:00"),
        (FAILED, {}, 2, "digits · 3 of 10 trials ended · 1 running · 1 failed · 2 out of memory · 0:00"),
    ],
)
def test_line_counts_groups_that_start_restarts_and_failures(
    events: list[Event], restarts: dict[int, int], groups: int, shown: str
) -> None:
    assert line(search(*events), groups=groups, counts=Counts(restarts=Counter(restarts))) == shown


def test_line_shows_a_trials_share_and_no_groups_at_the_end() -> None:
    over = search(*ended(0, 0.5), method=RandomSearch(max_trials=1, max_concurrent_trials=1, max_length=10))
    assert over.done is not None
    assert "worker group" not in line(over, groups=0), "the last line in a notebook, which stays"
    shown = Screen()
    shown.display.begin(search(Started(trial=0), Started(trial=1)))
    shown.display.shares("1/4 GPU")
    shown.display.update(Counts(), 1, 1)
    assert " · 2 running on 1/4 GPU each · " in shown.text


def test_requested_trials_are_counted_in_the_total() -> None:
    made = search(*(event for trial in range(8) for event in ended(trial, 0.5)))
    made.request(Requested())
    assert "8 of 9 trials ended" in line(made)


def test_line_shows_what_groups_wait_for_while_they_wait() -> None:
    shown = Screen()
    shown.display.begin(search())
    shown.display.waits("2 of 3 worker groups wait for nodes (2 spot starting)")
    shown.display.update(Counts(), 1, 3)
    told = "digits · 0 of 8 trials ended · 0 running · 2 of 3 worker groups wait for nodes (2 spot starting) · 0:00"
    assert shown.text.strip() == told
    shown.display.waits("")
    shown.clock.now += 60
    shown.display.update(Counts(), 1, 3)
    assert "starting 2 of 3 worker groups" in shown.text


@pytest.mark.api("8.16")
def test_line_shows_trials_the_best_and_the_time() -> None:
    made = search(*ended(0, 0.5), *ended(1, 0.25), Started(trial=2))
    assert line(made) == "digits  25% · 2 of 8 trials ended · 1 running · best error 0.25 (trial 1) · 0:00"
    larger = search(*ended(0, 0.5), *ended(1, 0.25), smaller_is_better=False)
    assert "best error 0.5 (trial 0)" in line(larger, smaller_is_better=False)


def test_line_shows_diverged_trials_until_they_recover() -> None:
    made, shown = search(Started(trial=0), Started(trial=1)), Screen()
    shown.display.begin(made)
    shown.display.rows(0, rows(0, 1.0, value=math.nan))
    shown.display.rows(1, [{**row, "value": math.inf} for row in rows(1, 1.0)])
    shown.display.update(Counts(), 2, 2)
    assert " · 2 running · 2 diverged (NaN) · " in shown.text
    shown.display.rows(1, rows(1, 2.0))  # it was restarted from a checkpoint, say
    shown.clock.now += 60
    shown.display.update(Counts(), 2, 2)
    assert " · 2 running · 1 diverged (NaN) · " in shown.text.splitlines()[-1]


def test_picture_has_the_best_and_a_row_for_each_running_trial() -> None:
    made = search(*ended(0, 0.5), Started(trial=1), Reported(trial=1, step=2, value=0.7), Started(trial=2))
    told = {1: [*rows(1, 1, 0.9), *rows(1, 2, 0.7, speed=312.4), *rows(1, 2.5)], 2: rows(2, 0.2, speed=9.87)}
    blank, bar, numbers, best, heading, *trials = picture(made, told)
    assert blank == ""
    assert bar.startswith("digits  ━")
    assert bar.endswith("15% · 0:00")  # 10, 2 and 0 of 80 epochs, and 0.5 that are known of reports alone
    assert numbers == "1 of 8 trials ended · 2 running"
    assert best == "best error 0.5, trial 0 at 10 epochs:"
    assert heading.split() == ["trial", "epochs", "error", "batch/s"]
    assert trials == [
        "    1  2.5 of 10    0.7  █▁              312",
        "    2  0.2 of 10      -                 9.87",
    ]


def test_repeats_say_what_they_repeat_and_are_never_the_best() -> None:
    method = Repeats(RandomSearch(max_trials=1, max_length=10), seeds=2, top=1)
    made = search(*ended(0, 0.5), *ended(1, 0.1), Started(trial=2), Reported(trial=2, step=5, value=0.2), method=method)
    *_, numbers, best, _heading, last = picture(made, {2: rows(2, 5, 0.2)})
    assert numbers == "2 of 3 trials ended · 1 running"
    assert best == "best error of one seed 0.5, trial 0 at 10 epochs:"
    assert last.endswith("repeat of 0, seed 2")
    assert "best error of one seed 0.5 (trial 0)" in line(made)


def test_picture_shows_rungs_if_there_are_several() -> None:
    method = ASHA(max_trials=8, max_length=10, num_rungs=2, divisor=5, max_concurrent_trials=8)
    *_, heading, first, second = picture(
        search(Started(trial=0), Started(trial=1), method=method), {1: rows(1, 2.5, 0.5)}
    )
    assert heading.split()[:3] == ["trial", "rung", "epochs"]
    assert first.split()[:5] == ["0", "1/2", "0", "of", "2"]
    assert second.split()[:5] == ["1", "2/2", "2.5", "of", "10"]


def test_best_includes_validations_between_rungs() -> None:
    made = search(*ended(0, 0.5), Started(trial=1), Reported(trial=1, step=2, value=0.7))
    told = {1: [*rows(1, 3, 0.25), *rows(1, 4, 0.375), *rows(1, 5, float("nan"))]}
    lines = picture(made, told, width=120)
    assert lines[3] == "best error 0.25, trial 1 at 3 epochs:"
    assert lines[-1].split()[3:6] == ["10", "-", "0.25"]


def test_picture_shows_values_as_measured_where_larger_is_better() -> None:
    made = search(
        *ended(0, 0.5),
        Started(trial=1),
        Reported(trial=1, step=2, value=0.75),
        Started(trial=2),
        smaller_is_better=False,
    )
    told = {1: [*rows(1, 3, 0.875), *rows(1, 4, 0.625)], 2: rows(2, 1, -0.25)}
    lines = picture(made, told, width=120, smaller_is_better=False)
    assert lines[3] == "best error 0.875, trial 1 at 3 epochs:"
    heading, *trials = [line.split() for line in lines[4:]]
    assert heading[2:4] == ["error", "best"]
    assert [row[4:6] for row in trials] == [["0.625", "0.875"], ["-0.25", "-0.25"]]


def test_picture_shows_as_many_searched_hyperparameters_as_fit() -> None:
    space = {
        "lr": {"type": "categorical", "vals": [0.5, 0.5]},
        "model": {"depth": {"type": "categorical", "vals": [3]}},
    }
    made = search(*ended(0, 0.5), Started(trial=1), space={**space, "global_batch_size": 64})
    wide, narrow = picture(made, {}, width=200), picture(made, {}, width=60)
    assert wide[3] == "best error 0.5, trial 0 at 10 epochs: lr=0.5  model.depth=3"
    assert wide[-1].endswith("  lr=0.5  model.depth=3")
    assert narrow[-1].endswith("  lr=0.5  model.d…")
    assert max(map(len, narrow)) <= 60


def test_headings_are_whole_where_there_is_room() -> None:
    made = search(Started(trial=1), space={"lr": {"type": "categorical", "vals": [0.5, 0.5]}})
    board = Board(name="digits", metric="validation_loss", smaller_is_better=True, unit="epochs", clock=Clock())
    board.begin(made, {})

    def heading(width: int) -> list[str]:
        console = Console(file=io.StringIO(), width=width, height=24)
        with console.capture() as captured:
            console.print(board.picture(Counts(), 1, 1, width=width, height=24))
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
        return lines[-2].split()

    assert heading(100) == ["trial", "epochs", "validation_loss", "batch/s"]
    assert heading(60) == ["trial", "epochs", "validation_loss", "batch/s"]
    assert heading(52) == ["trial", "epochs", "validation_…", "batch/s"]


def test_picture_fits_the_terminal_and_shows_the_best_trials() -> None:
    events: list[Event] = [Started(trial=trial) for trial in range(8)]
    events += [Reported(trial=trial, step=1, value=value) for trial, value in ((5, 0.1), (2, 0.3), (7, 0.2))]
    made = search(*events)
    lines = picture(made, {}, height=10)
    assert [line.split()[0] for line in lines[5:]] == ["2", "5", "7", "and"]
    assert lines[-1] == "and 5 more"
    assert len(lines) < 10


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([0, 7], "▁█"), ([3, 3], "▄▄"), ([float("nan"), 1, 2], " ▁█"), ([float("inf")], " "), ([], "")],
    ids=["two", "equal", "nan", "infinite", "none"],
)
def test_sparkline(values: list[float], drawn: str) -> None:
    assert sparkline(values) == drawn


def test_without_a_terminal_a_line_is_printed_now_and_then() -> None:
    screen, made, seen = Screen(), search(), []
    with screen.display as shown:
        shown.begin(made)
        for half in range(2 * 3600):
            shown.update(Counts(), 1, 1)
            screen.clock.now += 0.5
            if half in (60, 3600, 4800, 7199):
                seen.append(screen.text.count("trials ended"))
    assert seen[0] == 4
    assert seen[3] - seen[2] == 20
    assert 30 < seen[1] < 120


def test_picture_is_redrawn_and_erased_at_the_end() -> None:
    screen = Screen(terminal=True)
    made = search()
    with screen.display as shown:
        shown.begin(made)
        for _ in range(1000):
            shown.update(Counts(), 1, 1)
            screen.clock.now += 0.001
        shown.say("experiment digits")
    # Each quarter of a second, below what is said, and once more before it is erased.
    assert screen.text.count("trials ended") == 4 + 1 + 1
    # Its last act is to go up and erase it.
    assert screen.text.rstrip().endswith("\x1b[2K")


class FakeIPython:
    """As `IPython.display`: `shown` is what is in the cell now, `versions` how often something was."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.versions = 0

    def HTML(self, text: str) -> str:
        return text

    def display(self, text: str, *, display_id: bool) -> FakeIPython:
        self.shown.append(text)
        return self

    def update(self, text: str) -> None:
        self.shown[-1] = text
        self.versions += 1


def test_wait_for_ray_is_shown_before_the_first_picture() -> None:
    screen, plain = Screen(terminal=True), Screen()
    for each in (screen, plain):
        with each.display:
            each.display.starting("starting Ray")
    assert "starting Ray ..." in screen.text
    assert plain.text == ""


def test_in_a_notebook_one_output_is_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ipython = Clock(), FakeIPython()
    monkeypatch.setitem(sys.modules, "IPython.display", ipython)
    shown = Display(
        name="digits",
        path=LONG_PATH,
        metric="error",
        smaller_is_better=True,
        unit="batches",
        console=Console(file=io.StringIO(), force_jupyter=True),
        clock=clock,
    )
    made = search()
    with shown:
        shown.begin(made)
        made.on(Started(trial=0))
        for _ in range(100):
            shown.update(Counts(), 1, 1)
            clock.now += 0.1
        assert ipython.versions == 10
        assert "0 of 8 trials ended · 1 running" in ipython.shown[0]
        for event in ended(0, 0.5)[1:]:
            made.on(event)
    # It stays, so it is as in the end.
    assert "1 of 8 trials ended · 0 running" in ipython.shown[0]
    assert len(ipython.shown) == 1
    assert ipython.shown[0].startswith("<pre")


def test_a_path_or_a_command_is_never_cut_into_lines() -> None:
    screen = Screen()
    screen.display.interrupted()
    assert screen.text == f"resume with: dray experiment resume {LONG_PATH}\n"


def test_interrupted_run_reports_its_progress() -> None:
    made, screen = search(), Screen()
    screen.display.begin(made)
    assert screen.text == ""
    for event in (*ended(0, 0.5), Started(trial=1)):
        made.on(event)
    screen.display.interrupted()
    assert screen.text.startswith("stopped: 1 trial ended, 1 to continue from the latest checkpoint\n")
    again = Screen()
    again.display.begin(made)
    assert again.text == "resuming: 1 trial ended, 1 to continue from the latest checkpoint\n"


def test_a_resumed_run_shows_what_earlier_runs_reported() -> None:
    made, screen = search(*ended(0, 0.5), Started(trial=1)), Screen()
    before = {each: TrialRecord(each, Objectives((Metric(name="error"),))) for each in (0, 1)}
    before[0].validated("error", 23, 1.0, 0.25, 0.0)  # the search decides at the end only
    before[1].loss(("training", "loss"), 10, math.nan)
    screen.display.begin(made, before)
    for at in (0, 100):
        screen.clock.now += at
        screen.display.update(Counts(), 1, 1)
        assert "1 diverged (NaN) · best error 0.25 (trial 0)" in screen.text.splitlines()[-1]


TRACEBACK = "Traceback (most recent call last):\n  File ...\nKeyError: 'lr'\n"


def test_a_failure_shows_the_users_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    users = '  File "model_def.py", line 7, in __init__\n    hparams["lr"]\n'
    trace = (
        f'Traceback (most recent call last):\n  File "/usr/lib/python3.11/runpy.py", line 1, in f\n    run()\n{users}'
    )
    error = f"KeyError: 'lr'\n  model_def.py:7, in __init__\n    hparams['lr']\n\n{trace}KeyError: 'lr'\n"
    screen.display.failure(3, error)
    head = "trial 3 failed:\nTraceback (most recent call last):\n"
    assert screen.text == f"{head}{users}KeyError: 'lr'\n"
    screen.display.failure(3, error, "out of memory twice")
    assert screen.text.splitlines()[5:] == ["trial 3 failed for good (out of memory twice): the same error again"]
    monkeypatch.setenv("DRAY_TRACEBACK", "1")
    screen = Screen()
    screen.display.failure(3, error)
    assert screen.text == f"trial 3 failed:\n{trace}KeyError: 'lr'\n"


def test_failures_outside_user_code_show_one_line_each() -> None:
    screen = Screen()
    for trial in range(30):
        screen.display.failure(trial, TRACEBACK)
    screen.display.failure(31, "")
    told = screen.text.splitlines()
    assert told[0] == "trial 0 failed: KeyError: 'lr'"
    assert len(told) == display_module.MAX_MESSAGES + 1
    assert "dray experiment describe" in told[-1]


def ending(directory: ExperimentDirectory, **screen: Any) -> list[str]:
    """The lines at the end of a run."""
    shown = Screen(**screen)
    shown.display.result(StoredExperiment.here(directory).read())
    return shown.text.splitlines()


def test_end_shows_failures_then_the_best_trials(tmp_path: Path) -> None:
    assert ending(happened(tmp_path / "story")) == [
        "1 of 9 trials failed",
        "1 trial diverged: NaN since batch 20 (trial 4)",
        "best trials by validation_loss:",
        "trial      state  batches  best at  validation_loss  NaN since     lr  accuracy",
        "    0  completed       30       20            0.126          -      0     0.874",
        "    3     pruned       10       10              0.2          -  0.375       0.8",
        "    7    running       20       20             0.25          -  0.875      0.75",
        "    2     paused       10       10              0.3          -   0.25       0.7",
        "    5  completed       20       20             0.35          -  0.625      0.65",
        "    4     pruned       30       10             0.45         20    0.5      0.55",
        "(not shown: net.hidden, size)",
        "9 trials (2 completed, 2 pruned, 1 errored, 1 paused, 1 with invalid hyperparameters, 1 running, 1 pending) "
        f"in 0:30. Results: {LONG_PATH}",
        f"inspect failures with: dray experiment describe {LONG_PATH}",
        f"inspect with: dray report {LONG_PATH}",
        f"              dray trial list {LONG_PATH} --best",
    ]


@pytest.mark.parametrize("known", [True, False])
def test_table_at_the_end_has_the_requested_trial(tmp_path: Path, known: bool) -> None:
    reader = StoredExperiment.here(simulated(tmp_path / "digits-1", 14)).read()
    *_, worst = reader.eligible()
    assert len(reader.eligible()) > SHOWN_TRIALS
    worst.is_requested = True
    shown = Screen()
    shown.display.begin(search(), {each: reader.trials[each] for each in reader.trials if known or each != worst.id})
    shown.display.result(reader)
    heading = next(at for at, line in enumerate(shown.text.splitlines()) if line.startswith("trial "))
    table = [line.split()[0] for line in shown.text.splitlines()[heading + 1 :][: SHOWN_TRIALS + 1]]
    assert (table[-1] == str(worst.id)) == (not known)


def test_table_of_the_best_fits(tmp_path: Path) -> None:
    lines = ending(happened(tmp_path / "story"), width=70)
    assert max(map(len, lines[3:10])) <= 70
    assert lines[10] == "(not shown: net.hidden, accuracy, size)"


def test_experiment_is_called_by_its_number_or_else_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    path = tmp_path / "digits-1"

    def told() -> str:
        screen = Screen(path=path)
        screen.display.interrupted()
        return screen.text

    assert told().endswith("resume with: dray experiment resume digits-1\n")
    assert take_number(path) == 1
    assert told().endswith("resume with: dray experiment resume 1\n")


def test_the_best_is_one_that_was_trained_as_far_as_three_others() -> None:
    two = [Started(trial=3), Reported(trial=3, step=1, value=0.25), *ended(0, 0.5), *ended(1, 0.625)]
    assert "best error 0.25 (trial 3)" in line(search(*two))
    assert "best error 0.5 (trial 0)" in line(search(*two, *ended(2, 0.75)))


def test_a_resumed_run_counts_each_trial_once() -> None:
    """Two have ended and one has not gone as far: its value counts, until a third has."""
    made = search(Started(trial=3), Reported(trial=3, step=1, value=0.25), *ended(0, 0.5), *ended(1, 0.625))
    before = {trial: TrialRecord(trial, Objectives((Metric(name="error"),))) for trial in (0, 1, 3)}
    for trial, value in ((0, 0.5), (1, 0.625), (3, 0.25)):
        before[trial].validated("error", 10, 10.0, value, 0.0)
    board = Board(name="digits", metric="error", smaller_is_better=True, unit="epochs")
    board.begin(made, before)
    board.update(1)
    assert "best error 0.25 (trial 3)" in board.line(Counts(), 1, 1)
    board.rows(0, [{"kind": "validation", "name": "error", "batches": 10, "epochs": 10.0, "value": 0.5, "time": 0.0}])
    board.update(1)  # a late row of one that has ended
    assert "best error 0.25 (trial 3)" in board.line(Counts(), 1, 1)
