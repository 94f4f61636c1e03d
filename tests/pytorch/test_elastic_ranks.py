"""Trials on a number of processes that changes: each step has the records that it would have in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pytorch import elastic_ranks
from tests.pytorch.elastic_ranks import BATCHES, KINDS, SHARDED, STORIES, sharing
from tests.pytorch.processes import gloo_first, results_of  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

STORY = pytest.mark.parametrize("story", STORIES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, backend: str) -> list[dict[tuple[str, str, int], dict[str, Any]]]:
    """What each rank has seen of each part of a story that it was there for."""
    return results_of(4, elastic_ranks.__file__, tmp_path_factory.mktemp("elastic_ranks"), backend)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same trials in one process from their beginning to their end; sharded ones whole."""
    directory = tmp_path_factory.mktemp("alone")
    found = {kind: elastic_ranks.run(kind, directory / kind, BATCHES, None) for kind in KINDS if kind not in SHARDED}
    return {**found, **dict.fromkeys(SHARDED, found["two batches a step"])}


def steps(ranks: list[Any], story: str, kind: str) -> list[list[int]]:
    """The records of each step, over all processes."""
    found: dict[int, list[int]] = {}
    for part, (size, _) in enumerate(STORIES[story]):
        for rank in ranks[: size : sharing(kind, size)]:
            for batch, records, _ in rank[story, kind, part]["seen"]:
                found.setdefault(batch, []).extend(records)
    return [sorted(found[batch]) for batch in range(BATCHES)]


@STORY
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_has_the_records_that_it_has_in_one_process(
    ranks: list[Any], alone: dict[str, dict[str, Any]], story: str, kind: str
) -> None:
    assert steps(ranks, story, kind) == [sorted(records) for _, records, _ in alone[kind]["seen"]]


@STORY
@pytest.mark.parametrize("kind", ["whole batches", "two batches a step", "sharded", "tensor parallel"])
def test_weights_and_momenta_are_those_of_one_process(
    ranks: list[Any], alone: dict[str, dict[str, Any]], story: str, kind: str
) -> None:
    found, expected = ranks[0][story, kind, 2]["state"], alone[kind]["state"]
    torch.testing.assert_close(found["models_state_dict"], expected["models_state_dict"])
    torch.testing.assert_close(found["optimizers_state_dict"], expected["optimizers_state_dict"])


@STORY
def test_processes_that_had_no_random_numbers_get_some_of_their_own(ranks: list[Any], story: str) -> None:
    [(before, _), (size, _), _] = STORIES[story]
    # Those that were there from the beginning have the trial's seed, all of them.
    drawn = [
        {draw for _, _, draw in rank[story, "whole batches", 1]["seen"]} for rank in (ranks[0], *ranks[before:size])
    ]
    assert len(set.union(*drawn)) == sum(map(len, drawn))
    first = {draw for _, _, draw in ranks[0][story, "whole batches", 0]["seen"]}
    assert first.isdisjoint(set.union(*drawn)), "nobody begins again with the first batch's"


@STORY
@pytest.mark.parametrize("kind", ["tensor parallel"])
def test_tensor_parallel_ranks_draw_the_same_random_numbers_and_others_do_not(
    ranks: list[Any], story: str, kind: str
) -> None:
    for part, (size, _) in enumerate(STORIES[story]):
        step = sharing(kind, size)
        draws = [[draw for *_, draw in rank[story, kind, part]["seen"]] for rank in ranks[:size]]
        groups = [draws[first : first + step] for first in range(0, size, step)]
        assert all(each == group[0] for group in groups for each in group)
        if part > 0:  # at the beginning all have the trial's seed
            assert len({draw for group in groups for draw in group[0]}) == sum(len(group[0]) for group in groups)
