"""The versions of a model directory in a git repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.bisect.history import History, NoHistory
from tests.repository import Repository

MODEL = '''"""A model."""

LR = 0.1


def step(x):
    # A comment.
    return x - LR  * x
'''
CONFIG = "name: first\nsearcher: {name: single, metric: loss, max_length: 10}\nhyperparameters: {lr: 1.0e-3}\n"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    files = {"model/model_def.py": MODEL, "model/const.yaml": CONFIG, "README.md": "# A model\n"}
    return Repository(tmp_path / "repository", **files)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model/model_def.py", MODEL.replace("# A comment.", "# Another.")),
        ("model/model_def.py", MODEL.replace("A model.", "The model.")),
        ("model/model_def.py", MODEL.replace("LR  * x", "(LR * x)")),
        ("model/model_def.py", MODEL.replace("def step(x):", 'def step(x):\n    """One step."""')),
        ("model/const.yaml", f"# The config.\n{CONFIG}"),
        ("model/const.yaml", CONFIG.replace("name: first", "name: second\ndescription: text")),
        ("model/const.yaml", CONFIG.replace("1.0e-3", "0.001")),
        ("model/README.md", "text"),
        ("elsewhere/other.py", "LR = 0.2\n"),
    ],
)
def test_what_no_training_depends_on_makes_no_version(repository: Repository, name: str, content: str) -> None:
    repository.commit(**{name: content})
    one, other = (history := repository.history("HEAD~1")).commits
    assert history.version(one) == history.version(other)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model/model_def.py", MODEL.replace("0.1", "0.2")),
        ("model/model_def.py", MODEL.replace("x - LR", "x + LR")),
        ("model/model_def.py", "def step(x:\n"),  # not Python
        ("model/const.yaml", CONFIG.replace("1.0e-3", "1.0e-4")),
        ("model/const.yaml", None),
        ("model/other.yaml", CONFIG),
        ("model/words.txt", "text"),
    ],
)
def test_what_training_may_depend_on_makes_one(repository: Repository, name: str, content: str | None) -> None:
    repository.commit(**{name: content})
    one, other = (history := repository.history("HEAD~1")).commits
    assert history.version(one) != history.version(other)


def test_commits_are_those_of_first_parents_the_good_one_first(repository: Repository) -> None:
    first = repository.git("rev-parse", "HEAD")
    repository.git("checkout", "-q", "-b", "side")
    side = repository.commit("on the side")
    repository.git("checkout", "-q", "main")
    second = repository.commit("a change: with | signs")
    repository.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    history = repository.history(first)
    assert [each.subject for each in history.commits] == ["first", "a change: with | signs", "merge"]
    assert [each.hash for each in history.commits[:2]] == [first, second]
    assert history.commits[0].author == "A"
    with pytest.raises(NoHistory, match="does not descend from side by first parents"):
        assert repository.history("side").commits
    with pytest.raises(NoHistory, match=f"{first} does not descend from main"):
        assert repository.history("main", first).commits
    assert [each.hash for each in repository.history(side, side).commits] == [side]


def test_export_has_the_commits_own_files(repository: Repository, tmp_path: Path) -> None:
    repository.commit(**{"model/model_def.py": "new = True\n"})
    (repository.path / "model" / "model_def.py").write_text("not committed\n")
    history = repository.history("HEAD~1")
    for commit, text in zip(history.commits, (MODEL, "new = True\n"), strict=True):
        history.export(commit, tmp_path / commit.short)
        assert (tmp_path / commit.short / "model_def.py").read_text() == text
    assert history.config_text(history.commits[0]) == CONFIG
    assert history.stat(history.commits[1], history.commits[1])[0].split() == [
        "model/model_def.py",
        "|",
        "9",
        "+--------",
    ]


def test_errors_name_what_does_not_exist(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(NoHistory, match=r"^no commit 'v1\.0'$"):
        assert repository.history("v1.0").commits
    with pytest.raises(NoHistory, match="is not in a git repository"):
        History(tmp_path / "const.yaml", "a", "b")
    with pytest.raises(NoHistory, match="no such directory"):
        History(tmp_path / "nowhere" / "const.yaml", "a", "b")
    with pytest.raises(NoHistory, match=r"has no file model/other\.yaml"):
        history = History(repository.path / "model" / "other.yaml", "HEAD", "HEAD")
        history.config_text(history.commits[0])
