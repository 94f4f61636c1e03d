"""The ranks of a worker group's processes, and their process group."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.training.parallel.ddp import gradients_group, timeout
from dray.worker import process_group
from dray.worker.exits import collectives_begun
from dray.worker.hang import dump_collectives
from dray.worker.isolation.snapshot import ProcessSnapshot
from dray.worker.process_group import joined, launcher_variables, outliving_programs
from dray.worker.ranks import Place, Ranks, assign, order
from tests.core.test_distributed import HANGS_S, nodes
from tests.pytorch.fakes import FakeHost
from tests.queued import stand_for_nccl

HERE = Place("a", "127.0.0.1", ("0",))


@pytest.mark.parametrize(("size", "variable"), [(1, None), (2, None), (2, "0"), (2, "1"), (1, "1")])
def test_ranks_with_gpus_are_bound_to_them_only_if_the_user_wants_it(
    size: int, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way, they connect before the first batch."""
    monkeypatch.delenv("DRAY_BIND_DEVICE", raising=False)
    if variable is not None:
        monkeypatch.setenv("DRAY_BIND_DEVICE", variable)
    connected: list[Any] = []
    monkeypatch.setattr(process_group.ddp, "connect", connected.append)
    made: dict[int, tuple[str, Any]] = {}

    def init(backend: str, *, rank: int, device_id: Any, **_: Any) -> None:
        made[rank] = backend, device_id

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(process_group, "outliving_programs", contextlib.nullcontext)
    monkeypatch.setattr(process_group.ddp, "end_group", lambda device: None)
    workers_have_gpus(monkeypatch, size)
    address: Future[tuple[str, int]] = Future()
    together = threading.Barrier(size)

    def meet(mine: tuple[str, int] | None) -> tuple[str, int]:
        if mine is not None:
            address.set_result(mine)
        return address.result(HANGS_S)

    def join(ranks: Ranks) -> None:
        with joined(ranks, HERE, meet):
            together.wait(HANGS_S)  # the store is rank 0's
            with pytest.raises(ConnectionRefusedError):  # it would not be, if it listened at all addresses
                socket.create_connection(("127.0.0.2", int(os.environ["MASTER_PORT"])))
            together.wait(HANGS_S)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(join, assign([Place("a", "1")] * size)))
    # A single rank has nobody to connect to.
    is_bound = size > 1 and variable == "1"
    devices = {rank: torch.device("cuda", rank) if is_bound else None for rank in range(size)}
    assert connected == [dist.group.WORLD] * size
    assert made == {rank: ("cpu:gloo,cuda:nccl", device) for rank, device in devices.items()}


def test_gpu_workers_can_communicate_what_is_in_the_memory_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workers_have_gpus(monkeypatch, 1)
    stand_for_nccl(monkeypatch)
    [ranks] = assign([Place("a", "1")])
    with joined(ranks, HERE, lambda mine: ("", 0)):
        begun = collectives_begun()
        groups = [dist.group.WORLD, dist.new_group([0]), gradients_group().group]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        assert collectives_begun() == begun + 1, "those of all ranks, whatever backend does them"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # there is none to copy from
        save: Any = dist.checkpoint.async_save({"weight": torch.ones(2)}, checkpoint_id=str(tmp_path))
        save.result(HANGS_S)
    assert (tmp_path / ".metadata").exists()


def workers_have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As far as `joined` sees; on this machine alone."""
    monkeypatch.setattr(process_group, "check_gpus", lambda device, allgather: None)
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "set_device": lambda device: 0,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.skipif(torch.__version__ < "2.11", reason="this torch records no collectives of gloo")
def test_the_last_collectives_of_a_process_are_written_beside_its_log(group: None, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(3))
    dump_collectives(tmp_path / "rank_0.log", 0)
    record = pickle.loads((tmp_path / "collectives_of_rank_0").read_bytes())
    last = record["entries"][-1]
    assert (last["profiling_name"], last["input_sizes"]) == ("gloo:all_reduce", [[3]])


class Late:
    """Reaches another rank, which downloads data, and has not come to `wrap_model`."""

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        assert timeout_s is None
        raise EOFError("still waiting")

    gather = allgather

    def close(self) -> None:
        pass


def test_wrap_model_waits_for_the_other_ranks_before_any_collective_with_a_timeout(group: None, tmp_path: Path) -> None:
    peers = DistributedContext(**nodes(2)[0], transport=Late())
    with (
        use_host(FakeHost(tmp_path)),
        pytorch.init(hparams={"global_batch_size": 8}, distributed=peers) as context,
        pytest.raises(EOFError, match="still waiting"),
    ):
        context.wrap_model(torch.nn.Linear(1, 1))


@pytest.mark.api("3.5")
def test_the_group_outlives_a_program_that_initialises_and_destroys_it(group: None) -> None:
    before = dist.group.WORLD, dist.init_process_group, dist.destroy_process_group
    with outliving_programs():
        assert dist.destroy_process_group.__name__ == "destroy_process_group"
        for _ in range(2):
            dist.init_process_group(backend="nccl")
            dist.destroy_process_group()
        dist.destroy_process_group(dist.group.WORLD)
    assert before == (dist.group.WORLD, dist.init_process_group, dist.destroy_process_group)


def test_a_program_gets_the_timeout_that_it_asks_for_until_it_ends(group: None) -> None:
    def program() -> None:
        dist.init_process_group("gloo", timeout=timedelta(hours=7))
        assert timeout() == timedelta(hours=7) != before

    before = timeout()
    with outliving_programs():
        _, reasons = ProcessSnapshot().run(program)
    assert (timeout(), reasons) == (before, [])


def test_a_program_learns_which_of_its_arguments_the_group_does_not_have(
    group: None, caplog: pytest.LogCaptureFixture
) -> None:
    with outliving_programs():
        dist.init_process_group("cpu:gloo", init_method="env://", rank=0, world_size=1)
        assert caplog.messages == []
        dist.init_process_group("cuda:nccl", "env://", None, 2)
    assert caplog.messages == [
        "init_process_group(backend='cuda:nccl', world_size=2): ignored, as the trial's slots have a process group "
        "already, which this program uses too: rank 0 of 1, backend cpu:gloo,cuda:gloo"
    ]


def test_a_program_can_destroy_groups_that_it_made(group: None) -> None:
    with outliving_programs():
        mine = dist.new_group([0])
        dist.destroy_process_group(mine)
        with pytest.raises(ValueError):
            dist.get_rank(mine)


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
