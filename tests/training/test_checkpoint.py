"""The contents of checkpoints, copies of state, state that they refuse, and the code that they carry."""

from __future__ import annotations

import enum
import hashlib
import io
import os
import pickle
import select
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.serialization import _package_registry

from dray.storage.manifest import Listed
from dray.training import rng
from dray.training.checkpoint import files as checkpoint
from dray.training.checkpoint import shard_file, snapshot, source
from dray.training.checkpoint.files import ChecksumWriter, Contents, Description, RankState, address_of
from dray.training.checkpoint.plain_state import UnsavableState
from dray.training.checkpoint.portable import portable
from dray.training.checkpoint.shard_file import TensorPiece
from dray.training.checkpoint.snapshot import NotCopied, Snapshots
from dray.training.evaluation import Share
from dray.training.metrics.reducers import ReducerRegistry
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.transport import StoreTransport, TorchTransport
from dray.training.progress import Progress


class Colour(enum.Enum):
    RED = 1


class Thing:
    pass


def written(directory: Path, state: dict[str, Any], **kwargs: Any) -> Path:
    contents = checkpoint.contents(
        state=state,
        progress=Progress(batches=3, saved=3),
        ranks=[RankState(rng=rng.capture(torch.device("cpu")))],
        description=Description(metadata={"framework": "torch"}, **kwargs),
    )
    checkpoint.write(directory, contents)
    return directory


@pytest.mark.parametrize(
    ("value", "kind"),
    [(deque([1]), "collections.deque"), (Colour.RED, "Colour"), (Thing(), "Thing"), (Path("x"), "Path")],
)
def test_state_that_would_not_load_is_refused_when_saved(tmp_path: Path, value: Any, kind: str) -> None:
    state = {"callbacks": {"early_stop": {"history": [1, {"last": value}]}}}
    with pytest.raises(UnsavableState, match=rf"callback 'early_stop' at \['history'\]\[1\]\['last'\].*{kind}"):
        written(tmp_path, state)
    assert not (tmp_path / "state-dict.pth").exists()


def test_plain_state_and_numpy_come_back_equal(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "numbers": (1, 2.5, True, None, 1j, b"x"),
        "set": {1, 2},
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "array": np.arange(3, dtype=np.int16),
        "scalar": np.float32(0.5),
        "flag": np.bool_(True),
        "words": np.array(["a", "bc"]),
        "tensor": torch.ones(2, dtype=torch.bfloat16),
        "dtype": torch.float16,
    }
    loaded = checkpoint.read_state(written(tmp_path, {"callbacks": {"c": values}}), [])["callbacks"]["c"]
    assert loaded.keys() == values.keys()
    for name in ("numbers", "set", "ordered", "counter", "scalar", "flag", "dtype"):
        assert loaded[name] == values[name]
        assert type(loaded[name]) is type(values[name])
    for name in ("array", "words"):
        np.testing.assert_array_equal(loaded[name], values[name])
        assert loaded[name].dtype == values[name].dtype
    assert torch.equal(loaded["tensor"], values["tensor"])


def test_gradients_of_two_ranks_are_averaged_for_one(tmp_path: Path) -> None:
    state = rng.capture(torch.device("cpu"))
    ranks = [RankState(rng=state, gradients=[[torch.tensor([v]), None]]) for v in (1.0, 3.0)]
    contents = checkpoint.contents(
        state={}, progress=Progress(batches=1), ranks=ranks, description=Description(metadata={})
    )
    checkpoint.write(tmp_path, contents)
    own = checkpoint.read_rank(tmp_path, {}, 1, 2)
    assert own is not None
    assert own.gradients == [[torch.tensor([3.0]), None]]
    alone = checkpoint.read_rank(tmp_path, {}, 0, 1)
    assert alone is not None
    assert alone.gradients == [[torch.tensor([2.0]), None]]


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


