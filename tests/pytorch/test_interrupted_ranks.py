"""Ctrl-C on one of two ranks: both stop at the same batch and raise it; and only the chief says anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pytorch import interrupted_ranks
from tests.pytorch.processes import results_of_two

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Path:
    return tmp_path_factory.mktemp("interrupted")


@pytest.fixture(scope="module")
def ranks(backend: str, directory: Path) -> list[dict[str, Any]]:
    return results_of_two(interrupted_ranks.__file__, directory, backend)


def test_both_stop_at_the_same_batch_save_and_raise(ranks: list[dict[str, Any]], directory: Path) -> None:
    assert [rank["raised"] for rank in ranks] == [True, True]
    begun = {rank["begun"] for rank in ranks}
    assert len(begun) == 1
    [run] = (directory / "results" / "local").iterdir()
    assert (run / f"checkpoint_{begun.pop()}" / "manifest.json").exists()


def test_only_the_chief_says_anything(ranks: list[dict[str, Any]], directory: Path) -> None:
    told = (directory / "said_by_0").read_text()
    assert told.count("this run uses 'all'") == 1
    assert "training 1,000,000 batches" in told
    assert f"stopped after {ranks[0]['begun']:,} of 1,000,000 batches" in told
    assert (directory / "said_by_1").read_text() == ""
    assert [rank["level"] for rank in ranks] == [0, 0]
