"""What Determined's fields do to a trial in this process; and hyperparameters that no trial has read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray import core, pytorch
from dray.config.load import load_config
from dray.experiment.effects import Append
from dray.experiment.local import run_local
from dray.experiment.unread import UnreadHparams
from dray.hosts import use_host
from dray.leases.effects import Say
from dray.leases.messages import DeskReport
from dray.training import cluster_info
from dray.training.cluster_info import use_cluster_info
from searchers.space import parse
from tests.experiment.test_driver import Scene
from tests.experiment.test_local import CONFIG, TRIAL, model_dir  # noqa: F401 - a fixture
from tests.pytorch.fakes import FakeHost


def changed(**fields: Any) -> dict[str, Any]:
    """The config of eight batches of two records, four of which are an epoch; searched by one trial."""
    searcher = {"name": "single", "metric": "error", "max_length": {"batches": 8}}
    return {**CONFIG, "hyperparameters": {"global_batch_size": 2, "lr": 0.1}, "searcher": searcher, **fields}


def rows(directory: Path, kind: str) -> list[int]:
    """The batches after which something of this kind was reported."""
    found = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["batches"] for row in found if kind in row]


@pytest.fixture
def noted(model_dir: Path) -> Path:  # noqa: F811
    """A trial that notes what it finds, in a file of its directory."""
    (model_dir / "my_weight.py").write_text(
        "import json, os\nHERE = os.path.dirname(__file__)\nFOUND = os.environ.get('FLAVOUR')\n"
        + TRIAL.replace(
            "        self.context = context\n", "        self.context = context\n        " + "self.begin()\n"
        )
        + """
    def begin(self):
        pass

class Noting(OneWeight):
    def build_callbacks(self):
        with open(HERE + "/noted.json", "w") as file:
            amp = self.context._run.uses_amp
            config = self.context.get_experiment_config()
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
            workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
            precision = str(getattr(self.context._run.optimisation.amp, "dtype", None))
            found = {"flavour": FOUND, "amp": amp, "dtype": precision, "config": config, "gpus": gpus}
            found["deterministic"] = [torch.are_deterministic_algorithms_enabled(), workspace]
            json.dump(found, file)
        return {}

class WithAmp(Noting):
    def begin(self):
        self.context.experimental.use_amp()

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(1), torch.ones(1)

class Stream(OneWeight):
    def __init__(self, context):
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()
        self.epochs = []
    def build_training_data_loader(self):
        return torch.utils.data.DataLoader(Endless(), batch_size=2)
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.epochs.append(epoch_idx)
        with open(HERE + "/epochs.json", "w") as file:
            json.dump(self.epochs, file)
        return super().train_batch(batch, epoch_idx, batch_idx)
