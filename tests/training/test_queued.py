"""Groups whose collectives are queued on a device, as NCCL's are: see `tests.queued`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dray.training.parallel.exchange import Reason
from tests.pytorch.processes import HANGS_S, results_of, two_processes
from tests.training import queued_ranks, unequal_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(2, queued_ranks.__file__, tmp_path_factory.mktemp("queued"), "queued")


def test_its_collectives_are_known_to_be_queued(ranks: list[dict[str, Any]]) -> None:
    assert [rank["queues"] for rank in ranks] == [True, True]


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


def test_an_error_is_printed_once_before_the_watchdog_ends_the_process(tmp_path: Path) -> None:
    with two_processes(queued_ranks.__file__, tmp_path, "device_fails", backend="queued") as processes:
        errors = [process.communicate(timeout=HANGS_S)[1] for process in processes]
    assert processes[1].returncode == -signal.SIGABRT
    assert errors[1].count("AcceleratorError: CUDA error: device-side assert triggered") == 1
    assert "queued.gone_for(queued.DEVICE.fail)" in errors[1]
    assert processes[0].returncode == 1
