"""The pages on how to train: their trials and programs train here, and do what the page says.

large-models.md, early-stopping.md, hugging-face.md, images.md, streaming.md, torchmetrics.md, tracking.md, warm.md;
tests/ray/test_pages.py runs the searches of one; tests/docs/test_batch_size_page.py runs the program of batch-size.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

import dray
from dray.config.load import load_config
from dray.experiment.local import run_local
from tests.docs.pages import DOCS, PAGES, blocks, files
from tests.forks.process import run_script
from tests.loggers import WandB
from tests.model_code import imports_undone
from tests.observers.replayed import replay_to
from tests.report.simulated import simulated


@pytest.fixture(autouse=True)
def _results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    with imports_undone():
        yield


def project(page: str, directory: Path) -> Path:
    """A directory with the page's files."""
    directory.mkdir()
    for name, text in {"model_def.py": files("quick-start.md")["model_def.py"], **files(page)}.items():
        (directory / name).write_text(text)
    return directory


def validations(page: str, tmp_path: Path, experiment: str = "const.yaml", **changes: Any) -> list[dict[str, float]]:
    """Those of a trial of the page's experiment, in this process."""
    code = project(page, tmp_path / "code")
    raw = yaml.safe_load((code / experiment).read_text())
    hparams = {**raw["hyperparameters"], **changes.pop("hyperparameters", {})}
    run = run_local(load_config({**raw, **changes, "hyperparameters": hparams}), code)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{**row["validation"], "batches": row["batches"]} for row in rows if "validation" in row]


def module(page: str, name: str) -> Any:
    made = ModuleType(name.removesuffix(".py"))
    exec(files(page)[name], vars(made))
    return made


# ---------------------------------------------------------------------------------------- early-stopping.md
@pytest.mark.slow
def test_early_stopping_trial_ends_early(tmp_path: Path) -> None:
    losses = [each["validation_loss"] for each in validations("early-stopping.md", tmp_path)]
    assert 3 < len(losses) < 200
    assert min(losses[:-3]) < min(losses[-3:])


# ---------------------------------------------------------------------------------------- hugging-face.md
@pytest.mark.slow
@pytest.mark.long
def test_hugging_face_model_learns_in_a_trial(tmp_path: Path) -> None:
    found = validations("hugging-face.md", tmp_path, "trial.yaml", hyperparameters={"lr": 3e-3})
    assert found[-1]["batches"] == 160
    assert found[-1]["accuracy"] > 0.85


@pytest.mark.slow
@pytest.mark.long
def test_hugging_face_trainer_learns_standalone(tmp_path: Path) -> None:
    code = project("hugging-face.md", tmp_path / "code")
    run_script(code / "train.py", directory=code)
    [run] = (tmp_path / "results" / "local").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["validation"]["eval_loss"] for row in rows if "validation" in row]
    assert len(losses) == 5
    assert losses[-1] < 0.4 < losses[0] + 0.1  # at chance it is 0.69
    assert (run / "checkpoint_160").is_dir()


# ---------------------------------------------------------------------------------------- streaming.md
@pytest.mark.slow
@pytest.mark.parametrize(
    "entrypoint", [pytest.param("hugging_face:StreamTrial", marks=pytest.mark.long), "records:RecordsTrial"]
)
def test_streamed_digits_are_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entrypoint: str) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    found = validations("streaming.md", tmp_path, entrypoint=entrypoint)
    assert [each["batches"] for each in found] == [23, 46, 69, 92]
    assert found[-1]["validation_loss"] < 1.0  # at chance it is 2.3


@pytest.mark.slow
def test_tokens_are_learnt_from_a_loader_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    searcher = {"name": "single", "metric": "validation_loss", "max_length": {"epochs": 8}}
    found = validations("streaming.md", tmp_path, entrypoint="tokens:TokensTrial", searcher=searcher)
    assert found[-1]["batches"] == 8 * 31
    # Either of two tokens follows each: ln 2 = 0.69 at best.
    assert found[-1]["validation_loss"] < 0.8 < found[0]["validation_loss"]


# ---------------------------------------------------------------------------------------- images.md
@pytest.mark.long
@pytest.mark.slow
def test_image_classifier_learns(tmp_path: Path) -> None:
    found = validations("images.md", tmp_path)
    assert found[-1]["batches"] == 6 * 22
    assert found[-1]["accuracy"] > 0.85


