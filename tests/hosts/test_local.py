"""A run in the caller's own process: where it writes, how it is seeded, how it is stopped and resumed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dray import pytorch
from dray.hosts import LocalHost, current_host, progress, signals, use_host
from dray.hosts.unsaved import UnsavedRows
from dray.pytorch import Batch
from dray.records.checkpoints import export
from dray.storage import CheckpointError, Location, StorageError
from dray.training.parallel import agreement
from tests.pytorch.fakes import FakeHost, Ones, OneWeight, callback, one_weight, trial


def fit(trial_class: type[OneWeight] = OneWeight, callbacks: Any = (), **arguments: Any) -> OneWeight:
    with pytorch.init() as context:
        made = trial_class(context)
        made.callbacks.update(callbacks)
        pytorch.Trainer(made, context).fit(**arguments)
    return made


@pytest.mark.api("2.7", "2.8")
def test_a_local_run_stores_metrics_and_checkpoints_below_dray_home(home: Path) -> None:
    trial = fit(max_length=Batch(4), reporting_period=Batch(1), validation_period=Batch(2))
    (run,) = (home / "local").iterdir()
    assert {path.name for path in run.iterdir()} == {"checkpoint_2", "checkpoint_4", "metrics.jsonl", "tensorboard"}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["batches"] for row in rows] == [1, 2, 3, 4]
    saved = [f"{run.name}/checkpoint_{batches}" for batches in (2, 4)]
    assert [row.get("checkpoint") for row in rows] == [None, saved[0], None, saved[1]]
    assert rows[0]["training"] == {"loss": 1.0}
    assert rows[-1]["system"]["records_per_second"] > 0
    carried = [json.loads(line) for line in (run / "checkpoint_4" / "metrics.jsonl").read_text().splitlines()]
    assert [row["batches"] for row in carried] == [3, 4], "what was reported since the checkpoint before"
    assert not any("system" in row for row in carried), "of two equal runs, checkpoints are equal"
    assert trial.context.get_tensorboard_path() == run / "tensorboard"
    assert (trial.context.get_experiment_id(), trial.context.get_trial_id()) == (0, 0)


def test_nothing_is_written_before_the_first_report(home: Path) -> None:
    with pytorch.init() as context:
        OneWeight(context)
    assert not home.exists()


def test_an_unwritable_directory_is_found_before_the_first_batch(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home.parent / "file").touch()
    monkeypatch.setenv("DRAY_HOME", str(home.parent / "file"))
    with pytorch.init() as context:
        trial = OneWeight(context)
        with pytest.raises(StorageError, match=r"can't write metrics .* Not a directory; .* variable DRAY_HOME"):
            pytorch.Trainer(trial, context).fit(max_length=Batch(2))
    assert trial.seen == []


@pytest.mark.api("9.7")
def test_an_id_and_a_path_both_name_a_checkpoint(home: Path) -> None:
    ids: list[str] = []

    fit(callbacks=callback(on_checkpoint_upload_end=lambda uuid: ids.append(uuid)), max_length=Batch(2))
    assert fit(max_length=Batch(5), latest_checkpoint=ids[0]).weight == one_weight(5)
    path = home / "local" / ids[0]
    assert fit(max_length=Batch(3), latest_checkpoint=str(path)).weight == one_weight(3)
    with pytest.raises(FileNotFoundError, match="neither an id that"):
        fit(max_length=Batch(3), latest_checkpoint="20200101-nothing/checkpoint_1")
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="never completed"):
        fit(max_length=Batch(3), latest_checkpoint=ids[0])


@pytest.mark.api("9.7")
def test_last_is_the_newest_valid_checkpoint_of_runs_of_that_name(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dray")

    def last(length: int, name: str | None = "digits") -> int:
        """Train to this length, and return at which batch the run began."""
        begun: list[int] = []

        with pytorch.init(exp_conf=name and {"name": name}) as context:  # type: ignore[arg-type]
            trial = OneWeight(context)
            trial.callbacks.update(callback(on_trial_startup=lambda first, _: begun.append(first)))
            pytorch.Trainer(trial, context).fit(max_length=Batch(length), latest_checkpoint="last")
        assert trial.weight == one_weight(length)
        return begun[0]

    assert last(2) == 0
    assert 'there is no checkpoint of an earlier run named "digits": training begins at batch 0' in caplog.messages
    assert last(3, "digits-2") == 0, "another name"
    assert last(3, None) == 0, "the script's name"
    assert last(4) == 2
    caplog.clear()
    assert last(4) == 4, "nothing is left to train"
    assert "to train longer, pass a larger max_length" in caplog.text
    assert "no checkpoint was saved" not in caplog.text
    newest = max((home / "local").glob("digits-2*/checkpoint_4"), key=lambda path: path.stat().st_mtime_ns)
    (newest / "state-dict.pth").write_bytes(b"damaged")
    assert last(5) == 2, "a damaged checkpoint is skipped"


@pytest.mark.api("7.9")
def test_a_copy_without_a_manifest_loads_by_its_path_with_a_warning(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies = callback(on_checkpoint_write_end=lambda checkpoint_dir: shutil.copytree(checkpoint_dir, tmp_path / "best"))
    fit(callbacks=copies, max_length=Batch(2))
    copy = tmp_path / "best"
    assert not (copy / "manifest.json").exists()
    assert fit(max_length=Batch(5), latest_checkpoint=str(copy)).weight == one_weight(5)
    warning = f"{copy} has no manifest.json, so it can't be verified: a file may be damaged or missing"
    assert caplog.messages.count(warning) == 1
    assert pytorch.load_trial_from_checkpoint_path(copy, trial_class=OneWeight).weight == one_weight(2)  # type: ignore[attr-defined]
    assert caplog.messages.count(warning) == 2
    export(Location.of(copy), tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / "checkpoint.json").read_text())["batches"] == 2


@pytest.mark.api("8.16")
def test_sigterm_requests_a_stop_with_a_checkpoint(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LISTEN_S", 1000)  # so that it is the next report that ends it

    def terminate(self: OneWeight, batch_idx: int) -> None:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    made = fit(trial(at_batch=terminate), max_length=Batch(50), reporting_period=Batch(2))
    assert signal.getsignal(signal.SIGTERM) is before
    assert made.weight == one_weight(4)
    assert [path.name for path in (home / "local").glob("*/checkpoint_*")] == ["checkpoint_4"]


class Interrupted(OneWeight):
    """Interrupts its process at these batches."""

    at: tuple[int, ...] = (2,)
    begun = 0

    def at_batch(self, batch_idx: int) -> None:
        Interrupted.begun = batch_idx + 1
        if batch_idx in self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("listen_s", [0.001, 1000], ids=["far from a report", "at a report"])
def test_ctrl_c_saves_prints_how_to_resume_and_is_raised(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], listen_s: float
) -> None:
    monkeypatch.setattr(agreement, "LISTEN_S", listen_s)
    monkeypatch.setattr(progress, "log", logging.Logger("nobody listens"))
    far = 1_000_000
    monkeypatch.setattr(sys, "excepthook", lambda *error: print("a traceback", file=sys.stderr))
    with pytest.raises(KeyboardInterrupt) as raised:
        fit(Interrupted, max_length=Batch(far), reporting_period=Batch(far if listen_s < 1 else 2))
    sys.excepthook(raised.type, raised.value, raised.tb)  # as Python does if the script does not catch it
    done = Interrupted.begun
    assert 2 < done < far
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    printed = capsys.readouterr().err.splitlines()
    epochs = "1 epoch" if done == 5 else f"{done / 5:.4g} epochs"
    assert f"stopped by Ctrl-C after {done:,} of 1,000,000 batches ({epochs})" in printed
    resume = re.fullmatch(r'resume with: fit\(\.\.\., latest_checkpoint="(.*)"\)', printed[-1])
    assert resume, printed
    assert resume[1].endswith(f"/checkpoint_{done}")
    assert fit(max_length=Batch(done + 3), latest_checkpoint=resume[1]).weight == pytest.approx(one_weight(done + 3))


def test_a_second_ctrl_c_ends_the_run_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LISTEN_S", 1000)
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0)
    monkeypatch.setattr(Interrupted, "at", (2, 4))
    with pytest.raises(KeyboardInterrupt):
        fit(Interrupted, max_length=Batch(50))
    assert Interrupted.begun == 5
    assert not list((home / "local").glob("*/checkpoint_*"))


def test_a_ctrl_c_that_arrives_twice_is_one_request(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LISTEN_S", 1000)
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 1000)
    monkeypatch.setattr(Interrupted, "at", (2, 3))
    with pytest.raises(KeyboardInterrupt):
        fit(Interrupted, max_length=Batch(50), reporting_period=Batch(5))
    assert [path.name for path in (home / "local").glob("*/checkpoint_*")] == ["checkpoint_5"]


def test_ctrl_c_while_nothing_trains_raises_at_once(home: Path) -> None:
    with pytest.raises(KeyboardInterrupt), pytorch.init():
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([], 60)
    assert not home.exists()


def test_the_programs_own_handler_stays(home: Path) -> None:
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        assert fit(Interrupted, max_length=Batch(4)).weight == one_weight(4)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signals == [signal.SIGINT]


def test_loader_workers_survive_a_ctrl_c_in_the_terminal(home: Path) -> None:
    before = multiprocessing.active_children()  # of other tests

    class Loading(OneWeight):
        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(Ones(10), batch_size=2, num_workers=1, multiprocessing_context="fork")

        def at_batch(self, batch_idx: int) -> None:
            if batch_idx == 2:
                [worker] = [each for each in multiprocessing.active_children() if each not in before]
                assert worker.pid is not None
                os.kill(worker.pid, signal.SIGINT)

    assert fit(Loading, max_length=Batch(20)).weight == one_weight(20)


def test_a_run_is_named_after_its_program_or_its_config(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/here/train_digits.py", "--epochs", "3"])
    fit(max_length=Batch(1))
    monkeypatch.setattr(sys, "argv", ["/here/my_package/__main__.py"])
    fit(max_length=Batch(1))
    monkeypatch.setattr(sys, "argv", ["-c"])
    fit(max_length=Batch(1))
    for name in ("my digits/2", "../../x"):  # hidden runs are not listed
        with pytorch.init(exp_conf={"name": name}) as context:
            pytorch.Trainer(OneWeight(context), context).fit(max_length=Batch(1))
    names = {re.sub(r"-\d{8}-\d{6}-[0-9a-f]{4}$", "", run.name) for run in (home / "local").iterdir()}
    assert names == {"train_digits", "my_package", "python", "my-digits-2", "x"}


def test_a_run_in_another_thread_leaves_signals_alone(home: Path) -> None:
    trials: list[OneWeight] = []
    thread = threading.Thread(target=lambda: trials.append(fit(max_length=Batch(2))))
    thread.start()
    thread.join()
    assert trials[0].weight == one_weight(2)


@pytest.mark.api("2.5")
def test_a_seed_in_the_config_seeds_the_process(home: Path) -> None:
    def draw(exp_conf: dict[str, Any]) -> tuple[int, float]:
        with pytorch.init(exp_conf=exp_conf) as context:
            return context.get_trial_seed(), torch.rand(()).item()

    fixed = {"reproducibility": {"experiment_seed": 7}}
    assert draw(fixed) == draw(fixed)
    assert draw(fixed)[0] == 7
    with pytest.raises(ValueError, match="experiment_seed'] must be an int >= 0, got -1"):
        draw({"reproducibility": {"experiment_seed": -1}})


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


@pytest.mark.api("2.5")
def test_without_a_seed_the_callers_random_numbers_are_unchanged(home: Path) -> None:
    def seed_all(seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    seed_all(7)
    weight, following = torch.nn.Linear(3, 3).weight, draws()
    seed_all(7)
    with pytorch.init(exp_conf={"name": "digits"}) as context:
        model = context.wrap_model(torch.nn.Linear(3, 3))
        assert torch.equal(model.weight, weight)
        assert draws() == following


@pytest.mark.api("2.5")
def test_a_seeded_program_gets_the_same_order_each_time(home: Path) -> None:
    def order(seed: int) -> tuple[int, list[float]]:
        seen: list[float] = []

        class Shuffled(OneWeight):
            def build_training_data_loader(self) -> pytorch.DataLoader:
                return pytorch.DataLoader(torch.arange(16.0), batch_size=1, shuffle=True)

            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                seen.append(batch.item())
                return super().train_batch(torch.ones(1), epoch_idx, batch_idx)

        torch.manual_seed(seed)
        trial = fit(Shuffled, max_length=pytorch.Epoch(1))
        return trial.context.get_trial_seed(), seen

    assert order(7) == order(7)
    assert order(7)[0] == 7
    assert order(7)[1] != order(8)[1]
    assert 0 <= order(2**40 + 7)[0] < 2**31, "as a seed for NumPy"


@pytest.mark.api("9.10")
def test_a_store_in_the_working_directory_is_not_copied_into_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    for _ in range(2):
        fit(max_length=Batch(2), checkpoint_period=Batch(1))
    codes = [sorted(p.name for p in code.rglob("*") if p.is_file()) for code in tmp_path.glob("local/*/*/code")]
    assert codes == [["train.py"]] * 4


def test_a_host_is_current_only_within_its_block(tmp_path: Path) -> None:
    outer, inner = FakeHost(tmp_path / "outer"), FakeHost(tmp_path / "inner")
    assert current_host() is None
    with use_host(outer):
        with use_host(inner):
            assert current_host() is inner
        assert current_host() is outer
        with pytorch.init() as context:
            assert context.get_tensorboard_path() == outer.tensorboard_path
    assert current_host() is None


def test_a_run_in_a_given_directory(home: Path, tmp_path: Path) -> None:
    with use_host(LocalHost(tmp_path / "mine", trial_seed=3)), pytorch.init() as context:
        pytorch.Trainer(OneWeight(context), context).fit(max_length=Batch(1))
    assert (tmp_path / "mine" / "checkpoint_1" / "manifest.json").exists()


def rows(*batches: int) -> list[dict[str, Any]]:
    return [{"batches": number} for number in batches]


def carried(unsaved: UnsavedRows, staging: Path) -> list[dict[str, Any]]:
    """The rows that a checkpoint staged now carries."""
    unsaved.stage(staging)
    return list(unsaved.take(staging).rows)


def test_rows_are_carried_until_a_checkpoint_is_committed(tmp_path: Path) -> None:
    unsaved = UnsavedRows()
    unsaved.add(rows(1, 2))
    assert carried(unsaved, tmp_path) == rows(1, 2)
    unsaved.add(rows(3, 4))
    # That checkpoint found no room: the next carries its rows too.
    assert carried(unsaved, tmp_path) == rows(1, 2, 3, 4)
    unsaved.saved = 4
    assert carried(unsaved, tmp_path) == []


def test_rows_reported_between_staging_and_commit_stay_unsaved(tmp_path: Path) -> None:
    unsaved = UnsavedRows()
    unsaved.add(rows(1))
    unsaved.stage(tmp_path, 0.5)
    unsaved.add(rows(2, 3))
    assert unsaved.take(tmp_path)[:2] == (rows(1), 0.5)
    unsaved.saved = 2
    assert carried(unsaved, tmp_path) == rows(3)
    unsaved.saved = 4
    unsaved.add(rows(4))
    assert carried(unsaved, tmp_path) == [], "the report of a checkpoint may be published after its commit"


def test_a_checkpoint_that_failed_is_forgotten(tmp_path: Path) -> None:
    unsaved = UnsavedRows()
    unsaved.stage(tmp_path / "removed when writing failed")
    unsaved.stage(tmp_path)
    with pytest.raises(KeyError):
        unsaved.take(tmp_path / "removed when writing failed")


def test_a_run_that_begins_again_is_another_one(tmp_path: Path) -> None:
    unsaved = UnsavedRows()
    unsaved.saved = 10
    unsaved.add(rows(5))
    unsaved.add(rows(6))
    assert carried(unsaved, tmp_path) == rows(5, 6)
