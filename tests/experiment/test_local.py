"""One trial of an experiment in the caller's own process, as the search would train it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dray.code.startup_hook import StartupHookFailed
from dray.config.load import load_config
from dray.errors import ConfigError
from dray.experiment.local import run_local
from dray.pytorch import load_trial_from_checkpoint_path
from dray.script import ScriptFailed
from dray.storage import Location, RemoteDirectory
from dray.training.errors import SearcherMetricError
from tests.model_code import imports_undone

# One weight, drawn towards 1 by gradient descent: w' = w + 2 lr (1 - w), the loss before it is (1 - w) ** 2.
TRIAL = """
import torch
from torch.utils.data import TensorDataset
from dray import pytorch

class OneWeight(pytorch.PyTorchTrial):
    def __init__(self, context):
        self.context = context
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.zero_()
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))
    def build_training_data_loader(self):
        ones = torch.ones(8, 1)
        return pytorch.DataLoader(TensorDataset(ones, ones), batch_size=self.context.get_per_slot_batch_size())
    build_validation_data_loader = build_training_data_loader
    def loss(self, batch):
        return ((self.model(batch[0]) - batch[1]) ** 2).mean()
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}
    def evaluate_batch(self, batch, batch_idx):
        return {"error": self.loss(batch)}
"""

CONFIG: dict[str, Any] = {
    "entrypoint": "my_weight:OneWeight",
    "hyperparameters": {"global_batch_size": 2, "lr": {"type": "double", "minval": 0.05, "maxval": 0.2}},
    "searcher": {
        "name": "asha",
        "metric": "error",
        "max_length": {"batches": 8},
        "max_trials": 4,
        "divisor": 2,
        "num_rungs": 3,
    },
    "reproducibility": {"experiment_seed": 7},
}
#: What trial 0 draws.
LR: Any = load_config(CONFIG).space.sample(Random("7:0"))["lr"]


@pytest.fixture(autouse=True)
def model_dir(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "my_weight.py").write_text(TRIAL)
    with imports_undone():
        yield tmp_path


def validations(directory: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {row["batches"]: row["validation"]["error"] for row in rows if "validation" in row}


def list_checkpoints(directory: Path) -> set[int]:
    return {int(path.name.partition("_")[2]) for path in directory.glob("checkpoint_*")}


def test_trial_0_of_the_search_is_trained_and_validated_at_its_rungs(model_dir: Path) -> None:
    seen = validations(run_local(load_config(CONFIG), model_dir, path=model_dir / "run"))
    assert seen == pytest.approx({n: (1 - 2 * LR) ** (2 * n) for n in (2, 4, 8)}, rel=1e-4)


@pytest.mark.parametrize(
    ("length", "batches"),
    [({"epochs": 4}, [4, 8, 16]), ({"records": 16}, [2, 4, 8]), (8, [2, 4, 8])],
)
def test_length_may_be_in_any_unit(model_dir: Path, length: Any, batches: list[int]) -> None:
    config = {**CONFIG, "searcher": {**CONFIG["searcher"], "max_length": length}}
    assert list(validations(run_local(load_config(config), model_dir, path=model_dir / "run"))) == batches


@pytest.mark.parametrize("field", ["source_checkpoint_uuid", "source_trial_id"])
@pytest.mark.parametrize("remote", [False, True], ids=["directory", "object store"])
def test_every_trial_begins_with_the_state_of_the_source_at_its_own_first_batch(
    model_dir: Path, field: str, remote: bool
) -> None:
    source = run_local(load_config(CONFIG), model_dir, path=model_dir / "source")
    name = {"source_checkpoint_uuid": f"{source}/checkpoint_8", "source_trial_id": str(source)}[field]
    if remote:
        place = Location.of(f"memory://results{source}")
        RemoteDirectory(place.child("checkpoint_8")).upload(source / "checkpoint_8", last="manifest.json")
        name = f"memory://results{name}"
    config = load_config({**CONFIG, "searcher": {**CONFIG["searcher"], field: name}})
    seen = validations(run_local(config, model_dir, path=model_dir / "run"))
    assert seen == pytest.approx({n: (1 - 2 * LR) ** (2 * (8 + n)) for n in (2, 4, 8)}, rel=1e-3)
    if remote and field == "source_checkpoint_uuid":
        trial: Any = load_trial_from_checkpoint_path(name)
        assert 1 - trial.model.weight.item() == pytest.approx((1 - 2 * LR) ** 8, rel=1e-3)


@pytest.mark.parametrize("remote", [False, True], ids=["directory", "object store"])
def test_a_checkpoint_of_determineds_is_found_in_the_storage_by_its_uuid(model_dir: Path, remote: bool) -> None:
    source = run_local(load_config(CONFIG), model_dir, path=model_dir / "source")
    storage, uuid = model_dir / "storage", "3f0e2b5c-8f61-4c1b-9d3a-0d6f7a3b9e11"
    (storage / uuid).mkdir(parents=True)
    shutil.copy(source / "checkpoint_8" / "state-dict.pth", storage / uuid / "state_dict.pth")
    if remote:
        place = Location.of(f"memory://determined{storage}")
        RemoteDirectory(place.child(uuid)).upload(storage / uuid, last="state_dict.pth")
    where = place.uri if remote else {"type": "shared_fs", "host_path": str(model_dir), "storage_path": "storage"}
    searcher = {**CONFIG["searcher"], "source_checkpoint_uuid": uuid}
    config = load_config({**CONFIG, "searcher": searcher, "checkpoint_storage": where})
    seen = validations(run_local(config, model_dir, path=model_dir / "run"))
    assert seen == pytest.approx({n: (1 - 2 * LR) ** (2 * (8 + n)) for n in (2, 4, 8)}, rel=1e-3)


@pytest.mark.parametrize(
    ("source", "path", "what"),
    [
        ({"source_trial_id": 7}, "searcher.source_trial_id", "must be the directory of a trial, got 7"),
        ({"source_trial_id": "nowhere"}, "searcher.source_trial_id", "no checkpoint in nowhere; give the directory"),
        ({"source_checkpoint_uuid": "nowhere"}, "searcher.source_checkpoint_uuid", "give the checkpoint's path or URI"),
        ({"source_checkpoint_uuid": "no/where"}, "searcher.source_checkpoint_uuid", "no such directory"),
        ({"source_checkpoint_uuid": "a", "source_trial_id": "b"}, "searcher.source_trial_id", "remove one of them"),
    ],
)
def test_a_missing_source_is_an_error_with_its_path(
    model_dir: Path, source: dict[str, Any], path: str, what: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_local(load_config({**CONFIG, "searcher": {**CONFIG["searcher"], **source}}), model_dir)
    [fault] = caught.value.faults
    assert fault.path == path
    assert what in fault.what


TIMED = TRIAL.replace(
    'return {"loss": loss}', "self.seconds = 10.0 * (batch_idx + 1)\n        return {'loss': loss}"
).replace('return {"error": self.loss(batch)}', 'return {"error": self.loss(batch), "seconds": self.seconds}')
BY_TIME = {"name": "asha", "metric": "error", "max_trials": 4, "divisor": 2, "num_rungs": 3, "time_metric": "seconds"}


@pytest.mark.parametrize(
    ("searcher", "validated", "saved"),
    [
        # Rungs at 15, 30 and 60 seconds, seen at the first validations that are as far: 20, 30, 60.
        ({"max_time": 60}, [1, 2, 3, 4, 5, 6], {2, 3, 6}),
        # The length is a bound besides.
        ({"max_time": 60, "max_length": {"batches": 4}}, [1, 2, 3, 4], {2, 3, 4}),
    ],
)
def test_length_may_be_counted_by_a_validation_metric(
    model_dir: Path, searcher: dict[str, Any], validated: list[int], saved: set[int]
) -> None:
    (model_dir / "my_weight.py").write_text(TIMED)
    config = {**CONFIG, "searcher": {**BY_TIME, **searcher}, "min_validation_period": {"batches": 1}}
    run = run_local(load_config({**config, "checkpoint_policy": "none"}), model_dir, path=model_dir / "run")
    assert list(validations(run)) == validated
    assert list_checkpoints(run) == saved


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (TRIAL, "searcher.time_metric: the search measures length by 'seconds', but validation returned ['error']"),
        (
            TIMED.replace("10.0 *", "float('nan') *"),
            "searcher.time_metric: 'seconds' must be a finite number >= 0, got nan",
        ),
        (TIMED.replace("10.0 *", "-10.0 *"), "searcher.time_metric: 'seconds' must be a finite number >= 0, got -10.0"),
    ],
)
def test_validation_without_the_time_is_one_clear_error(model_dir: Path, code: str, what: str) -> None:
    (model_dir / "my_weight.py").write_text(code)
    searcher = {**BY_TIME, "max_time": 60}
    config = load_config({**CONFIG, "searcher": searcher, "min_validation_period": {"batches": 1}})
    with pytest.raises(SearcherMetricError, match=re.escape(what)):
        run_local(config, model_dir, path=model_dir / "run")


@pytest.mark.api("8.16")
def test_policy_best_keeps_a_checkpoint_of_each_better_validation(model_dir: Path) -> None:
    config = load_config({**CONFIG, "min_validation_period": {"batches": 1}})
    assert list_checkpoints(run_local(config, model_dir, path=model_dir / "better")) == set(range(1, 9))
    # The error falls; where a larger one is better, the first stays the best. Rungs and the end are always saved.
    searcher = {**CONFIG["searcher"], "smaller_is_better": False}
    config = load_config({**CONFIG, "searcher": searcher, "min_validation_period": {"batches": 1}})
    assert list_checkpoints(run_local(config, model_dir, path=model_dir / "worse")) == {1, 2, 4, 8}


@pytest.mark.parametrize("period", [{"batches": 3}, {"records": 6}, {"records": 5}])
def test_period_of_validations_may_be_in_any_unit(model_dir: Path, period: dict[str, int]) -> None:
    config = load_config({**CONFIG, "min_validation_period": period})
    assert list(validations(run_local(config, model_dir, path=model_dir / "run"))) == [2, 3, 4, 6, 8]


@pytest.mark.api("2.20")
@pytest.mark.parametrize(("average", "sum_of"), [(True, 1), (False, 4)])
def test_gradients_are_added_up_as_the_config_says(model_dir: Path, average: bool, sum_of: int) -> None:
    optimizations = {"aggregation_frequency": 4, "average_aggregated_gradients": average}
    hparams = {**CONFIG["hyperparameters"], "lr": 0.05}
    config = load_config({**CONFIG, "hyperparameters": hparams, "optimizations": optimizations})
    seen = validations(run_local(config, model_dir, path=model_dir / "run"))
    one_step = (1 - 2 * 0.05 * sum_of) ** 2
    assert seen == pytest.approx({2: 1, 4: one_step, 8: one_step**2}, rel=1e-4)


# -------------------------------------------------------------------------------------------------------- programs
PROGRAM = """
import os, sys
import dray
from dray import pytorch
from my_weight import OneWeight

