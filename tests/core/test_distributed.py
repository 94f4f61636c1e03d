"""Ranks, and small objects passed between them; ranks are threads here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from dray.core import ClusterInfo, DistributedContext, TrialInfo, get_cluster_info
from dray.storage import CheckpointError
from dray.training.checkpoint.joint import open_together
from dray.training.cluster_info import use_cluster_info
from dray.training.errors import PeerFailed
from dray.training.parallel.distributed import PORT
from dray.training.parallel.launcher import process_group
from dray.training.parallel.transport import StoreTransport, serve_store
from tests.forks.process import torchrun

HANGS_S = 50


def on_ranks(numbers: list[dict[str, int]], work: Callable[[DistributedContext], Any]) -> list[Any]:
    """Run `work` on every rank at once."""
    # A TCPStore would look up its clients' names, which takes seconds if no name server answers.
    store = HashStore()
    store.set_timeout(timedelta(seconds=HANGS_S))

    def one(kwargs: dict[str, int]) -> Any:
        transport = StoreTransport(kwargs["rank"], kwargs["size"], store)
        context = DistributedContext(**kwargs, chief_ip="127.0.0.1", transport=transport)
        try:
            return work(context)
        finally:
            context.close()

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(one, numbers))


def nodes(*local_sizes: int) -> list[dict[str, int]]:
    """Ranks numbered over machines with so many of them."""
    places = [(node, local) for node, size in enumerate(local_sizes) for local in range(size)]
    return [
        {
            "rank": rank,
            "size": len(places),
            "local_rank": local,
            "local_size": local_sizes[node],
            "cross_rank": node,
            "cross_size": len(local_sizes),
        }
        for rank, (node, local) in enumerate(places)
    ]


@pytest.mark.api("3.3", "3.4")
def test_collectives_reach_every_rank_in_order() -> None:
    def work(context: DistributedContext) -> tuple[Any, ...]:
        mine = {"rank": context.rank}
        return (
            context.gather(mine),
            context.allgather(context.rank),
            context.broadcast(f"from {context.rank}"),
            [context.allgather(turn * 10 + context.rank) for turn in range(3)],
        )

    for rank, (gathered, everything, said, turns) in enumerate(on_ranks(nodes(3), work)):
        assert gathered == ([{"rank": 0}, {"rank": 1}, {"rank": 2}] if rank == 0 else None)
        assert everything == [0, 1, 2]
        assert said == "from 0"
        assert turns == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


class Counting:
    """A store that counts what is read from it and what remains in it."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return self.store.get(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_only_the_chief_receives_what_is_gathered() -> None:
    shared = HashStore()
    stores = [Counting(), Counting(), Counting()]
    for store in stores:
        store.store = shared

    def work(rank: int) -> list[Any]:
        transport = StoreTransport(rank, 3, stores[rank])
        found = [transport.gather("gradients" * 1000) for _ in range(3)]
        return [*found, transport.allgather(rank), transport.gather(rank), transport.allgather(rank)]

    with ThreadPoolExecutor(3) as pool:
        chief, *others = pool.map(work, range(3))
    everything = ["gradients" * 1000] * 3
    assert chief == [everything, everything, everything, [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert others == [[None, None, None, [0, 1, 2], None, [0, 1, 2]]] * 2
    assert [len(store.read) for store in stores] == [12, 4, 4]
    # Only the last turn's keys are left, so the store does not grow.
    assert shared.num_keys() == 3


def test_ranks_without_a_process_group_meet_at_the_chiefs_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        offset = probe.getsockname()[1] - PORT

    def one(rank: int) -> list[int]:
        place = {"rank": rank, "size": 2, "local_rank": rank, "local_size": 2, "cross_rank": 0, "cross_size": 1}
        context = DistributedContext(**place, port_offset=offset)
        try:
            return context.allgather(rank)
        finally:
            context.close()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(one, range(2))) == [[0, 1]] * 2


def test_a_wait_for_other_ranks_that_times_out_is_an_error() -> None:
    given_up = threading.Event()

    def work(context: DistributedContext) -> Any:
        assert context.allgather(context.rank, timeout_s=HANGS_S) == [0, 1]
        if context.rank == 1:
            return given_up.wait(HANGS_S)
        with pytest.raises(TimeoutError, match=r"not all ranks have called allgather\(\) within 0.1 s"):
            context.allgather("still there?", timeout_s=0.1)
        given_up.set()
        return None

    assert on_ranks(nodes(2), work) == [None, True]


@pytest.mark.api("3.2", "3.3", "3.4")
def test_local_collectives_stay_on_their_machine() -> None:
    def work(context: DistributedContext) -> tuple[Any, ...]:
        assert (context.get_size(), context.get_num_agents()) == (3, 2)
        return (
            context.get_rank(),
            context.get_local_rank(),
            context.gather_local(context.rank),
            context.allgather_local(context.rank),
            context.broadcast_local(context.rank),
        )

    assert on_ranks(nodes(2, 1), work) == [(0, 0, [0, 1], [0, 1], 0), (1, 1, None, [0, 1], 0), (2, 0, [2], [2], 2)]


def test_a_checkpoint_is_opened_once_on_each_machine() -> None:
    opened: list[int] = []

    def work(context: DistributedContext) -> tuple[Path, str | None]:
        def open_one() -> Path:
            opened.append(context.rank)
            return Path(f"/machine/{context.cross_rank}")

        def damaged_on_the_second_machine() -> Path:
            if context.cross_rank == 1:
                raise CheckpointError("damaged")
            return open_one()

        found = open_together(context, open_one, "opening it")
        try:
            open_together(context, damaged_on_the_second_machine, "opening it")
        except (CheckpointError, PeerFailed) as error:
            return found, str(error)
        return found, None

    others = "rank 2 failed while opening it: CheckpointError('damaged')"
    assert on_ranks(nodes(2, 2), work) == [
        (Path("/machine/0"), others),
        (Path("/machine/0"), others),
        (Path("/machine/1"), "damaged"),
        (Path("/machine/1"), others),
    ]
    assert sorted(opened) == [0, 0, 2]


@pytest.mark.api("3.2", "3.3", "3.4")
def test_alone_everything_is_local() -> None:
    alone = DistributedContext()
    assert (alone.get_rank(), alone.get_local_rank(), alone.get_size(), alone.get_num_agents()) == (0, 0, 1, 1)
    assert alone.gather(1) == alone.allgather(1) == alone.gather_local(1) == alone.allgather_local(1) == [1]
    assert alone.broadcast("x") == alone.broadcast_local("x") == "x"


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"rank": -1}, {"local_rank": 2}, {"cross_rank": 1}])
def test_a_rank_is_below_its_size(wrong: dict[str, int]) -> None:
    numbers = {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "cross_rank": 0, "cross_size": 1, **wrong}
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be >= 0 and < "):
        DistributedContext(**numbers)


