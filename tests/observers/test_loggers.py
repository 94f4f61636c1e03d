"""What loggers write, read back through the libraries' own clients, MLflow's from a database: a server takes 15 s."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.errors import ConfigError
from dray.observers import loggers
from dray.records.result import Result
from searchers.events import Exited
from tests.loggers import MLflow, WandB
from tests.observers.replayed import replay_to
from tests.records.test_result import Story, config, told

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow calls SQLAlchemy in deprecated ways


def with_loggers(value: Any) -> ExperimentConfig:
    return load_config({**config().to_dict(), "name": "digits", "loggers": value})


def write(story: Story) -> None:
    """What the driver's observers do when it has the experiment anew."""
    made = loggers.makes(story.directory, story.directory.config())
    assert made
    for make in made.values():
        replay_to(story.directory, make)


# ------------------------------------------------------------------ the config
@pytest.mark.parametrize(
    ("written", "means"),
    [
        (None, {}),
        ([], {}),
        ("mlflow", {"mlflow": {}}),
        (["mlflow", "wandb"], {"mlflow": {}, "wandb": {}}),
        ({"mlflow": None}, {"mlflow": {}}),
        (["wandb", {"mlflow": {"tracking_uri": "x"}}], {"mlflow": {"tracking_uri": "x"}, "wandb": {}}),
        ({"wandb": {"project": "p", "mode": "offline"}}, {"wandb": {"project": "p", "mode": "offline"}}),
    ],
)
def test_loggers_are_named_in_a_list_or_with_fields(written: Any, means: dict[str, Any]) -> None:
    found = with_loggers(written)
    assert found.to_dict()["loggers"] == means
    assert load_config(found.to_dict()) == found


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("mlfow", "loggers.mlfow: unknown field; did you mean mlflow?"),
        ({"mlflow": {"uri": "x"}}, "loggers.mlflow.uri: unknown field; known fields are experiment_name, tracking_"),
        ({"wandb": {"mode": "off"}}, "loggers.wandb.mode: must be one of online, offline, got 'off'"),
        ([3], r"loggers: must be a mapping, got \[3\] \(a list\); for example loggers: \[mlflow, wandb\]"),
    ],
)
def test_an_invalid_logger_is_an_error_at_its_field(written: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        with_loggers(written)


def test_a_missing_library_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = loggers.importlib.util.find_spec
    monkeypatch.setattr(
        loggers.importlib.util, "find_spec", lambda name: None if name in ("mlflow", "wandb") else found(name)
    )
    settings = {**with_loggers(["mlflow", "wandb"]).to_dict(), "entrypoint": "recorded:Recorded"}
    trials = Path(__file__).parents[1] / "ray" / "trials"
    with pytest.raises(ConfigError) as raised:
        dray.Experiment(settings, model_dir=trials, path=tmp_path / "experiment")
    assert str(raised.value).splitlines()[1:] == [
        "  loggers.mlflow: the package mlflow is not installed: pip install 'dray-train[loggers]', or remove it",
        "  loggers.wandb: the package wandb is not installed: pip install 'dray-train[loggers]', or remove it",
    ]
    assert not (tmp_path / "experiment").exists()


# ------------------------------------------------------------------ MLflow
class Killed(BaseException):
    """The driver has ended here."""


@pytest.mark.slow
def test_mlflow_is_tried_before_anything_starts(store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    trials = Path(__file__).parents[1] / "ray" / "trials"

    def prepare(uri: str) -> None:
        settings = {**with_loggers({"mlflow": {"tracking_uri": uri}}).to_dict(), "entrypoint": "recorded:Recorded"}
        dray.Experiment(settings, model_dir=trials, path=tmp_path / "experiment").prepare()

    uri = str(tmp_path / "mlruns")  # of a kind that MLflow no longer writes
    with pytest.raises(ConfigError, match=rf"loggers.mlflow.tracking_uri: {uri} can't be used: .*give a database"):
        prepare(uri)
    assert not (tmp_path / "experiment").exists()
    prepare(store)
    assert (tmp_path / "experiment").exists()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("mlflow")
    home = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)  # MLflow keeps artifacts there
        yield f"sqlite:///{home}/runs.db"


@pytest.mark.slow
def test_mlflow_has_a_run_for_each_trial_with_all_its_metrics(store: str, tmp_path: Path) -> None:
    story = told(tmp_path, with_loggers({"mlflow": {"tracking_uri": store}}))
    write(story)
    read = MLflow(store, "digits")
    assert read.states() == {
        0: ("FINISHED", "COMPLETED"),
        1: ("FAILED", "ERRORED"),
        2: ("FAILED", "INVALID_HP"),
        3: ("RUNNING", "RUNNING"),
    }
    for trial, run in read.trials.items():
        drawn: Any = story.search.params(trial)
        assert run.data.params == {
            "lr": str(drawn["lr"]),
            "net.depth": str(drawn["net"]["depth"]),
            "net.norm": "None",
            "layers": "[1, 2]",
        }
        assert run.info.run_name == f"trial_{trial}"
    for (trial, kind, name), rows in story.result.metrics.groupby(["trial_id", "kind", "name"]):
        assert read.history(trial, f"{kind}/{name}") == list(zip(rows["batches"], rows["value"], strict=True))
    assert read.history(0, "best/error") == [(10, 0.25)]
    # The clock of `told`: the start, then Started(0) at 1002, and the end at 1007.
    assert (read.trials[0].info.start_time, read.trials[0].info.end_time) == (1002_000, 1007_000)
    assert read.parent.info.status == "KILLED"  # the driver has left before the search's end
    assert read.parent.data.params["searcher.max_trials"] == "4"


@pytest.mark.slow
def test_mlflow_gets_what_is_missing_and_nothing_twice(store: str, tmp_path: Path) -> None:
    story = told(tmp_path, with_loggers([{"mlflow": {"tracking_uri": store, "experiment_name": "twice"}}]))
    write(story)
    write(story)
    before = MLflow(store, "twice")
    assert before.history(3, "validation/error") == [(10, 0.375)]
    story.clock += 1
    story.validate(3, 20, 0.125, decides=True)
    story.happen(Exited(trial=3, reason="completed"))
    write(story)
    read = MLflow(store, "twice")
    assert {trial: run.info.run_id for trial, run in read.trials.items()} == {
        trial: run.info.run_id for trial, run in before.trials.items()
    }
    assert read.history(3, "validation/error") == [(10, 0.375), (20, 0.125)]
    assert read.history(3, "best/error") == [(20, 0.125)]
    assert read.history(0, "validation/error") == [(10, 0.25), (20, 0.5)]
    assert read.states()[3] == ("FINISHED", "COMPLETED")


@pytest.mark.slow
def test_mlflow_has_everything_once_wherever_drivers_were_killed(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    story = told(tmp_path, with_loggers([{"mlflow": {"tracking_uri": store, "experiment_name": "killed"}}]))
    story.happen(Exited(trial=3, reason="completed"))
    left = 0

    def dying(send: Any) -> Any:
        def request(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return send(*arguments, **more)

        return request

    for name in ("create_run", "log_batch", "set_tag", "set_terminated", "update_run"):
        monkeypatch.setattr(MlflowClient, name, dying(getattr(MlflowClient, name)))
    for requests in (1, 2, 3, 4, 5, 5, 5):
        left = requests
        with pytest.raises(Killed):
            write(story)
    monkeypatch.undo()
    write(story)
    read = MLflow(store, "killed")
    assert {trial: run.data.params.keys() for trial, run in read.trials.items()} == {
        trial: {"lr", "net.depth", "net.norm", "layers"} for trial in range(4)
    }
    assert read.parent.data.params["searcher.max_trials"] == "4"
    assert read.states()[3] == ("FINISHED", "COMPLETED")
    assert read.history(0, "validation/error") == [(10, 0.25), (20, 0.5)]


@pytest.mark.slow
def test_mlflow_has_the_config_and_the_best_trial_at_the_end(store: str, tmp_path: Path) -> None:
    story = told(tmp_path, with_loggers({"mlflow": {"tracking_uri": store, "experiment_name": "over"}}))
    while story.search.done is None:
        last = next(view.id for view in story.search.trials.values() if not view.ended)
        story.happen(Exited(trial=last, reason="completed"))
    write(story)
    read = MLflow(store, "over")
    assert read.parent.info.status == "FINISHED"
    run = read.parent.info.run_id
    assert sorted(found.path for found in read.client.list_artifacts(run)) == ["best_trial.json", "experiment.yaml"]
    best = json.loads(Path(read.client.download_artifacts(run, "best_trial.json", str(tmp_path))).read_text())
    expected = Result(story.directory.path).best_trial
    assert best == {
        "trial_id": 0,
        "hparams": dict(expected.hparams),
        "metric": 0.25,
        "best_by": "one seed",
        "batches": 20,
        "best_batches": 10,
        "checkpoint": str(story.directory.trial(0) / "checkpoint_10"),
    }
    fetched = Path(read.client.download_artifacts(run, "experiment.yaml", str(tmp_path)))
    assert load_config(fetched) == story.directory.config()
    assert read.parent.data.metrics == {"best/error": 0.25}


# ------------------------------------------------------------------ Weights & Biases
@pytest.fixture
def wandb_story(tmp_path: Path) -> Story:
    pytest.importorskip("wandb")
    return told(tmp_path, with_loggers({"wandb": {"mode": "offline", "project": "mine"}}))


@pytest.mark.slow
def test_wandb_has_a_run_for_each_trial_with_all_its_metrics(wandb_story: Story) -> None:
    write(wandb_story)
    found = WandB(wandb_story.directory.path)
    assert found.states == {"trial_0": "COMPLETED", "trial_1": "ERRORED", "trial_2": "INVALID_HP", "trial_3": "RUNNING"}
    assert found.exits == {"trial_0": [0], "trial_1": [1], "trial_2": [1], "trial_3": [1]}
    assert found.history == {
        "trial_0": [
            {"batches": 10, "training/loss": 0.5, "validation/error": 0.25, "validation/accuracy": 0.75},
            {"batches": 20, "training/loss": 1.0, "validation/error": 0.5, "validation/accuracy": 0.5},
        ],
        "trial_2": [{"batches": 10, "training/loss": 0.0, "validation/error": 0.0, "validation/accuracy": 1.0}],
        "trial_3": [{"batches": 10, "training/loss": 0.75, "validation/error": 0.375, "validation/accuracy": 0.625}],
    }
    for trial in range(4):
        run = found.runs[f"trial_{trial}"]
        assert (run.project, run.run_group) == ("mine", "experiment")
        drawn = {item.key: json.loads(item.value_json) for item in run.config.update if item.key != "_wandb"}
        assert drawn == wandb_story.search.params(trial)


@pytest.mark.slow
def test_wandb_gets_what_is_new_and_nothing_twice(wandb_story: Story) -> None:
    write(wandb_story)
    first = WandB(wandb_story.directory.path)
    write(wandb_story)
    assert WandB(wandb_story.directory.path).history == first.history
    row = {"batches": 20, "epochs": 0.0, "kind": "validation", "name": "error", "value": 0.125, "time": 1.0}
    wandb_story.metrics.append(3, [row])
    wandb_story.happen(Exited(trial=3, reason="completed"))
    write(wandb_story)
    found = WandB(wandb_story.directory.path)
    assert found.history == {
        **first.history,
        "trial_3": [*first.history["trial_3"], {"batches": 20, "validation/error": 0.125}],
    }
    assert found.states["trial_3"] == "COMPLETED"
    assert [len(exits) for _, exits in sorted(found.exits.items())] == [1, 1, 1, 2]
    assert first.runs["trial_3"].run_id == found.runs["trial_3"].run_id


@pytest.mark.slow
def test_wandb_online_without_a_key_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    story = told(tmp_path, with_loggers("wandb"))
    with pytest.raises(RuntimeError, match="no API key: set WANDB_API_KEY"):
        write(story)
