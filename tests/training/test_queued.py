"""The backend that stands for NCCL in tests does what NCCL does: dray's own tests on it are only as good as it is."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dray.training.parallel.exchange import Reason
from tests.pytorch.processes import HANGS_S, results_of, results_of_two, two_processes
from tests.queued import GARBAGE
from tests.training import queued_ranks, unequal_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_two(queued_ranks.__file__, tmp_path_factory.mktemp("queued"), "queued")


def test_its_collectives_are_known_to_be_queued(ranks: list[dict[str, Any]]) -> None:
    assert [rank["queues"] for rank in ranks] == [True, True]


def test_collectives_that_all_ranks_call_compute_what_they_should(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        sound = rank["sound"]
        assert sound["total"].tolist() == [2, 2]
        assert sound["chiefs"].tolist() == [1, 1]
        assert [each.item() for each in sound["everything"]] == [0, 1]
        assert sound["mine"].item() == 1, "a group of one rank"


def test_a_rank_whose_peer_has_gone_hangs_until_it_aborts_and_reads_garbage(ranks: list[dict[str, Any]]) -> None:
    alone = ranks[0]["left_alone"]
    assert alone["read"] == [[GARBAGE, GARBAGE]]
    assert alone["other"].item() == GARBAGE
    assert "aborted" in alone["raised"]
    assert alone["is_aborted"]


def test_a_group_is_made_by_all_ranks_of_the_default_group(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["alone"] == "ncclCommSplit on rank 0: ranks [1] do not call it"


def test_a_rank_that_waits_by_gloo_for_one_that_left_leaves_too(ranks: list[dict[str, Any]]) -> None:
    ends = [rank["waits_by_gloo"] for rank in ranks]
    assert ends == [(Reason.EXIT, True, [True]), (Reason.EXIT, True, [])], "by a closed connection, not by a timeout"


def test_nodes_may_have_different_numbers_of_ranks(tmp_path: Path) -> None:
    ranks = results_of(3, unequal_ranks.__file__, tmp_path, "queued", local_sizes=(2, 1))
    assert [rank["place"] for rank in ranks] == [(0, 0, 2, 0, 2), (1, 1, 2, 0, 2), (2, 0, 1, 1, 2)]
    assert [rank["local"] for rank in ranks] == [[0, 1], [0, 1], [2]]
    assert [rank["on the node"] for rank in ranks] == [2, 2, 1]
    assert [rank["opened"] for rank in ranks] == [("0", [0]), ("0", []), ("1", [2])]
    other = "PeerFailed: rank 2 failed while training: KeyError('gone')"
    assert [rank["left"] for rank in ranks] == [other, other, "KeyError: 'gone'"]


def test_two_ranks_on_one_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUEUED_DEVICE", "7")
    with two_processes(queued_ranks.__file__, tmp_path, backend="queued") as processes:
        errors = [process.communicate(timeout=HANGS_S)[1] for process in processes]
    for error in errors:
        assert "Duplicate GPU detected : rank" in error


def test_an_error_is_printed_once_before_the_watchdog_ends_the_process(tmp_path: Path) -> None:
    with two_processes(queued_ranks.__file__, tmp_path, "device_fails", backend="queued") as processes:
        errors = [process.communicate(timeout=HANGS_S)[1] for process in processes]
    assert processes[1].returncode == -signal.SIGABRT
    assert errors[1].count("AcceleratorError: CUDA error: device-side assert triggered") == 1
    assert "queued.gone_for(queued.DEVICE.fail)" in errors[1]
    assert processes[0].returncode == 1