def test_what_is_written_is_listed_though_its_memory_is_used_again(tmp_path: Path) -> None:
    kept, reused = np.random.default_rng(0).bytes(4 << 20), bytearray(4 << 20)
    sizes = [0, 1, 300, checkpoint.PIECE_BYTES, 3 << 20, 7, checkpoint.PIECE_BYTES + 1, 4 << 20, 2 << 20]
    pieces = []
    with ChecksumWriter(str(tmp_path / "file"), True, {address_of(memoryview(kept))}) as output:
        for number, size in enumerate(sizes):
            reused[:size] = bytes([number]) * size
            for data in (memoryview(reused)[:size], memoryview(kept)[:size]):
                pieces.append(bytes(data))
                assert output.write(data) == size
    expected = b"".join(pieces)
    assert (tmp_path / "file").read_bytes() == expected
    assert output.listed == Listed(len(expected), hashlib.sha256(expected).hexdigest())


@pytest.mark.parametrize("sharded", [False, True])
def test_torch_does_not_wait_for_the_disk(tmp_path: Path, sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is a pipe that nobody reads before torch is done."""
    os.mkfifo(tmp_path / "file")
    writer, done = torch.save, threading.Event()
    tensors = {str(n): torch.full((1 << 20,), float(n)) for n in range(3)}
    tensors["view of another"] = tensors["0"][7:]
    if sharded:
        writer = shard_file.write
        contents = Contents(shards={"file": {name: TensorPiece(each, (0,)) for name, each in tensors.items()}})
    else:
        contents = Contents(objects={"file": tensors})

    def write(*args: Any) -> None:
        writer(*args)
        done.set()

    monkeypatch.setattr(*((shard_file, "write") if sharded else (torch, "save")), write)
    with ThreadPoolExecutor(1) as pool, open(os.open(tmp_path / "file", os.O_RDWR), "rb", buffering=0) as disk:
        written = pool.submit(checkpoint.write, tmp_path, contents)
        assert done.wait(60)
        content = b""
        while not written.done() or select.select([disk], [], [], 0)[0]:
            content += disk.read(1 << 16) if select.select([disk], [], [], 0.01)[0] else b""
    assert written.result() == {"file": Listed(len(content), hashlib.sha256(content).hexdigest())}
    (tmp_path / "copy").write_bytes(content)
    if sharded:
        found = {name: piece.load() for name, piece in shard_file.read(tmp_path / "copy").items()}
    else:
        found = torch.load(tmp_path / "copy")
    assert all(torch.equal(found[name], each) for name, each in tensors.items())


def make(directory: Path, *names: str, content: str = "x = 1\n") -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_source_is_taken_and_the_rest_is_left(tmp_path: Path) -> None:
    make(tmp_path, "model_def.py", "conf/asha.yaml", "lib/a/b.py", "data.npz", ".git/config.py", "__pycache__/a.py")
    make(tmp_path, "venv/pyvenv.cfg", "venv/lib/x.py", ".hidden.py")
    make(tmp_path, "big.json", content="1" * (source.MAX_FILE_BYTES + 1))
    make(tmp_path, "results/local/run/checkpoint_1/code/a.py")  # a checkpoint
    found = source.collect(tmp_path, leave_out=tmp_path / "results" / "local")
    assert sorted(found) == ["conf/asha.yaml", "lib/a/b.py", "model_def.py"]


def test_a_directory_too_large_is_cut_off_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(source, "MAX_ENTRIES", 3)
    make(tmp_path, *(f"{i}.py" for i in range(5)), "deep/x.py")
    assert "deep/x.py" not in source.collect(tmp_path)
    assert "more than a program's source" in caplog.text


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def taken(value: Any, snapshots: Snapshots | None = None) -> Any:
    copy, wait = (snapshots or Snapshots()).take(value)
    wait()
    return copy


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda flat: flat,
    "part": lambda flat: flat[3:9],
    "transposed": lambda flat: flat.view(4, 6).t(),
    "strided": lambda flat: flat[::5],
    "scalar": lambda flat: flat[7],
    "empty": lambda flat: flat[:0],
    "conjugated": lambda flat: flat.conj(),
}


class Scene:
    """A few pieces of memory, which tensors share."""

    def __init__(self) -> None:
        self.bases = [torch.arange(24, dtype=torch.int32).to(dtype) for dtype in DTYPES]

    def overwrite(self) -> None:
        for base in self.bases:
            base.copy_(torch.ones(24, dtype=base.dtype))


LEAVES = st.one_of(
    st.tuples(st.integers(0, len(DTYPES) - 1), st.sampled_from(sorted(VIEWS))),
    st.integers(),
    st.text(max_size=3),
    st.none(),
    st.just("array"),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4),
    max_leaves=12,
)


def built(tree: Any, scene: Scene) -> Any:
    match tree:
        case list():  # first: a list of a number and a text is no pair of a base and a view
            return [built(item, scene) for item in tree]
        case (int(base), str(view)):
            return VIEWS[view](scene.bases[base])
        case "array":
            return np.arange(3.0)
        case dict():
            return OrderedDict((key, built(item, scene)) for key, item in tree.items())
    return tree


@settings(max_examples=60, deadline=None)
@given(tree=TREES)
def test_a_copy_is_saved_to_the_same_bytes_whatever_happens_to_what_was_copied(tree: Any) -> None:
    scene = Scene()
    value = [built(tree, scene)]
    expected = saved(value)
    copy = taken(value)
    scene.overwrite()
    value.append("more")
    assert saved(copy) == expected


def test_memory_is_kept_from_one_copy_to_the_next() -> None:
    snapshots = Snapshots()

    def places(value: dict[str, torch.Tensor]) -> list[int]:
        return [tensor.data_ptr() for tensor in taken(value, snapshots).values()]

    state = {"a": torch.zeros(10_000), "b": torch.ones(10_000), "c": torch.ones(3)}
    first = places(state)
    assert len(set(first)) == 3
    assert set(places(state)) == set(first)
    # Another state is copied into what fits; what does not is let go.
    assert places({"c": torch.zeros(3), "d": torch.zeros(20_000)})[0] == first[2]
    kept = [buffer.nbytes for buffers in snapshots.buffers.values() for buffer in buffers]
    assert sorted(kept) == [12, 80_000]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All tensors seem to be on a GPU; the sizes of what is pinned for them."""
    sizes: list[int] = []

    class Event:
        def synchronize(self) -> None:
            pass

    def buffer(nbytes: int, pinned: bool) -> torch.Tensor:
        assert pinned
        sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(snapshot, "is_on_gpu", lambda storage: True)
    monkeypatch.setattr(snapshot, "recorded_event", lambda device: Event())
    monkeypatch.setattr(snapshot, "new_buffer", buffer)
    return sizes


def test_what_is_on_a_gpu_is_copied_into_little_pinned_memory_that_is_kept(pinned: list[int]) -> None:
    sizes = [600 * 2**i for i in range(8)] * 3
    state = {str(i): torch.full((size,), float(i)) for i, size in enumerate(sizes)}
    state |= {"row": state["7"][5:9], "empty": torch.empty(0), "none": torch.empty(0, dtype=torch.int8)}
    state |= {"last": torch.ones(2, 3).t()}
    snapshots = Snapshots()
    for value in (1.0, 2.0):
        state["7"].fill_(value)
        expected = saved(state)
        copy = taken(state, snapshots)
        state["7"].zero_()
        assert saved(copy) == expected
        assert copy["row"].untyped_storage().data_ptr() == copy["7"].data_ptr()
    # They have 1.8 MB. With a buffer for each, torch would pin 3.1 MB.
    assert sum(pinned) <= 2 << 20
    # A state that needs other buffers lets go of those that it has no use for.
    pinned.clear()
    taken({"a": torch.ones(20_000), "b": torch.ones(4_000)}, snapshots)
    assert pinned == [128 << 10]
    assert list(snapshots.buffers) == [(128 << 10, True)]


def test_memory_for_a_first_copy_is_pinned_while_training_continues(
    pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, gate, threads = snapshot.new_buffer, threading.Event(), []

    def slow(nbytes: int, pinned: bool) -> torch.Tensor:
        assert gate.wait(60)
        threads.append(threading.current_thread())
        return allocate(nbytes, pinned)

    monkeypatch.setattr(snapshot, "new_buffer", slow)
    monkeypatch.setattr(snapshot, "PINNED_BYTES", 64 << 10)
    state = {str(i): torch.full((5_000,), float(i)) for i in range(20)}
    snapshots = Snapshots()
    snapshots.reserve(state)  # returns although no memory can be had yet
    gate.set()
    expected = saved(state)
    assert saved(taken(state, snapshots)) == expected
    assert pinned == [64 << 10] * 6 + [32 << 10] * 2, "all of it, and none a second time for the copy"
    assert threading.main_thread() not in threads


def test_memory_that_can_not_be_had_is_an_error_of_the_copy(monkeypatch: pytest.MonkeyPatch, pinned: list[int]) -> None:
    def no_memory(nbytes: int, pinned: bool) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(snapshot, "new_buffer", no_memory)
    snapshots, state = Snapshots(), {"x": torch.zeros(3)}
    snapshots.reserve(state)
    with pytest.raises(RuntimeError, match="out of memory"):
        snapshots.take(state)
    for refused in (torch.eye(2).to_sparse(), lambda: 0):
        snapshots.reserve({"x": refused})


@given(st.lists(st.integers(0, 9) | st.integers(0, 100_000), min_size=1, max_size=40))
def test_copies_of_a_gpus_memory_do_not_overlap_and_waste_little(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "PINNED_BYTES", 1 << 16)
        buffers, places = snapshot.packed(sizes)
    assert all(buffer <= 2 * max(*sizes, 1 << 15) for buffer in buffers)
    ends = [0] * len(buffers)
    for (number, begin), size in sorted(zip(places, sizes, strict=True)):
        assert begin % snapshot.ALIGNMENT == 0
        assert begin >= ends[number]
        ends[number] = begin + max(size, 1)
    assert all(end <= buffer for end, buffer in zip(ends, buffers, strict=True))
    assert all(buffer.bit_count() == 1 for buffer in buffers)
    aligned = sum(-(-max(size, 1) // snapshot.ALIGNMENT) * snapshot.ALIGNMENT for size in sizes)
    assert sum(buffers) < 2 * aligned


class OwnState(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.zeros(2).as_subclass(OwnState)],
    ids=["sparse", "subclass"],
)
def test_what_is_no_plain_memory_is_left_to_torch(tensor: torch.Tensor) -> None:
    with pytest.raises(NotCopied):
        Snapshots().take({"x": [torch.zeros(2), tensor]})


@pytest.mark.gpu
def test_a_copy_of_what_is_on_a_gpu_is_made_before_what_it_computes_next() -> None:
    """Though nobody waits for the copy: the GPU does things in their order. Into the same pinned memory again."""
    weights = torch.ones(50_000_000, device="cuda")
    snapshots = Snapshots()
    places = set()
    for expected in (1.0, 3.0):
        state = {"on the GPU": weights, "row": weights[10:20], "steps": torch.tensor(7.0)}
        copy, wait = snapshots.take(state)
        weights.add_(2)
        state["steps"].zero_()
        wait()
        assert bool((copy["on the GPU"] == expected).all())
        assert copy["on the GPU"].device.type == "cpu"
        assert copy["on the GPU"].is_pinned()
        assert copy["row"].untyped_storage().data_ptr() == copy["on the GPU"].data_ptr()
        assert copy["steps"] == 7
        places.add(copy["on the GPU"].data_ptr())
    assert len(places) == 1