def test_augmentation_moves_each_image_by_itself_within_its_bounds() -> None:
    images = module("images.md", "images.py")
    dot = torch.zeros(64, 1, 33, 33)
    dot[:, :, 16, 16] = 1  # in the middle: turning and scaling leave it there
    torch.manual_seed(0)
    moved = images.augment(dot, shift=0.25)
    assert moved.shape == dot.shape
    places = torch.stack([(each[0] == each.max()).nonzero()[0] for each in moved])
    assert len(places.unique(dim=0)) > 30
    assert 2 < (places - 16).abs().max() <= 0.25 * 1.2 * 16.5 + 1
    same = images.augment(dot, shift=0, turn=0)
    assert all((each[0] == each.max()).nonzero()[0].tolist() == [16, 16] for each in same)


def test_busy_gpu_code_reads_the_machines_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = simulated(tmp_path / "experiment", 8).path
    exec(files("images.md")["busy.py"].replace('"latest"', repr(str(path))), {})
    assert "training_s" in capsys.readouterr().out
    named = re.findall(r"`(\w+_s|\w+_second|gpu_\w+)`", PAGES["images.md"])
    assert len(named) == 4
    assert [name for name in named if f"| `{name}` |" not in PAGES["machine.md"]] == []


# ---------------------------------------------------------------------------------------- torchmetrics.md
@pytest.mark.slow
def test_torchmetrics_are_computed_over_all_data(tmp_path: Path) -> None:
    found = validations("torchmetrics.md", tmp_path)
    assert len(found) == 4
    last = found[-1]
    assert {"validation_loss", "val_accuracy", "val_f1", "val_auroc"} <= set(last)
    assert last["val_accuracy"] * 360 == pytest.approx(round(last["val_accuracy"] * 360)), "a count of 360 records"
    assert last["val_f1"] > 0.8


# ---------------------------------------------------------------------------------------- tracking.md
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_mlflow_runs_are_the_searchs_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without a server MLflow keeps artifacts there
    from dray.observers.mlflow_runs import MLflowRuns  # brings mlflow

    directory = simulated(tmp_path / "experiment", 8)
    uri = f"sqlite:///{tmp_path}/runs.db"
    loggers = {"loggers": {"mlflow": {"tracking_uri": uri, "experiment_name": "digits"}}}
    config = load_config({**directory.config().to_dict(), **loggers})
    replay_to(directory, lambda: MLflowRuns(directory, config))
    [code] = [block.text for block in blocks("python", page="tracking.md") if "search_runs" in block.text]
    names: dict[str, Any] = {"tracking_uri": uri}
    exec(code, names)
    assert len(names["runs"]) == 8
    best = names["best"]["metrics.best/validation_loss"]
    assert best.is_monotonic_increasing
    assert best.iloc[0] == dray.Result(directory.path).trials["best_metric"].min()
    assert "params.lr" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_wandb_callback_logs_reports(tmp_path: Path) -> None:
    code = project("tracking.md", tmp_path / "code")
    run_script(code / "train.py", directory=code)
    [history] = WandB(code).history.values()
    assert sum("validation/validation_loss" in row for row in history) == 3
    assert sum("training/loss" in row for row in history) >= 6


# ---------------------------------------------------------------------------------------- large-models.md
@pytest.mark.slow
def test_large_model_learns(tmp_path: Path) -> None:
    first, *_, last = validations("large-models.md", tmp_path)
    assert last["validation_loss"] < first["validation_loss"] < 1.0


def test_tests_of_sharded_models_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS.parent / "bench/results/sharded_tests.md").read_text()))
    tests = "".join(
        (DOCS.parent / f"tests/{name}.py").read_text()
        for name in (
            *(f"pytorch/test_{each}" for each in ("fsdp", "sharded_ranks", "elastic_ranks", "mesh_ranks")),
            *(f"ray/test_{each}" for each in ("sharded", "fault_matrix")),
        )
    )
    assert len(named) > 10
    assert named <= set(re.findall(r"^def (test_\w+)", tests, re.MULTILINE))


# ---------------------------------------------------------------------------------------- warm.md
def test_data_sets_are_made_once_and_equal_in_every_process() -> None:
    one, other = module("warm.md", "data.py"), module("warm.md", "data.py")
    assert one.datasets(held_out=360) is one.datasets(360)
    assert one.datasets(360)[0].indices == other.datasets(360)[0].indices
    assert [len(part) for part in one.datasets(held_out=100)] == [1697, 100]


@pytest.mark.slow
@pytest.mark.long
def test_compiled_trial_learns(tmp_path: Path) -> None:
    single = {"name": "single", "metric": "validation_loss", "max_length": {"epochs": 2}}
    found = validations("warm.md", tmp_path, "random.yaml", searcher=single, hyperparameters={"lr": 0.01})
    assert found[-1]["validation_loss"] < 1.0  # at chance it is 2.3
