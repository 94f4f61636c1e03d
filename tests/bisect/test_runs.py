"""The search through a history: what is run of each commit, and which commit is named."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from dray.bisect.history import Commit, History
from dray.bisect.runs import Found, Goal, config_of, find
from dray.bisect.search import NoRegression, Regression, Run
from dray.cli.bisect import told
from dray.cli.errors import BadUse
from dray.errors import ConfigError
from tests.repository import Repository

CONFIG = "searcher: {{name: single, metric: {metric}, smaller_is_better: {smaller}, max_length: {{epochs: 2}}}}\n"


def model(value: float, comment: str = "") -> dict[str, str]:
    return {"model/model_def.py": f"VALUE = {value}  # {comment}\n"}


def searched(history: History, goal: Goal) -> tuple[Found, list[str]]:
    """The result, where a commit's metric is the number in its code, and the subjects of the commits that have run."""
    ran: list[str] = []

    def train(runs: Mapping[Run, Commit]) -> Mapping[Run, float | None]:
        ran.extend(commit.subject for commit in runs.values())
        return {run: value(commit) for run, commit in runs.items()}

    def value(commit: Commit) -> float | None:
        with tempfile.TemporaryDirectory() as place:
            history.export(commit, Path(place))
            code = Path(place, "model_def.py").read_text()
        return None if "broken" in code else float(code.split()[2])

    return find(history, goal, train, lambda line: None), ran


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    config = CONFIG.format(metric="accuracy", smaller="false")
    return Repository(tmp_path / "repository", **{"model/const.yaml": config}, **model(0.9))


def test_first_commit_with_other_code_is_named_despite_comments(repository: Repository) -> None:
    repository.commit("a comment", **model(0.9, "a"))
    repository.commit("worse", **model(0.5))
    repository.commit("another comment", **model(0.5, "b"))
    repository.commit("a little better", **model(0.51))
    found, ran = searched(repository.history("HEAD~4"), Goal(metric="accuracy"))
    assert isinstance(found.verdict, Regression)
    assert found.versions[found.verdict.bad][0].subject == "worse"
    assert found.values_of(found.verdict.good) == [0.9]
    assert ran == ["first", "a little better", "worse"]


def test_larger_is_better_if_the_config_says_so_of_this_metric(repository: Repository) -> None:
    repository.commit("lower", **model(0.5))
    history = repository.history("HEAD~1")
    assert isinstance(searched(history, Goal(metric="accuracy"))[0].verdict, Regression)
    assert isinstance(searched(history, Goal(metric="error"))[0].verdict, NoRegression)
    assert isinstance(searched(history, Goal(metric="error", larger_is_better=True))[0].verdict, Regression)


def test_divergence_is_a_regression(repository: Repository) -> None:
    repository.commit("diverges", **model(math.nan))
    found, _ = searched(repository.history("HEAD~1"), Goal(metric="accuracy"))
    assert isinstance(found.verdict, Regression)
    assert found.verdict.difference == math.inf


def test_commits_that_do_not_run_are_in_the_range(repository: Repository) -> None:
    repository.commit("breaks", **{"model/model_def.py": "broken = 0.9\n"})
    repository.commit("worse", **model(0.5))
    found, _ = searched(repository.history("HEAD~2"), Goal(metric="accuracy"))
    assert isinstance(found.verdict, Regression)
    assert [versions[0].subject for versions in found.versions] == ["first", "breaks", "worse"]
    assert (found.verdict.good, found.verdict.bad) == (0, 2)


def test_verdict_has_the_commit_and_the_metric_on_both_sides(repository: Repository) -> None:
    repository.commit("a comment", **model(0.9, "a"))
    worse = repository.commit("worse", **model(0.5))
    goal, history = Goal(metric="accuracy"), repository.history("HEAD~2")
    first, commit, values, *stat, runs = told(history, searched(history, goal)[0], goal)
    assert first == "accuracy is worse since this commit:"
    assert commit.split("  ") == [worse[:12], history.commits[-1].date[:10], "A", "worse"]
    assert values == "accuracy: 0.9 before, 0.5 after"
    assert stat[0].split() == ["model/model_def.py", "|", "2", "+-"]
    assert runs == "2 runs, of 3 commits"
    goal = Goal(metric="error", least=0.02)
    assert told(history, searched(history, goal)[0], goal) == [
        "no certain regression of 2% or more between HEAD~2 and HEAD: error is 0.9 at HEAD~2 and 0.5 at HEAD",
        "2 runs, of 3 commits",
    ]
    repository.commit("breaks", **{"model/model_def.py": "broken = 0.9\n"})
    history = repository.history("HEAD~1")
    with pytest.raises(BadUse, match=rf"^HEAD \({history.commits[1].short}\) does not run; give a commit that does$"):
        told(history, searched(history, goal)[0], goal)


def test_a_commits_config_is_run_as_one_trial_with_the_seed_of_all() -> None:
    text = """
name: mine
hyperparameters: {lr: 1e-3}
searcher: {name: asha, metric: loss, max_trials: 8, max_length: {epochs: 16}}
reproducibility: {experiment_seed: 99, deterministic: true}
min_checkpoint_period: {batches: 10}
budget: {time: 1h}
"""
    goal = Goal(metric="error", first_seed=5)
    assert config_of(text, goal, 2, "bisect-1") == {
        "name": "bisect-1",
        "hyperparameters": {"lr": 1e-3},
        "searcher": {"name": "single", "metric": "error", "max_length": {"epochs": 16}},
        "reproducibility": {"experiment_seed": 7, "deterministic": True},
        "max_restarts": 0,
        "checkpoint_policy": "none",
    }
    assert config_of(text, Goal(metric="error", batches=20), 0, "x")["searcher"]["max_length"] == 20
    with pytest.raises(
        ConfigError, match=r"searcher\.max_length: missing; give the length of the runs, as --length 100"
    ):
        config_of("searcher: {name: single}", goal, 0, "x")
    with pytest.raises(ConfigError, match="not valid YAML"):
        config_of("a: [", goal, 0, "x")