"""
    )
    return model_dir


def test_scheduling_unit_is_how_often_metrics_are_reported(model_dir: Path) -> None:  # noqa: F811
    directory = run_local(load_config(changed(scheduling_unit=3)), model_dir, path=model_dir / "run")
    assert rows(directory, "training") == [3, 6, 8]
    assert rows(directory, "validation") == [8]


def test_initial_validation_comes_before_the_first_batch(model_dir: Path) -> None:  # noqa: F811
    directory = run_local(load_config(changed(perform_initial_validation=True)), model_dir, path=model_dir / "run")
    assert rows(directory, "validation") == [0, 8]


@pytest.mark.parametrize(
    ("entrypoint", "precision", "mixed"),
    [("Noting", "O0", False), ("Noting", "O1", True), ("WithAmp", "O1", True), ("Noting", "bfloat16", True)],
)
def test_mixed_precision_is_that_of_use_amp_once(noted: Path, entrypoint: str, precision: str, mixed: bool) -> None:
    config = changed(entrypoint=f"my_weight:{entrypoint}", optimizations={"mixed_precision": precision})
    run_local(load_config(config), noted, path=noted / "run")
    found = json.loads((noted / "noted.json").read_text())
    assert found["amp"] is mixed
    assert found["dtype"] == (
        "torch.bfloat16" if precision == "bfloat16" else "None"
    )  # on a CPU, float16 has no effect


def test_variables_are_there_before_the_code_and_the_hook_and_gone_after(
    noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLAVOUR", raising=False)
    monkeypatch.setenv("UNWANTED", "here")
    (noted / "startup-hook.sh").write_text('echo "$FLAVOUR ${UNWANTED-unset}" > hook.txt\n')
    variables = {device: ["FLAVOUR=vanilla", "UNWANTED"] for device in ("cpu", "cuda", "rocm")}
    config = changed(entrypoint="my_weight:Noting", environment={"environment_variables": variables})
    run_local(load_config(config), noted, path=noted / "run")
    found = json.loads((noted / "noted.json").read_text())
    assert found["flavour"] == "vanilla"
    assert (noted / "hook.txt").read_text() == "vanilla unset\n"
    assert "FLAVOUR" not in os.environ
    assert os.environ["UNWANTED"] == "here"
    for file in (noted / "run").rglob("*"):
        stored = file.is_file() and file.parent.name != "code" and b"vanilla" in file.read_bytes()
        assert not stored, "values are stored nowhere"


def test_algorithms_are_deterministic_in_a_local_run_that_asks_for_it(
    noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for wanted, seen in ((True, [True, ":4096:8"]), (False, [False, None])):
        config = changed(entrypoint="my_weight:Noting", reproducibility={"experiment_seed": 7, "deterministic": wanted})
        run_local(load_config(config), noted, path=noted / f"{wanted}")
        assert json.loads((noted / "noted.json").read_text())["deterministic"] == seen
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_local_run_of_a_cpu_slot_sees_no_gpus(noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for slot, seen in (("cpu", ""), (None, "0")):
        run_local(
            load_config(changed(entrypoint="my_weight:Noting", resources={"slot": slot})), noted, path=noted / f"{slot}"
        )
        assert json.loads((noted / "noted.json").read_text())["gpus"] == seen
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("fields", "validated"),
    [
        ({"max_time": 2, "time_metric": "epochs"}, [4, 8]),
        ({"max_time": 8, "time_metric": "batches"}, [4, 8]),
        ({"max_length": {"epochs": 2}}, [4, 8]),
    ],
)
def test_time_in_batches_or_epochs_is_compared_at_its_rungs(
    model_dir: Path,  # noqa: F811
    fields: dict[str, Any],
    validated: list[int],
) -> None:
    searcher = {"name": "asha", "metric": "error", "max_trials": 2, "num_rungs": 2, "divisor": 2, **fields}
    directory = run_local(load_config(changed(searcher=searcher)), model_dir, path=model_dir / "run")
    assert rows(directory, "validation") == validated


def test_code_reads_the_config_as_determineds_copy_has_it(noted: Path) -> None:
    run_local(load_config(changed(entrypoint="my_weight:Noting", workspace="vision")), noted, path=noted / "run")
    config = json.loads((noted / "noted.json").read_text())["config"]
    assert config["min_validation_period"] == config["min_checkpoint_period"] == {"batches": 0}
    assert (config["records_per_epoch"], config["scheduling_unit"]) == (0, 100)
    assert config["searcher"]["max_length"] == {"batches": 8}
    assert config["optimizations"] == {
        "aggregation_frequency": 1,
        "average_aggregated_gradients": True,
        "gradient_compression": False,
        "mixed_precision": "O0",
    }
    assert load_config({**config, "data": {}}).searcher.max_length == load_config(changed()).searcher.max_length


def test_records_per_epoch_are_those_of_data_without_a_length(noted: Path) -> None:
    searcher = {"name": "single", "metric": "error", "max_length": {"epochs": 2}}
    config = changed(entrypoint="my_weight:Stream", searcher=searcher, min_validation_period={"epochs": 1})
    # Seven records are three batches of two, and one that makes none.
    directory = run_local(load_config({**config, "records_per_epoch": 7}), noted, path=noted / "run")
    assert rows(directory, "validation") == [3, 6]
    assert json.loads((noted / "epochs.json").read_text()) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"needs a sized training loader.*records_per_epoch"):
        run_local(load_config(config), noted, path=noted / "other")


def test_records_per_epoch_do_not_matter_where_the_data_says_it(model_dir: Path) -> None:  # noqa: F811
    searcher = {"name": "single", "metric": "error", "max_length": {"epochs": 2}}
    config = load_config(changed(searcher=searcher, records_per_epoch=1000))
    assert rows(run_local(config, model_dir, path=model_dir / "run"), "validation") == [8]


RANGE = {"type": "double", "minval": 0.0, "maxval": 1.0}
SPACE = parse(
    {"lr": RANGE, "dropuot": RANGE, "hidden": 64, "global_batch_size": RANGE, "sgd": {"momentum": RANGE}}
).root
DRAWN = {"lr": 0.1, "dropuot": 0.5, "hidden": 64, "global_batch_size": 8, "sgd": {"momentum": 0.9}}
INFO = core.ClusterInfo(trial=core.TrialInfo(trial_id=0, experiment_id=0, trial_seed=0, hparams=DRAWN))


def test_only_searched_names_that_no_trial_has_read_are_unread() -> None:
    unread = UnreadHparams(())
    first = unread.add(SPACE, DRAWN, ["hidden", "lr"])
    assert first == {
        "event": "unread",
        "unread": ["dropuot", "sgd.momentum"],
        "read": ["hidden", "lr"],
    }
    assert unread.add(SPACE, DRAWN, ["lr"]) is None, "nothing new"
    second = UnreadHparams([first]).add(SPACE, DRAWN, ["sgd"])  # by another driver
    assert second is not None
    assert second["unread"] == ["dropuot"]
    last = unread.add(SPACE, DRAWN, ["sgd", "dropuot"])
    assert last is not None
    assert last["unread"] == []
    assert UnreadHparams(()).add(SPACE, DRAWN, list(DRAWN)) is None, "a program that reads all"
    branch = {name: value for name, value in DRAWN.items() if name != "dropuot"}
    assert UnreadHparams(()).add(SPACE, branch, ["lr", "sgd"]) is None, "what is not drawn can't be read"


@pytest.mark.parametrize(
    ("reads", "found"),
    [
        (lambda context: context.get_hparam("lr"), ["lr"]),
        (lambda context: [context.get_hparam(name) for name in ("sgd", "lr")], ["sgd", "lr"]),
        (lambda context: context.get_hparams(), None),
        (lambda context: [context.get_hparams()["lr"], context.get_hparam("lr")], None),
        (lambda context: dray.get_cluster_info(), None),
        (lambda context: context.get_per_slot_batch_size(), []),
    ],
)
def test_the_context_notes_what_is_read_and_that_all_may_be(
    tmp_path: Path, reads: Any, found: list[str] | None
) -> None:
    with use_cluster_info(INFO), use_host(FakeHost(tmp_path)), pytorch.init() as context:
        reads(context)
        noted = cluster_info.hparams_read
        assert (None if noted is None else list(noted)) == found
    assert cluster_info.hparams_read is None


def test_a_driver_tells_it_once_and_records_what_changes() -> None:
    scene = Scene()
    for lease, trial in ((1, 0), (2, 1)):
        scene.grant(lease, trial)
    scene.take(Append)
    for lease, read in ((1, None), (1, ()), (2, ()), (2, ("lr", "other"))):
        scene.driver.report("call", lease, DeskReport(read=read), False)
    assert scene.take(Say) == [Say("warning: lr is searched, but no trial has read it; read: none")]
    records = [each.record for each in scene.take(Append)]
    assert [(each["unread"], each["read"]) for each in records] == [(["lr"], []), ([], ["lr"])]
    again = Scene(scene.journal)
    again.grant(3, 0)
    again.driver.report("call", 3, DeskReport(read=()), False)
    assert again.take(Say) == []


@pytest.mark.parametrize("name", ["lr", "dropuot"])
def test_a_local_run_tells_it(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_weight.py").write_text(TRIAL)
    hparams = {**CONFIG["hyperparameters"], name: {"type": "double", "minval": 0.05, "maxval": 0.2}}
    with caplog.at_level(logging.WARNING):
        run_local(load_config({**CONFIG, "hyperparameters": hparams}), tmp_path / "code", path=tmp_path / "run")
    line = "dropuot is searched, but no trial has read it; read: lr"
    assert (line in caplog.text) == (name == "dropuot")
