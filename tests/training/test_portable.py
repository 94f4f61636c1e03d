"""What leaves a process is loaded on the CPU: by other ranks, and from files.

A package of torch's own kind stands for a GPU: it tags the tensors of this process, and fails where one is loaded.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.serialization import _package_registry

from dray.training.checkpoint import files as checkpoint
from dray.training.checkpoint.files import Description, RankState
from dray.training.checkpoint.portable import portable
from dray.training.evaluation import Share
from dray.training.metrics.reducers import ReducerRegistry
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.transport import StoreTransport, TorchTransport
from dray.training.progress import Progress


@pytest.fixture
def gpu_of_this_rank() -> Iterator[None]:
    """All tensors seem to be on a device that other ranks and machines must not use."""

    def tag(storage: Any) -> str:
        return "elsewhere:1"

    def restored(storage: Any, location: str) -> None:
        assert not location.startswith("elsewhere"), "a tensor was loaded on the device of another rank"

    torch.serialization.register_package(5, tag, restored)
    yield
    _package_registry.remove((5, tag, restored))


@dataclass
class Own:
    """A contribution of a user's reducer."""

    scores: torch.Tensor
    more: dict[str, Any]


def contribution(rank: int) -> list[Any]:
    whole = torch.arange(6.0) + rank
    parts = {"rows": [whole[:2], (whole[::2],)], "weight": torch.nn.Parameter(whole.clone())}
    return [Own(scores=whole, more=parts), torch.eye(2).to_sparse(), torch.ones(3, dtype=torch.bfloat16), "text"]


def same(one: Any, other: Any) -> bool:
    # It has every value, dtype and layout, and the device of each tensor that is not on the CPU.
    return repr(one) == repr(other)


@pytest.mark.usefixtures("gpu_of_this_rank")
def test_what_ranks_exchange_over_a_store_arrives_on_the_cpu() -> None:
    store = dist.HashStore()

    def on_rank(rank: int) -> list[Any]:
        return StoreTransport(rank, 2, store).allgather(contribution(rank))

    with ThreadPoolExecutor(2) as ranks:
        for found in ranks.map(on_rank, range(2)):
            assert [same(part, contribution(rank)) for rank, part in enumerate(found)] == [True, True]
            assert type(found[0][0]) is Own


@pytest.mark.parametrize("padding", [0, 2 * TorchTransport.ROOM])
@pytest.mark.usefixtures("gpu_of_this_rank")
def test_what_ranks_exchange_over_torch_arrives_on_the_cpu(padding: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        registry = ReducerRegistry()
        registry.wrap_reducer(lambda values: float(torch.stack(values).sum()), name="sum").update(torch.tensor(3.0))
        reduced = [registry.per_slot(training=False), contribution(0), "x" * padding]
        share = Share(metrics={"loss": 1.0}, reduced=reduced)
        (found,) = DistributedContext(transport=TorchTransport()).allgather(share)
        assert registry.cross_slot([found.reduced[0]], training=False) == {"sum": 3.0}
        assert same(found.reduced[1], contribution(0))
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("gpu_of_this_rank")
def test_only_the_block_is_portable_and_only_in_its_thread() -> None:
    def tag() -> bytes:
        return b"elsewhere" if b"elsewhere" in pickle.dumps(torch.ones(1)) else b"cpu"

    tags = [tag()]
    with portable():
        tags.append(tag())
        other = threading.Thread(target=lambda: tags.append(tag()))
        other.start()
        other.join()
        with portable():
            pass
        tags.append(tag())
    assert [*tags, tag()] == [b"elsewhere", b"cpu", b"elsewhere", b"cpu", b"elsewhere"]


@pytest.mark.usefixtures("gpu_of_this_rank")
def test_a_checkpoint_loads_on_a_machine_without_the_gpu_it_was_written_on(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    state = {"models_state_dict": [model.state_dict()], "sparse": torch.eye(2).to_sparse()}
    rank = RankState(rng={"cpu": torch.get_rng_state()}, gradients=[[torch.ones(1, 3), None]])
    checkpoint.write(
        tmp_path,
        checkpoint.contents(state=state, progress=Progress(), ranks=[rank], description=Description(metadata={})),
    )
    assert same(torch.load(tmp_path / checkpoint.STATE), state)
    assert same(torch.load(tmp_path / "gradients" / "rank_0.pth"), [[torch.ones(1, 3), None]])
    assert same(torch.load(tmp_path / "rng" / "rank_0.pth"), rank.rng)


@pytest.mark.gpu
def test_tensors_of_a_gpu_arrive_and_are_saved_as_those_of_the_cpu() -> None:
    mine = [part.cuda() if isinstance(part, torch.Tensor) else part for part in contribution(0)]
    mine[0].scores = mine[0].scores.cuda()
    mine[0].more["weight"] = torch.nn.Parameter(torch.arange(6.0, device="cuda"))
    (found,) = StoreTransport(0, 1, dist.HashStore()).allgather(mine)
    assert same(found, contribution(0))
    file = io.BytesIO()
    with portable():
        torch.save(mine, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False), contribution(0))
