"""Trials with code of their own, as the commands show them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray.cli.trial import DIFF_LINES
from dray.experiment import variants
from dray.experiment.request_files import RequestFiles
from searchers.events import Requested, Started
from tests.cli.said import Said
from tests.records.test_result import Story, config, told
from tests.report.simulated import simulated

TRAIN = "lr = 0.1\n"
PATCH = "--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-lr = 0.1\n+lr = 0.2\n"


@pytest.fixture
def story(home: Path) -> Story:
    story = told(home, config())
    story.directory.code.mkdir()
    (story.directory.code / "train.py").write_text(TRAIN)
    file = story.directory.config_file
    file.write_text(f"entrypoint: python3 train.py\n{file.read_text()}")
    return story


def test_a_variant_is_listed_and_described_with_its_difference(story: Story, dray: Callable[..., Said]) -> None:
    assert "code" not in dray("t", "list", "experiment").out
    code = variants.from_patch(story.directory, PATCH)
    story.search.request(Requested(code=code, hparams={"lr": 0.15}))
    story.happen(Started(trial=5))
    listed = dray("t", "list", "experiment", "--json").value
    assert [row["code"] for row in listed] == [None] * 5 + [code]
    assert code in dray("t", "list", "experiment").out
    described = dray("t", "describe", "experiment", "5")
    assert described.out.endswith("--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-lr = 0.1\n+lr = 0.2\n")
    assert dray("t", "describe", "experiment", "5", "--json").value["diff"] == story.directory.diff_of(code)
    assert dray("t", "describe", "experiment", "3", "--json").value["diff"] is None
    assert story.result.trials["code"].tolist() == [""] * 5 + [code]


def test_a_difference_can_not_hide_what_it_changes(story: Story, dray: Callable[..., Said]) -> None:
    code = variants.from_patch(story.directory, PATCH.replace("+lr = 0.2", "+lr = 0.2  # \x1b[8m\x0c-\u202e"))
    story.search.request(Requested(code=code))
    assert dray("t", "describe", "experiment", "5").out.splitlines()[-1] == r"+lr = 0.2  # \x1b[8m\x0c-\u202e"


def test_a_long_difference_is_cut(story: Story, dray: Callable[..., Said]) -> None:
    lines = "".join(f"+line = {number}\n" for number in range(DIFF_LINES))
    code = variants.from_patch(story.directory, f"--- a/train.py\n+++ b/train.py\n@@ -0,0 +1,{DIFF_LINES} @@\n{lines}")
    story.search.request(Requested(code=code))
    *_, last = dray("t", "describe", "experiment", "5").out.splitlines()
    assert last == f"... and 5 more lines, in {story.directory.variants / code}"


def test_without_a_driver_a_request_waits_with_its_code(
    story: Story, dray: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.journal.close()
    monkeypatch.setattr("dray.serve.verbs.in_directory.InDirectory._run", lambda it: "STOPPED")
    (tmp_path / "change.diff").write_text(PATCH)
    assert dray("t", "add", "experiment", "--patch", tmp_path / "change.diff").code == 0
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(PATCH.encode())))
    assert dray("t", "add", "experiment", "--patch", "-").code == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text(TRAIN.replace("0.1", "0.2"))
    assert dray("t", "add", "experiment", "--code", other, "--set", "lr=0.125").code == 0
    waiting = RequestFiles(story.directory).waiting()
    assert [each.code for each in waiting] == [variants.from_patch(story.directory, PATCH)] * 3
    assert waiting[2].hparams == {"lr": 0.125}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--patch", "none.diff"], "--patch: can't read the patch none.diff: No such file or directory"),
        (["--patch", "none.diff", "--code", "."], "give --patch or --code, not both"),
        (["--patch", "latin.diff"], "--patch: the patch is not UTF-8 text"),
        (["--patch", "bad.diff"], "hunk 1 of train.py (line 3 of the patch): it expects 'lr = 0.5' at line 1"),
        (["--code", "nowhere"], "no such directory: nowhere"),
    ],
)
def test_bad_code_is_one_error(given: list[str], says: str, story: Story, dray: Callable[..., Said]) -> None:
    Path("latin.diff").write_bytes(PATCH.encode() + b"\xe9")
    Path("bad.diff").write_text(PATCH.replace("-lr = 0.1", "-lr = 0.5"))
    said = dray("t", "add", "experiment", *given)
    assert said.code == 2
    assert says in said.err.replace("\n", " "), said.err
    assert not RequestFiles(story.directory).waiting()


def test_a_request_for_a_variant_that_is_not_there_is_refused(home: Path) -> None:
    directory = simulated(home / "other", 4)
    with pytest.raises(ValueError, match=r"the experiment has no variant '\.\./x' of its code"):
        RequestFiles(directory).check(Requested(code="../x"))
