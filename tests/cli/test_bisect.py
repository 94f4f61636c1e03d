"""``dray bisect``: what it refuses before anything runs; tests/ray/test_server.py has a whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.said import Said
from tests.docs.pages import JSON
from tests.repository import Repository

Dray = Callable[..., Said]


@pytest.fixture
def repository(home: Path, tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository", **{"model/const.yaml": "searcher: {max_length: 2}\n"})


@pytest.mark.parametrize(
    ("good", "config", "says"),
    [
        ("v1", "model/const.yaml", "no commit 'v1'"),
        ("HEAD", "model/other.yaml", "has no file model/other.yaml"),
        ("HEAD", "nowhere/const.yaml", "no such directory: "),
        ("HEAD", "../const.yaml", "is not in a git repository"),
    ],
)
def test_what_does_not_exist_is_one_line(repository: Repository, dray: Dray, good: str, config: str, says: str) -> None:
    said = dray("bisect", good, "HEAD", "--config", repository.path / config, "--", "loss")
    assert says in said.is_one_line()


def test_the_only_config_of_the_directory_is_the_default(
    repository: Repository, dray: Dray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository.path / "model")
    assert "no commit 'v1'" in dray("bisect", "v1", "HEAD", "--", "loss").is_one_line()
    Path("other.yaml").write_text("searcher: {}\n")
    said = dray("bisect", "v1", "HEAD", "--", "loss").is_one_line()
    assert "--config; there are several here: const.yaml, other.yaml" in said
    monkeypatch.chdir(repository.path)
    assert "--config; there is none here" in dray("bisect", "v1", "HEAD", "--", "loss").is_one_line()


def test_verdicts_of_json_are_on_the_page() -> None:
    assert {"verdict", "commits", "stat", "runs", "hash", "subject", "seed", "value"} <= JSON["bisect"]
