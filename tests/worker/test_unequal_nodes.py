"""Ranks on nodes with different numbers of slots; ranks are threads here."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from dray.training.parallel.transport import StoreTransport
from dray.worker.process_group import launcher_variables
from tests.core.test_distributed import HANGS_S, nodes


@dataclass(frozen=True)
class Placed:
    """Ray Train's context of a rank."""

    place: dict[str, int]

    def get_world_rank(self) -> int:
        return self.place["rank"]

    def get_world_size(self) -> int:
        return self.place["size"]

    def get_local_rank(self) -> int:
        return self.place["local_rank"]

    def get_local_world_size(self) -> int:
        return self.place["local_size"]

    def get_node_rank(self) -> int:
        return self.place["cross_rank"]


@pytest.mark.parametrize("local_sizes", [(3, 1), (1, 3), (2, 2, 1), (4,)])
def test_all_ranks_get_the_variables_that_torchrun_sets(local_sizes: tuple[int, ...]) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = nodes(*local_sizes)

    def one(place: dict[str, int]) -> dict[str, str]:
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=HANGS_S))
        context: Any = Placed(place)
        return launcher_variables(context, store, StoreTransport(place["rank"], place["size"], store))

    with ThreadPoolExecutor(len(places)) as pool:
        ranks = list(pool.map(one, places))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    # As torchrun sets them, which is what DistributedContext.from_torch_distributed() reads.
    assert [[int(rank[name]) for name in names] for rank in ranks] == [list(place.values()) for place in places]
    assert {(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in ranks} == {("127.0.0.1", str(server.port))}
