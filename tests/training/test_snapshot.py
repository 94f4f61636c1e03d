"""Copies of state: exact, apart from what is copied, and in memory that is kept."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dray.training.checkpoint import snapshot
from dray.training.checkpoint.snapshot import NotCopied, Snapshots

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


@given(st.lists(st.integers(0, 9) | st.integers(0, 100_000), min_size=1, max_size=40))
def test_copies_of_a_gpus_memory_do_not_overlap_and_waste_little(sizes: list[int]) -> None:
    buffers, places = snapshot.packed(sizes)
    ends = [0] * len(buffers)
    for (number, begin), size in sorted(zip(places, sizes, strict=True)):
        assert begin % snapshot.ALIGNMENT == 0
        assert begin >= ends[number]
        ends[number] = begin + max(size, 1)
    assert all(end <= buffer for end, buffer in zip(ends, buffers, strict=True))
    assert all(buffer.bit_count() == 1 for buffer in buffers)
    aligned = sum(-(-max(size, 1) // snapshot.ALIGNMENT) * snapshot.ALIGNMENT for size in sizes)
    assert sum(buffers) < 2 * aligned


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.zeros(2).as_subclass(Own)],
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
