"""Runs of two processes that are cut and resumed, also by another number of processes. All share one pair."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.core import DistributedContext
from dray.training import rng
from tests.pytorch import resuming
from tests.pytorch.fakes import FakeHost
from tests.pytorch.processes import gloo_first, results_of, serve  # noqa: F401 - a fixture
from tests.pytorch.resuming import assert_goes_on

pytestmark = pytest.mark.slow

MOVING = ("shuffled", "aggregation 2", "own sampler", "torch's sampler")
KINDS = (*MOVING, "everything, aggregation 3", "iterable, own skip", "stateful loader")
"""What depends on the ranks; tests/pytorch/test_resume.py has all kinds, in one process."""

CUTS = 1
"""How often each kind is cut: all kinds together are cut almost everywhere."""


def two(kind: str, directory: Path, **fit: Any) -> dict[str, Any]:
    return resuming.run(kind, FakeHost(directory), distributed=DistributedContext.from_torch_distributed(), **fit)


def go_on(kind: str, directory: Path, source: Path) -> dict[int, dict[str, Any]]:
    """The runs that go on from each cut of `source`."""
    found = {}
    for cut in resuming.cuts(kind, CUTS):
        rng.seed_all(999)
        found[cut] = two(kind, directory / str(cut), latest_checkpoint=str(source / f"checkpoint_{cut}"))
    return found


def kinds(directory: Path) -> dict[str, Any]:
    """Runs of every kind, cut and resumed, and runs that go on from one process's checkpoints."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        place = directory / kind
        found[kind] = {"whole": two(kind, place / "two")}
        found[kind]["resumed"] = go_on(kind, place / "resumed", place / "two")
        if kind in MOVING:
            found[kind]["from one"] = go_on(kind, place / "from_one", place / "one")
    return found


@pytest.fixture(scope="module")
def one(directory: Path) -> dict[str, dict[str, Any]]:
    """The runs of one process that two go on from."""
    return {kind: resuming.run(kind, FakeHost(directory / "kinds" / kind / "one")) for kind in MOVING}


@pytest.fixture(scope="module")
def ranks(backend: str, directory: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of both ranks for every kind of trial."""
    return [found["kinds"] for found in results_of(2, __file__, directory, backend)]


@pytest.mark.api("9.8")
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_resume_bit_for_bit_wherever_they_were_interrupted(
    ranks: list[dict[str, Any]], directory: Path, kind: str
) -> None:
    for rank in ranks:
        for cut, resumed in rank[kind]["resumed"].items():
            checkpoint = str(directory / "kinds" / kind / "two" / f"checkpoint_{cut}")
            assert_goes_on(resumed, rank[kind]["whole"], cut, checkpoint)


@pytest.mark.api("9.9")
@pytest.mark.parametrize("kind", MOVING)
def test_two_processes_resume_with_the_batches_of_one(
    ranks: list[dict[str, Any]], one: dict[str, dict[str, Any]], kind: str
) -> None:
    for cut in ranks[0][kind]["from one"]:
        both = [rank[kind]["from one"][cut] for rank in ranks]
        assert global_batches(both) == global_batches([one[kind]])[cut:]
        for run in both:
            assert_close(run, one[kind], cut)


@pytest.mark.api("9.9")
@pytest.mark.parametrize("kind", MOVING)
def test_one_process_resumes_with_the_batches_of_two(
    ranks: list[dict[str, Any]], directory: Path, tmp_path: Path, kind: str
) -> None:
    whole = [rank[kind]["whole"] for rank in ranks]
    for cut in resuming.cuts(kind, CUTS):
        checkpoint = str(directory / "kinds" / kind / "two" / f"checkpoint_{cut}")
        alone = resuming.run(kind, FakeHost(tmp_path / str(cut)), latest_checkpoint=checkpoint)
        assert global_batches([alone]) == global_batches(whole)[cut:]
        assert_close(alone, whole[0], cut)


@pytest.mark.api("9.9")
def test_a_run_that_has_moved_twice_still_has_its_first_batches(
    ranks: list[dict[str, Any]], one: dict[str, dict[str, Any]], directory: Path, tmp_path: Path
) -> None:
    cut = resuming.cuts("shuffled", CUTS)[0]
    later = cut + 1
    checkpoint = str(directory / "kinds" / "shuffled" / "from_one" / str(cut) / f"checkpoint_{later}")
    again = resuming.run("shuffled", FakeHost(tmp_path), latest_checkpoint=checkpoint)
    assert global_batches([again]) == global_batches([one["shuffled"]])[later:]
    assert_close(again, one["shuffled"], later)


def global_batches(runs: Iterable[dict[str, Any]]) -> list[tuple[int, int, list[int]]]:
    """(epoch, batch, records of all processes) of each step."""
    steps = zip(*(run["seen"] for run in runs), strict=True)
    return [(parts[0][0], parts[0][1], sorted(record for part in parts for record in part[2])) for parts in steps]


def assert_close(run: dict[str, Any], whole: dict[str, Any], cut: int) -> None:
    """The weights of the whole run, and its losses where this rank has reported any."""
    torch.testing.assert_close(*(found["state"]["models_state_dict"] for found in (run, whole)))
    if run["reports"]:
        expected_losses = {batches: losses["loss"] for batches, _, losses, _ in whole["reports"] if batches > cut}
        losses = {batches: losses["loss"] for batches, _, losses, _ in run["reports"]}
        assert losses == pytest.approx(expected_losses, rel=1e-5)


if __name__ == "__main__":
    serve([kinds])