if __name__ == "__main__":
    info = dray.get_cluster_info()
    assert info.trial._config["name"] == "program" and info.user_data == {"place": "there"}
    with pytorch.init() as context:
        assert context.get_hparams() == info.trial.hparams and context.get_trial_seed() == info.trial.trial_seed
        assert context.get_experiment_config() == info.trial.config
        pytorch.Trainer(OneWeight(context), context).fit(
            max_length=pytorch.Batch(int(sys.argv[1])), validation_period=pytorch.Batch(3), checkpoint_policy="none"
        )
    sys.exit(int(os.environ.get("MY_EXIT", "0")))
"""


@pytest.fixture
def program(model_dir: Path) -> dict[str, Any]:
    (model_dir / "my_program.py").write_text(PROGRAM)
    searcher = {"name": "single", "metric": "error"}
    data = {"place": "there"}
    return {**CONFIG, "name": "program", "entrypoint": "python3 my_program.py 5", "searcher": searcher, "data": data}


@pytest.mark.api("8.15", "8.3b")
def test_program_finds_its_trial_and_trains_as_long_as_its_fit_says(program: dict[str, Any], model_dir: Path) -> None:
    directory = run_local(load_config(program), model_dir, path=model_dir / "run")
    assert list(validations(directory)) == [3, 5]
    assert list_checkpoints(directory) == {5}


def test_last_is_the_trials_own_checkpoint(program: dict[str, Any], model_dir: Path) -> None:
    resuming = PROGRAM.replace('"none"', '"none", latest_checkpoint="last"')
    (model_dir / "my_program.py").write_text(resuming)
    longer = {**program, "entrypoint": "python3 my_program.py 8"}
    root = model_dir / "runs"
    for place, config in (("program-20260101-000000-aaaa", program), ("program-20260101-000001-bbbb", longer)):
        run_local(load_config(config), model_dir, path=root / place)
    assert list(validations(root / "program-20260101-000001-bbbb")) == [3, 6, 8], "not that of a run of the same name"
    run_local(load_config(longer), model_dir, path=root / "program-20260101-000000-aaaa")
    assert list(validations(root / "program-20260101-000000-aaaa")) == [3, 5, 6, 8]


@pytest.mark.api("8.3b")
def test_length_of_the_search_wins_over_that_of_fit(
    program: dict[str, Any], model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config({**program, "searcher": CONFIG["searcher"]})
    # At its rungs, beside the periods of its fit().
    assert list(validations(run_local(config, model_dir, path=model_dir / "run"))) == [2, 3, 4, 6, 8]
    assert "fit(max_length=Batch(5)) is not used: the searcher's max_length is Batch(8)" in caplog.text


@pytest.mark.slow
def test_exit_code_of_a_program_is_an_error_after_its_startup_hook_has_said_so(
    program: dict[str, Any], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_EXIT", "0")
    (model_dir / "startup-hook.sh").write_text("export MY_EXIT=4\n")
    with pytest.raises(ScriptFailed, match=r"python3 my_program\.py 5 exited with code 4"):
        run_local(load_config(program), model_dir, path=model_dir / "run")


def test_program_that_never_trains_is_an_error_as_on_ray(program: dict[str, Any], model_dir: Path) -> None:
    (model_dir / "nothing.py").write_text("from dray import pytorch\nwith pytorch.init() as context:\n    pass\n")
    config = load_config({**program, "entrypoint": "python3 nothing.py"})
    with pytest.raises(ScriptFailed, match=r"nothing\.py ended without calling Trainer\.fit\(\)"):
        run_local(config, model_dir, path=model_dir / "run")


def test_program_of_the_core_api_need_not_report_where_nothing_is_compared(
    program: dict[str, Any], model_dir: Path
) -> None:
    (model_dir / "evaluates.py").write_text("from dray import core\nwith core.init() as context:\n    pass\n")
    run_local(load_config({**program, "entrypoint": "python3 evaluates.py"}), model_dir, path=model_dir / "run")
    several = {"name": "random", "metric": "error", "max_trials": 2}
    config = load_config({**program, "entrypoint": "python3 evaluates.py", "searcher": several})
    with pytest.raises(ScriptFailed, match="nothing to compare"):
        run_local(config, model_dir, path=model_dir / "run")


REPORTS = """
from dray import core
with core.init() as context:
    for step in (1, 2, 3):
        context.train.report_training_metrics(step, {"loss": 1.0})
        context.train.report_validation_metrics(step, {"accuracy": 0.5})
        print("validated", step)
