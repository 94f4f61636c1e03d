"""The status line, the messages and the final table, as a person reads them."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
from rich.console import Console

from dray.experiment import display as display_module
from dray.experiment.display import Display
from searchers.events import Event, Exited, Reported, Started
from searchers.random_search import RandomSearch
from searchers.search import Search
from searchers.space import parse

LONG_PATH = Path("/results/" + "a-long-name/" * 12)


class FakeCounts:
    restarts: ClassVar[Counter[int]] = Counter()


class FakeResult:
    """Four trials, one of which never validated."""

    trials = pd.DataFrame(
        {
            "trial_id": [0, 1, 2, 3],
            "state": ["COMPLETED", "STOPPED", "COMPLETED", "ERRORED"],
            "hparams.lr": [0.1, 0.2, 0.3, 0.4],
            "hparams.layers": [[1, 2], [1, 2], [3], [3]],
            "hparams.same": [64, 64, 64, 64],
            "hparams.same_list": [[1], [1], [1], [1]],
            "batches": [20, 10, 20, 0],
            "metric": [0.5, 0.75, 0.25, None],
            "best_metric": [0.5, 0.625, 0.125, None],
        }
    )
    metrics = pd.DataFrame(
        [
            {"trial_id": trial, "batches": batches, "kind": kind, "name": name, "value": value}
            for trial, batches, value in ((0, 20, 0.9), (1, 5, 0.7), (1, 10, 0.1), (2, 15, 0.95))
            for kind, name in (("validation", "accuracy"), ("training", "loss"))
        ]
    )

    def best_batches(self) -> Any:
        return pd.Series({0: 20, 1: 5, 2: 15})


class Screen:
    """A display on a console of 80 columns that is no terminal; `text` is what it shows."""

    def __init__(self, *, smaller_is_better: bool = True, terminal: bool = False) -> None:
        self._file = io.StringIO()
        self.display = Display(
            name="digits",
            path=LONG_PATH,
            metric="error",
            smaller_is_better=smaller_is_better,
            max_trials=8,
            console=Console(file=self._file, width=80, force_terminal=terminal),
        )

    @property
    def text(self) -> str:
        return self._file.getvalue()


def search(*events: Event, smaller_is_better: bool = True) -> Search:
    method = RandomSearch(max_trials=8, max_concurrent_trials=4, max_length=10)
    made = Search(method, parse({}), seed=0, smaller_is_better=smaller_is_better, log=lambda record: None)
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


def line(made: Search, *, groups: int = 2, wanted: int = 2, at_s: float = 65.0, **screen: Any) -> str:
    shown = Screen(**screen).display
    shown._began = 0.0
    return shown.line(made, FakeCounts(), groups, wanted, at_s)  # type: ignore[arg-type]


def test_line_tells_that_groups_are_starting() -> None:
    assert line(search(), groups=0, wanted=1) == "digits  0/8 trials · starting worker groups · 0 of 1 groups up · 1:05"


@pytest.mark.api("8.16")
def test_line_tells_trials_the_best_and_the_time() -> None:
    made = search(*ended(0, 0.5), *ended(1, 0.25), Started(trial=2))
    assert line(made) == "digits  2/8 trials · 1 running · best error 0.25 (trial 1) · 1:05"
    larger = search(*ended(0, 0.5), *ended(1, 0.25), smaller_is_better=False)
    assert "best error 0.5 (trial 0)" in line(larger, smaller_is_better=False)


def test_line_tells_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCounts, "restarts", Counter({0: 2, 3: 1}))
    assert " · 3 restarts · " in line(search())


def test_invalid_trial_is_not_the_best() -> None:
    invalid: list[Event] = [
        Started(trial=1),
        Reported(trial=1, step=1, value=0.0),
        Exited(trial=1, reason="invalid_hp"),
    ]
    assert "best error 0.5 (trial 0)" in line(search(*ended(0, 0.5), *invalid))


def test_remaining_time_is_told_from_the_rate_at_which_trials_end_not_from_the_start_up() -> None:
    made, shown = search(), Screen().display
    shown._began = 0.0
    lines = []
    for trial in range(6):
        for event in ended(trial, 0.5):
            made.on(event)
        # The first trial ends after 100 s of starting up, and then one does every 10 s.
        lines.append(shown.line(made, FakeCounts(), 1, 1, 100.0 + 10 * trial))  # type: ignore[arg-type]
    assert ["left" in line for line in lines] == [False] * 4 + [True] * 2
    assert lines[4].endswith("about 0:30 left")
    assert lines[5].endswith("about 0:20 left")


def test_without_a_terminal_a_line_comes_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 1000.0
    monkeypatch.setattr(display_module.time, "monotonic", lambda: clock)
    screen = Screen()
    with screen.display as shown:
        for _ in range(60):
            clock += 0.5
            shown.update(search(), FakeCounts(), 1, 1)  # type: ignore[arg-type]
    assert screen.text.count("0/8 trials") == 3


def test_on_a_terminal_the_line_is_gone_in_the_end() -> None:
    screen = Screen(terminal=True)
    with screen.display as shown:
        shown.update(search(), FakeCounts(), 1, 1)  # type: ignore[arg-type]
        shown.say("experiment digits")
    assert "0/8 trials" in screen.text
    # Its last act is to go up and erase it.
    assert screen.text.rstrip().endswith("\x1b[2K")


def test_a_path_or_a_command_is_never_cut_into_lines() -> None:
    screen = Screen()
    screen.display.interrupted()
    assert screen.text == f"stopped. Go on with: dray experiment resume {LONG_PATH}\n"


def test_failure_is_told_by_the_last_line_of_its_traceback_and_not_for_ever() -> None:
    screen = Screen()
    for trial in range(30):
        screen.display.failure(trial, "Traceback (most recent call last):\n  File ...\nKeyError: 'lr'\n")
    screen.display.failure(31, "")
    told = screen.text.splitlines()
    assert told[0] == "trial 0 failed: KeyError: 'lr'"
    assert len(told) == display_module.SHOWN_TRIALS


def test_an_error_without_words_is_told_too() -> None:
    screen = Screen()
    screen.display.failure(0, " \n")
    assert screen.text == "trial 0 failed: no reason given\n"


def test_table_has_the_best_first_and_leaves_out_what_all_trials_share() -> None:
    screen = Screen()
    screen.display.result(FakeResult())  # type: ignore[arg-type]
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in screen.text.splitlines() if "│" in row]
    assert rows == [
        ["2", "completed", "20", "0.125", "0.95", "0.3", "[3]"],
        ["0", "completed", "20", "0.5", "0.9", "0.1", "[1, 2]"],
        ["1", "stopped", "10", "0.625", "0.7", "0.2", "[1, 2]"],
    ]
    [headings] = [row for row in screen.text.splitlines() if "┃" in row]
    assert [cell.strip() for cell in headings.split("┃")[1:-1]] == [
        "trial",
        "state",
        "batches",
        "error",
        "accuracy",
        "lr",
        "layers",
    ]


def test_table_is_turned_round_where_larger_is_better() -> None:
    screen = Screen(smaller_is_better=False)
    screen.display.result(FakeResult())  # type: ignore[arg-type]
    rows = [row.split("│")[1].strip() for row in screen.text.splitlines() if "│" in row]
    assert rows == ["1", "0", "2"]


def test_end_tells_what_became_of_the_trials_and_where_all_of_it_is() -> None:
    screen = Screen()
    screen.display.result(FakeResult())  # type: ignore[arg-type]
    assert "4 trials (2 completed, 1 stopped, 1 errored) in 0:00. Results: " + str(LONG_PATH) in screen.text
