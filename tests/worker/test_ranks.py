"""The ranks of a worker group's processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dray.worker.process_group import launcher_variables
from dray.worker.ranks import Place, Ranks, assign, order
from tests.core.test_distributed import nodes


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        # The example of Ray Train's own function: nodes in the order of their first worker, each by GPU.
        (
            [Place("b", "2", ("1",)), Place("a", "1", ("0",)), Place("b", "2", ("0",)), Place("a", "1", ("1",))],
            [2, 0, 1, 3],
        ),
        ([Place("a", "1", ("10", "2")), Place("a", "1", ("9", "3"))], [0, 1]),
        ([Place("a", "1", ("GPU-c",)), Place("a", "1", ("GPU-b",))], [1, 0]),
        ([Place("a", "1"), Place("b", "2"), Place("a", "1")], [0, 2, 1]),
    ],
    ids=["by GPU", "numbers", "UUIDs", "no GPUs"],
)
def test_workers_are_ordered_by_node_and_gpu(places: list[Place], expected: list[int]) -> None:
    assert order(places) == expected


def test_local_ranks_count_a_machines_workers_which_see_their_nodes_gpus() -> None:
    # Nodes a and b are on one machine, as in a test of several nodes.
    places = [Place("a", "1", ("10",)), Place("a", "1", ("9",)), Place("b", "1", ("9",)), Place("c", "2", ("0",))]
    one = {"world_size": 4, "num_nodes": 2, "local_world_size": 3, "node_rank": 0}
    assert assign(places) == [
        Ranks(**one, world_rank=0, local_rank=0, gpus=("9", "10")),
        Ranks(**one, world_rank=1, local_rank=1, gpus=("9", "10")),
        Ranks(**one, world_rank=2, local_rank=2, gpus=("9",)),
        Ranks(world_rank=3, world_size=4, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2, gpus=("0",)),
    ]


@pytest.mark.parametrize("local_sizes", [(3, 1), (1, 3), (2, 2, 1), (4,)])
def test_all_ranks_get_the_variables_that_torchrun_sets(local_sizes: tuple[int, ...]) -> None:
    store: Any = SimpleNamespace(host="10.0.0.1", port=1)
    places = [Place(str(node), str(node)) for node, size in enumerate(local_sizes) for _ in range(size)]
    found = [launcher_variables(ranks, store) for ranks in assign(places)]
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    # As torchrun sets them, which is what DistributedContext.from_torch_distributed() reads.
    assert [[int(rank[name]) for name in names] for rank in found] == [
        list(place.values()) for place in nodes(*local_sizes)
    ]
