"""The display of a local run: a bar in a terminal, lines in a file, nothing if logging is turned off."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dray import pytorch
from dray.hosts import progress, use_host
from dray.hosts.progress import ProgressDisplay
from dray.pytorch import Batch, Epoch
from dray.training.host import Report
from dray.training.plan import Plan
from tests.hosts.terminal import terminal
from tests.pytorch.fakes import FakeHost, OneWeight, fails

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(autouse=True)
def logging_as_it_is_at_first() -> Iterator[None]:
    before = logging.root.level  # which a command of an earlier test may have set
    logging.root.setLevel(logging.WARNING)
    yield
    logging.root.setLevel(before)


def fit(trial_class: type[OneWeight] = OneWeight, **arguments: Any) -> None:
    with pytorch.init() as context:
        pytorch.Trainer(trial_class(context), context).fit(**arguments)


LINES = [
    r"training 10 batches \(2 epochs\); metrics and checkpoints go to (.*)",
    r"batch 5 of 10 \(1 epoch\), [\d,.e+]+ batches/s, \d:\d\d left: loss 0\.2664, validation_loss 0\.0009766",
    r"batch 10 of 10 \(2 epochs\), [\d,.e+]+ batches/s: loss 0\.0002602, validation_loss 9\.537e-07",
    r"trained 10 batches \(2 epochs\) in \d:\d\d",
    r"latest checkpoint: (.*/checkpoint_10)",
    r'train longer with: fit\(max_length=..., latest_checkpoint="(.*)"\)',
]


def are_lines(lines: list[str], home: Path) -> None:
    assert len(lines) == len(LINES), lines
    found = [re.fullmatch(pattern, line) for pattern, line in zip(LINES, lines, strict=True)]
    assert all(found), lines
    (run,) = (home / "local").iterdir()
    paths = [match.group(1) for match in found if match and match.groups()]
    assert paths == [str(run), str(run / "checkpoint_10"), str(run / "checkpoint_10")]


def test_a_file_gets_a_line_per_validation_and_how_to_resume(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(max_length=Epoch(2), validation_period=Epoch(1))
    out, err = capsys.readouterr()
    assert out == ""
    are_lines(err.splitlines(), home)


def test_a_terminal_gets_a_bar_with_speed_time_left_and_metrics(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL_S", 0.001)
    with terminal(columns=120) as screen:

        class Watched(OneWeight):
            def at_batch(self, batch_idx: int) -> None:
                if batch_idx:
                    screen.wait_for(f" {batch_idx}/10 batches")
                if batch_idx == 8:
                    print("the trial prints this")
                    screen.wait_for("prints this")

            def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:
                # While it waits for the first, no batch of the validation is done.
                screen.wait_for([" 5/10 batches", "validating, 1 batch ", "validating, 2 batches"][batch_idx])
                return super().evaluate_batch(batch, batch_idx)

        fit(Watched, max_length=Epoch(2), validation_period=Epoch(1))
    lines = screen.screen()
    bar = (
        r"epoch 2/2 ━{17}╌{7} 7/10 batches  [\d,.e+]+ batches/s  \d:\d\d left  loss 0\.2664  "
        r"validation_loss 0\.0009766"
    )
    assert re.search(rf"\x1b\[2K{bar}[\r\x1b]", screen.written), screen.written
    # Nothing of the bar remains.
    assert lines.pop() == ""
    lines.remove("the trial prints this")
    are_lines(lines, home)


@pytest.fixture
def dray_log(logging_as_it_is_at_first: None) -> Iterator[logging.Logger]:
    log = logging.getLogger("dray")
    yield log
    log.disabled = False
    log.setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "turn_off",
    [
        lambda log: log.setLevel(logging.WARNING),
        lambda log: setattr(log, "disabled", True),
        lambda log: logging.disable(),
        lambda log: logging.root.setLevel(logging.ERROR),
    ],
    ids=["level", "disabled", "disable()", "root"],
)
def test_nothing_is_shown_if_logging_is_turned_off(
    dray_log: logging.Logger, turn_off: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    turn_off(dray_log)
    fit(max_length=Epoch(2), validation_period=Epoch(1))
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


def test_lines_are_logged_once_if_logging_is_configured(
    home: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        fit(max_length=Epoch(2), validation_period=Epoch(1))
    assert capsys.readouterr().err == ""
    are_lines([record.getMessage() for record in caplog.records if record.name == "dray"], home)


def test_a_trial_of_an_experiment_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with use_host(FakeHost(tmp_path / "trial")):
        fit(max_length=Epoch(2), validation_period=Epoch(1))
    assert capsys.readouterr() == ("", "")


def test_a_failed_run_prints_its_latest_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="a bug"):
        fit(fails(ValueError("a bug"), at=3), max_length=Batch(9), checkpoint_period=Batch(2))
    printed = capsys.readouterr().err.splitlines()[-3:]
    assert printed[0] == "failed after 3 of 9 batches (0.6 epochs)"
    assert re.fullmatch(r'resume with: fit\(\.\.\., latest_checkpoint=".*/checkpoint_2"\)', printed[2])


# ------------------------------------------------------------------------------------------------- without training
class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_speed_excludes_validations_and_time_left_includes_them() -> None:
    clock, at = Clock(), [(0, 0)]
    display = ProgressDisplay(Plan(length=100, epoch_length=50), 0, clock=clock)
    display.watch(lambda: at[0])
    for seconds, seen in [(5, (10, 0)), (1, (20, 0)), (1, (30, 0)), (10, (30, 8)), (1, (40, 8)), (1, (50, 8))]:
        clock.now += seconds
        at[0] = seen
        display.poll()
    # 40 batches in 4 s of training; in 14 s with the validation, which 50 more will have, too.
    assert display.render(100) == "epoch 2/2 ━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌ 50/100 batches  10 batches/s  0:18 left"
    assert display.render(20) == "epoch 2/2 ━━━━━━━━━…"


def test_training_without_a_known_length_shows_only_its_speed() -> None:
    clock, at = Clock(), [(7, 0)]
    display = ProgressDisplay(Plan(length=2**53), 7, clock=clock)
    display.watch(lambda: at[0])
    for batches in (8, 9, 1009):
        clock.now += 1
        at[0] = batches, 0
        display.poll()
    assert display.render(100) == "1,009 batches  500 batches/s"


def test_tokens_a_second_and_mfu_are_beside_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(Plan(length=100), 0, clock=Clock())
    display.reported(
        Report(batches=5, training={"loss": 1.0}, system={"tokens_per_second": 9876.5, "mfu_percent": 41.26})
    )
    display.reported(Report(batches=10, validation={"loss": 0.25}))
    assert "batches/s, 9,876 tokens/s, MFU 41.3%, " in capsys.readouterr().err


def test_metrics_other_than_numbers_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay(Plan(length=100), 0, clock=Clock())
    display.reported(Report(batches=10, training={"loss": 0.5}))
    display.reported(Report(batches=10, validation={"loss": 0.25, "per_class": [1, 2], "name": "x"}))
    assert re.fullmatch(r"batch 10 of 100, .* left: loss 0\.5, validation: loss 0\.25\n", capsys.readouterr().err)
