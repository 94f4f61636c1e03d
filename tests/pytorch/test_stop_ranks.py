"""SIGTERM to one of two ranks of uneven speed: both stop after the same batch, far from any report; nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pytorch import stop_ranks
from tests.pytorch.processes import results_of_two

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, backend: str) -> list[dict[str, Any]]:
    return results_of_two(stop_ranks.__file__, tmp_path_factory.mktemp("stop"), backend)


def test_both_stop_after_the_same_batch_soon_after_the_request(ranks: list[dict[str, Any]]) -> None:
    one, two = (rank["stopped"]["begun"] for rank in ranks)
    assert one == two == list(range(len(one)))
    assert stop_ranks.ASKED_AT < len(one) < stop_ranks.BATCHES


def test_all_that_was_trained_is_saved(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["saved"]["batches"] == len(rank["stopped"]["begun"])
        assert rank["rest"]["begun"] == list(range(rank["saved"]["batches"], stop_ranks.BATCHES))


def test_the_rest_ends_with_the_weights_of_the_run_without_a_stop(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, value in rank["whole"]["weights"].items():
            assert torch.equal(rank["rest"]["weights"][name], value), name
