"""Groups whose collectives are queued on a device, as NCCL's are: see `tests.queued`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from dray.training.parallel.exchange import Reason
from tests.pytorch.processes import HANGS_S, results_of, two_processes
from tests.training import queued_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(2, queued_ranks.__file__, tmp_path_factory.mktemp("queued"), "queued")


def test_some_ranks_make_groups_without_the_others(ranks: list[dict[str, Any]]) -> None:
    # The barrier, and that of the gradients has connected its ranks, which can't be interrupted in a batch.
    assert [rank["some_make_groups"] for rank in ranks] == [[1, 1]] * 2


def test_a_rank_that_waits_by_gloo_for_one_that_left_leaves_too(ranks: list[dict[str, Any]]) -> None:
    ends = [rank["waits_by_gloo"] for rank in ranks]
    assert ends == [(Reason.EXIT, True, [True]), (Reason.EXIT, True, [])], "by a closed connection, not by a timeout"


def test_an_error_is_printed_once_before_the_watchdog_ends_the_process(tmp_path: Path) -> None:
    with two_processes(queued_ranks.__file__, tmp_path, "device_fails", backend="queued") as processes:
        errors = [process.communicate(timeout=HANGS_S)[1] for process in processes]
    assert processes[1].returncode == -signal.SIGABRT
    assert errors[1].count("AcceleratorError: CUDA error: device-side assert triggered") == 1
    assert "queued.gone_for(queued.DEVICE.fail)" in errors[1]
    assert processes[0].returncode == 1