"""
RANDOM = {"name": "random", "metric": "error", "max_trials": 2}


def test_program_without_the_metric_fails_at_its_first_validation(
    program: dict[str, Any], model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_dir / "reports.py").write_text(REPORTS)
    for name, searcher in (("single", program["searcher"]), ("random", RANDOM)):
        config = load_config({**program, "entrypoint": "python3 reports.py", "searcher": searcher})
        with pytest.raises(SearcherMetricError, match=r"'error', but the program reported \['accuracy'\]"):
            run_local(config, model_dir, path=model_dir / name)
        assert "validated" not in capsys.readouterr().out
    (model_dir / "reports.py").write_text(REPORTS.replace("report_validation_metrics", "report_training_metrics"))
    with pytest.raises(SearcherMetricError, match=r"the program reported no validation metrics"):
        run_local(config, model_dir, path=model_dir / "at-its-end")


@pytest.mark.parametrize("more", [{"name": "single"}, {"name": "random", "max_trials": 2}])
def test_class_without_the_metric_fails_at_its_first_validation(more: dict[str, Any], model_dir: Path) -> None:
    searcher = {"metric": "accuracy", "max_length": {"batches": 4}, **more}
    config = load_config({**CONFIG, "searcher": searcher, "min_validation_period": {"batches": 1}})
    with pytest.raises(SearcherMetricError, match=r"'accuracy', but validation returned \['error'\]"):
        run_local(config, model_dir, path=model_dir / "run")
    [row] = map(json.loads, (model_dir / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["ended"] == "ERROR", "it was the first validation"


@pytest.mark.parametrize("stops", [True, False])
def test_class_with_nan_stops_if_the_config_says_so(
    stops: bool, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = TRIAL.replace('return {"loss": loss}', 'return {"loss": loss / (0.0 if batch_idx >= 2 else 1.0)}')
    (model_dir / "my_weight.py").write_text(code)
    config = load_config({**CONFIG, "stop_on_nan": stops, "min_validation_period": {"batches": 1}})
    directory = run_local(config, model_dir, path=model_dir / "run")
    assert list(validations(directory)) == ([1, 2, 3] if stops else list(range(1, 9)))
    assert ("after 3 batches the training metric loss is inf" in caplog.text) is stops


def test_program_with_nan_is_asked_to_stop_if_the_config_says_so(program: dict[str, Any], model_dir: Path) -> None:
    (model_dir / "reports.py").write_text(
        "from dray import core\n"
        "with core.init() as context:\n"
        "    for step in range(1, 9):\n"
        "        context.train.report_training_metrics(step, {'loss': float('nan') if step == 3 else 1.0})\n"
        "        if context.preempt.should_preempt():\n"
        "            break\n"
    )
    # It never validates: where trials are compared, that would be an error at its end.
    config = load_config({**program, "entrypoint": "python3 reports.py", "searcher": RANDOM, "stop_on_nan": True})
    directory = run_local(config, model_dir, path=model_dir / "run")
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 3 + 1  # how it ended


def test_class_that_exits_is_an_error_with_its_line(model_dir: Path) -> None:
    code = TRIAL.replace("loss = self.loss(batch)", "raise SystemExit(3)")
    (model_dir / "my_weight.py").write_text(code)
    with pytest.raises(ScriptFailed, match=r"OneWeight called sys\.exit\(3\) during training") as raised:
        run_local(load_config(CONFIG), model_dir, path=model_dir / "run")
    assert raised.traceback[-1].name == "train_batch"


def test_failing_startup_hook_ends_a_local_run_before_it_begins(program: dict[str, Any], model_dir: Path) -> None:
    (model_dir / "startup-hook.sh").write_text("echo no network\nexit 6\n")
    with pytest.raises(StartupHookFailed, match=r"exited with code 6; .*\n    \| no network"):
        run_local(load_config(program), model_dir, path=model_dir / "run")
    assert not (model_dir / "run").exists()


def test_program_that_a_launcher_started_elsewhere_makes_its_process_group(
    program: dict[str, Any], model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (model_dir / "launched.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('rank', dist.get_rank(), 'of', dist.get_world_size(), 'local', os.environ['LOCAL_RANK'])\n"
        "dist.destroy_process_group()\n"
        "from dray import core\n"
        "with core.init() as context:\n"
        "    pass\n"
    )
    command = "python3 -m determined.launch.torch_distributed -- python3 launched.py"
    run_local(load_config({**program, "entrypoint": command}), model_dir, path=model_dir / "run")
    assert "rank 0 of 1 local 0" in capfd.readouterr().out
    assert "RANK" not in os.environ


@pytest.mark.api("9.4")
def test_class_of_the_program_itself_is_loaded_from_its_checkpoint(program: dict[str, Any], model_dir: Path) -> None:
    (model_dir / "inner").mkdir()
    (model_dir / "inner" / "my_program.py").write_text(PROGRAM.replace("from my_weight import OneWeight", TRIAL))
    config = load_config({**program, "entrypoint": "python3 inner/my_program.py 5"})
    directory = run_local(config, model_dir, path=model_dir / "run")
    trial: Any = load_trial_from_checkpoint_path(directory / "checkpoint_5")
    assert type(trial).__module__ == "inner.my_program"
    assert (1 - trial.model.weight.item()) ** 2 == pytest.approx(validations(directory)[5], rel=1e-5)
