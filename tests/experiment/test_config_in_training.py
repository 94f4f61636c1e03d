"""What the fields of Determined's experiment file do to a trial, in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.config.load import load_config
from dray.experiment.local import run_local
from tests.experiment.test_local import CONFIG, TRIAL, model_dir  # noqa: F401 - a fixture


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
