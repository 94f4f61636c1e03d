"""A trial's event files, read by TensorBoard itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.tensorboard.metric_writers.pytorch import TorchWriter
from dray.training.metrics.tensorboard import TensorBoard
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, one_weight, trial
from tests.training.test_usage import read


class TwoMetrics(OneWeight):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {**super().train_batch(batch, epoch_idx, batch_idx), "number": batch_idx, "text": "x", "none": None}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {**super().evaluate_batch(batch, batch_idx), "error": 0.5}


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by tag."""
    shown = read(directory)
    return {tag: [(s.step, s.value) for s in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def losses(first: int, last: int) -> list[tuple[int, float]]:
    """The oracle: the loss of each batch."""
    return [(i, pytest.approx((1 - one_weight(i)) ** 2)) for i in range(first, last)]  # type: ignore[misc]


@pytest.mark.api("2.11")
def test_there_is_a_scalar_for_every_batch_and_one_for_every_validation(fit: Fit, host: FakeHost) -> None:
    before = time.time()
    fit(TwoMetrics, max_length=Batch(150), reporting_period=Batch(100), validation_period=Batch(60))
    found = scalars(host.tensorboard_path)
    assert found["system/records_per_second"][-1][0] == 150, "every five seconds, and at the end"
    assert sorted(name for name in found if not name.startswith("system/")) == [
        "Determined/loss",
        "Determined/number",
        "Determined/val_error",
        "Determined/validation_loss",
    ]
    assert found["Determined/loss"] == losses(0, 150)
    assert found["Determined/number"] == [(i, float(i)) for i in range(150)]
    assert found["Determined/val_error"] == [(60, 0.5), (120, 0.5), (150, 0.5)]
    assert found["Determined/validation_loss"] == [(i, pytest.approx((1 - one_weight(i)) ** 2)) for i in (60, 120, 150)]
    times = [s.wall_time for s in read(host.tensorboard_path).Scalars("Determined/loss")]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= time.time()


@pytest.mark.api("2.11", "6.5")
def test_a_reduced_metric_is_shown_at_the_batches_trained(fit: Fit, host: FakeHost) -> None:
    class Reducing(OneWeight):
        def at_init(self) -> None:
            self.count = self.context.wrap_reducer(len, name="count")

        def at_batch(self, batch_idx: int) -> None:
            self.count.update(1)

    fit(Reducing, max_length=Batch(5), reporting_period=Batch(3))
    found = scalars(host.tensorboard_path)
    assert found["Determined/count"] == [(3, 3.0), (5, 2.0)]
    assert found["Determined/val_count"] == [(5, 0.0)]


@pytest.mark.api("2.10")
@pytest.mark.parametrize("by", ["init", "context"])
def test_switched_off_nothing_is_written(fit: Fit, host: FakeHost, by: str) -> None:
    class Silent(OneWeight):
        def at_init(self) -> None:
            if by == "context":
                self.context.set_enable_tensorboard_logging(False)

    fit(Silent, init={"enable_tensorboard_logging": by == "context"}, max_length=Batch(3))
    assert not host.tensorboard_path.exists()


@pytest.mark.api("2.10")
def test_scalars_can_be_switched_on_and_off_while_training(fit: Fit, host: FakeHost) -> None:
    switching = trial(at_batch=lambda self, batch_idx: self.context.set_enable_tensorboard_logging(4 <= batch_idx < 8))
    fit(switching, init={"enable_tensorboard_logging": False}, max_length=Batch(12), reporting_period=Batch(2))
    # Metrics are written if logging is on both at the start of a workload and at its report.
    assert scalars(host.tensorboard_path) == {"Determined/loss": losses(6, 8)}


@pytest.mark.api("2.11")
def test_a_resumed_trial_writes_over_what_it_does_again(fit: Fit, host: FakeHost) -> None:
    fit(OneWeight, max_length=Batch(8), checkpoint_period=Batch(4), validation_period=Batch(4))
    resumed = FakeHost(host.tensorboard_path.parent / "again")
    resumed.tensorboard_path = host.tensorboard_path
    fit(OneWeight, resumed, max_length=Batch(10), latest_checkpoint=host.checkpoints()[0])
    found = scalars(host.tensorboard_path)
    loss = found["Determined/loss"]
    assert loss[:5] == losses(0, 5)
    assert loss[5:] == losses(4, 10)
    assert [step for step, _ in found["Determined/validation_loss"]] == [4, 10]


def hparams(directory: Path) -> list[dict[str, Any]]:
    """The hyperparameters in each of a directory's files."""
    found = []
    for file in sorted(directory.iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag == metadata.SESSION_START_INFO_TAG:
                    info = metadata.parse_session_start_info_plugin_data(value.metadata.plugin_data.content)
                    found.append({name: getattr(each, each.WhichOneof("kind")) for name, each in info.hparams.items()})
    return found


HPARAMS = {
    "global_batch_size": 8,
    "lr": 0.5,
    "net": {"act": "relu", "norm": None, "depths": [1, 2]},
    "flag": True,
    "id": 2**70,
}
SHOWN = {
    "global_batch_size": 8.0,
    "lr": 0.5,
    "net.act": "relu",
    "net.norm": "None",
    "net.depths": "[1, 2]",
    "flag": True,
    "id": str(2**70),
}


@pytest.mark.parametrize("by", ["trainer", "writer"])
def test_hyperparameters_are_written_once_with_the_first_scalars(fit: Fit, host: FakeHost, by: str) -> None:
    class Trial(OneWeight):
        def at_init(self) -> None:
            if by == "writer":
                self.context.get_tensorboard_writer()

    fit(Trial, init={"hparams": HPARAMS}, max_length=Batch(6), reporting_period=Batch(2))
    assert hparams(host.tensorboard_path) == [SHOWN]
    assert scalars(host.tensorboard_path)["Determined/loss"] == losses(0, 6)


@pytest.mark.api("2.9", "2.11")
def test_the_trials_writer_and_the_trainers_scalars_share_a_file(fit: Fit, host: FakeHost) -> None:
    class Writing(OneWeight):
        def at_batch(self, batch_idx: int) -> None:
            if batch_idx >= 3:
                self.context.get_tensorboard_writer().add_scalar("mine", float(batch_idx), batch_idx)

    fit(Writing, max_length=Batch(8), reporting_period=Batch(2))
    found = scalars(host.tensorboard_path)
    assert found["Determined/loss"] == losses(0, 8)
    assert found["mine"] == [(i, float(i)) for i in range(3, 8)]
    assert len(list(host.tensorboard_path.iterdir())) == 2, "the scalars before there was a writer; all others"


@pytest.mark.api("2.11")
def test_a_disk_that_takes_no_files_does_not_end_the_training(
    fit: Fit, host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    host.tensorboard_path.parent.mkdir(parents=True, exist_ok=True)
    host.tensorboard_path.write_text("a file in the way")
    trial = fit(OneWeight, max_length=Batch(6), reporting_period=Batch(2))
    assert trial.weight == pytest.approx(one_weight(6))
    assert caplog.text.count("no more metrics are written for TensorBoard") == 1


@pytest.mark.long
@pytest.mark.slow
def test_scalars_are_written_without_an_import_of_tensorboard(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from dray.training.metrics.tensorboard import TensorBoard\n"
        "TensorBoard(pathlib.Path(sys.argv[1])).write([(1.0, 1, {'x': 2.0})])\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('tensorboard', 'absl')])"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert scalars(tmp_path) == {"x": [(1, 2.0)]}


@pytest.mark.api("10.1")
def test_torchwriter_writes_where_the_trial_does(host: FakeHost) -> None:
    with use_host(host), pytorch.init() as context:
        with pytest.warns(FutureWarning, match="get_tensorboard_writer"):
            writer = TorchWriter()
        assert isinstance(writer.writer, torch.utils.tensorboard.SummaryWriter)
        assert writer.writer is context.get_tensorboard_writer()
        writer.add_scalar("x", 2.0, 3)
        writer.flush()
        assert scalars(host.tensorboard_path) == {"x": [(3, 2.0)]}
        writer.reset()
        writer.add_scalar("x", 4.0, 5)
    # In no order: torch names its tenth file in a second so that it comes before the ninth.
    assert sorted(scalars(host.tensorboard_path)["x"]) == [(3, 2.0), (5, 4.0)]


@pytest.mark.api("10.1")
def test_torchwriter_outside_of_a_trial_is_an_error(host: FakeHost) -> None:
    with use_host(host), pytorch.init():
        pass
    with (
        pytest.warns(FutureWarning),
        pytest.raises(RuntimeError, match=r"no trial to write for; create it within pytorch\.init\(\)"),
    ):
        TorchWriter()


def test_after_the_writer_was_closed_scalars_go_to_a_new_file(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.writer().close()
    board.write([(1.0, 1, {"x": 1.0})])
    board.close()
    assert scalars(tmp_path) == {"x": [(1, 1.0)]}
