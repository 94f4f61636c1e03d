"""What one rank of two does alone ends both as documented, wherever it happens, and leaves nothing behind.

Two plain processes in a gloo group. That none of them hangs is what the processes' time limit says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api import faulty_ranks
from tests.api.faulty_ranks import name, scenarios
from tests.pytorch.processes import HANGS_S, two_processes

pytestmark = pytest.mark.slow


def start(directory: Path, what: str, backend: str) -> list[tuple[int, str]]:
    """Exit code and what was printed, of each rank."""
    with two_processes(faulty_ranks.__file__, directory, what, backend=backend) as processes:
        errors = [process.communicate(timeout=HANGS_S)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, backend: str) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("faults")
    for code, error in start(directory, "all", backend):
        assert code == 0, error
    return [torch.load(directory / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.api("2.12", "8.11", "8.12", "8.13")
def test_both_ranks_have_the_documented_end(ranks: list[dict[str, Any]], backend: str) -> None:
    own = {"fail": "KeyError: 'gone'", "exit": "SystemExit: 3", "invalid": "InvalidHP: too wide"}
    other = {
        "fail": "PeerFailed: rank {} failed while .*KeyError\\('gone'\\)",
        "exit": "PeerFailed: .*SystemExit\\(3\\)",
    }
    for scenario in scenarios(backend):
        kind, rank, *_ = scenario
        mine, others = (ranks[each][name(scenario)]["error"] for each in (rank, 1 - rank))
        assert mine == own.get(kind), scenario
        expected = other.get(kind, own.get(kind, "None"))
        assert re.fullmatch(expected.format(rank), str(others)), scenario


@pytest.mark.api("8.11", "8.12", "8.13")
def test_what_was_trained_is_saved_if_the_end_says_so(ranks: list[dict[str, Any]], backend: str) -> None:
    # Nothing is saved of what comes after an aborted collective.
    sound = backend == "gloo"
    expected = {"leave": [(4, sound)], "invalid": [(4, sound)], "drop": [(4, False)], "fail": [], "exit": []}
    for scenario in (each for each in scenarios(backend) if each[2] == "before backward 4"):
        found = [rank[name(scenario)] for rank in ranks]
        saved = [(batches, checkpoint is not None) for batches, *_, checkpoint in found[0]["reports"]]
        assert saved == expected[scenario[0]], scenario
        assert [rank["aborted"] for rank in found] == [not sound] * 2, scenario
        if scenario[3] == 1 and sound:
            for rank, each in zip(ranks, found, strict=True):
                assert equal(each["weights"], rank["sound_4"]["weights"]), "those of a run of four batches"


def test_a_trial_that_one_rank_left_resumes_from_its_last_checkpoint_as_if_uninterrupted(
    ranks: list[dict[str, Any]], backend: str
) -> None:
    for rank in ranks:
        assert [Path(checkpoint).name for checkpoint in rank["restarted"]["kept"]] == {
            "gloo": ["checkpoint_3", "checkpoint_4"],
            "queued": ["checkpoint_3"],
        }[backend]
        assert equal(rank["restarted"]["weights"], rank["sound_9"]["weights"])


def test_the_trials_that_follow_in_the_same_processes_are_none_the_worse(
    ranks: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert [rank["sound_9"]["error"] for rank in ranks] == [None, None]
    assert equal(ranks[0]["sound_9"]["weights"], ranks[1]["sound_9"]["weights"])


@pytest.mark.api("1.11", "6.1")
def test_a_validation_may_have_more_batches_on_one_rank_also_with_batch_norm(ranks: list[dict[str, Any]]) -> None:
    (*_, validation, _) = ranks[0]["sound_9"]["reports"][-1]
    assert validation["batches_seen"] == 5.0
    assert validation["rank"] == pytest.approx(2 / 5)


@pytest.mark.api("2.16")
def test_ranks_validate_with_the_chiefs_running_means(ranks: list[dict[str, Any]]) -> None:
    chief, other = (rank["sound_9"]["trial"] for rank in ranks)
    assert (len(chief), len(other)) == (3, 2)
    assert chief[0] != [0.0]
    assert all(means == chief[0] for means in [*chief, *other])


@pytest.mark.api("2.30")
def test_data_that_end_on_one_rank_end_the_training_of_both(ranks: list[dict[str, Any]], backend: str) -> None:
    for rank in ranks:
        assert rank["data_of_different_lengths"]["error"].startswith("DataExhausted: the training data ended after 4")
    saved = backend == "gloo"  # else the other rank was in the middle of the fifth batch
    assert [(r[0], r[3] is not None) for r in ranks[0]["data_of_different_lengths"]["reports"]] == [(4, saved)]


@pytest.mark.api("4.6", "2.13", "8.10")
def test_all_ranks_count_epochs_as_the_chief_does(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["shards_of_different_lengths"]["epochs"] == 6 / 3
    for rank in ranks:
        batches = [entry for entry in rank["shards_of_different_lengths"]["trial"] if isinstance(entry, tuple)]
        assert batches == [(i // 3, i, i % 3 == 0, i % 3 == 2) for i in range(6)]
        ends = [entry for entry in rank["shards_of_different_lengths"]["trial"] if "ends" in entry]
        assert ends == ["epoch 0 ends", "epoch 1 ends"]


@pytest.mark.api("8.12")
def test_a_rank_that_ends_before_training_ends_the_other(tmp_path: Path) -> None:
    (chief, chiefs), (other, others) = start(tmp_path, "constructor", "gloo")
    assert chief != 0
    assert other != 0
    assert "InvalidHP: too wide" in others
    assert "Connection" in chiefs or "connection" in chiefs