RANKS = """
import torch.distributed as dist
from dray import core, pytorch
with core.init() as context:
    found = [context.distributed.allgather(context.distributed.rank), dist.is_initialized()]
for _ in range(2):  # torch can't make a second group of the same name in torchrun's store
    with pytorch.init(hparams={"global_batch_size": 8}) as context:
        found += [context.distributed.allgather(dist.get_rank()), context.get_per_slot_batch_size()]
found += [dist.is_initialized()]
dist.init_process_group("gloo")
with pytorch.init() as context:
    found += [context.distributed.size]
assert dist.is_initialized()  # the program's own
assert found == [[0, 1], False, [0, 1], 4, [0, 1], 4, False, 2], found
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.api("3.5")
def test_torchruns_ranks_are_found_by_a_program_that_passes_none(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun(tmp_path / "ranks.py", directory=tmp_path, DRAY_HOME=str(tmp_path))


def test_a_process_group_is_initialised_for_torchruns_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    numbers = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in numbers.items():
        monkeypatch.setenv(name, str(value))
    # dray's workers and Ray Train's set these, too.
    with process_group(None):
        assert not dist.is_initialized()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with process_group({"resources": {"slot": "cpu"}}) as peers:
        assert (dist.get_backend(), peers.size) == ("gloo", 1)
    assert not dist.is_initialized()


@pytest.mark.api("3.5")
def test_torchruns_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("", "LOCAL_", "GROUP_"):
        monkeypatch.setenv(f"{kind}RANK", "0")
        monkeypatch.setenv(f"{kind}WORLD_SIZE", "1")
    monkeypatch.setenv("DET_CHIEF_IP", "10.0.0.1")
    context = DistributedContext.from_torch_distributed()
    assert (context.rank, context.size, context.chief_ip) == (0, 1, "10.0.0.1")


@pytest.mark.api("8.15")
def test_cluster_info_is_none_until_a_host_says_otherwise() -> None:
    assert get_cluster_info() is None
    info = ClusterInfo(trial=TrialInfo(trial_id=3, experiment_id=1, trial_seed=7, hparams={"lr": 0.1}))
    with use_cluster_info(info):
        found = get_cluster_info()
        assert found is info
        assert found.trial.hparams["lr"] == 0.1
        assert found.task_type == "TRIAL"
    assert get_cluster_info() is None


def test_programs_for_with_and_without_torchrun_catch_what_determined_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for read in (DistributedContext.from_torch_distributed, DistributedContext.from_deepspeed):
        with pytest.raises(KeyError) as raised:
            read()
        assert str(raised.value).startswith(
            "from_torch_distributed() needs an integer in the environment variable RANK, which is not set; start"
        )


def test_the_gpus_of_a_node_are_known_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    uuids = ["3f2c", "88aa"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=uuids[n]))
    info = ClusterInfo(trial=TrialInfo(trial_id=1, experiment_id=1, trial_seed=0))
    assert info.gpu_uuids == ["GPU-3f2c", "GPU-88aa"]
    uuids.clear()
    assert info.gpu_uuids == []
    assert (info.slot_ids, info.container_addrs, info.container_slot_counts) == ([0], ["127.0.0.1"], [1])


def test_a_single_rank_unpickles_nothing_that_others_have_written() -> None:
    store = serve_store("127.0.0.1", timedelta(seconds=HANGS_S))

    class Tampering:
        """The store, where a stranger replaces each value at once."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def set(self, key: str, value: bytes) -> None:
            store.set(key, b"a stranger's")

    transport = StoreTransport(0, 1, Tampering())
    for number in range(3):
        assert transport.allgather({"mine": number}) == [{"mine": number}] == transport.gather({"mine": number})
