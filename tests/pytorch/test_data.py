"""Which records a process sees, in which order, from where on."""

from __future__ import annotations

import collections
import itertools
import logging
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from dray.core import DistributedContext
from dray.pytorch import DataLoader, data_length, loaders, samplers
from dray.pytorch.batch_functions import ToDevice
from dray.pytorch.trial_run import TrialRun
from tests.core.test_distributed import nodes
from tests.pytorch.fakes import FakeHost


def loader(records: int = 10, **kwargs: Any) -> DataLoader:
    made = DataLoader(range(records), collate_fn=list, **kwargs)
    made.seed = 5
    return made


def batches(made: DataLoader, count: int, **kwargs: Any) -> list[list[int]]:
    return list(itertools.islice(made.get_data_loader(**kwargs), count))


class Shards(BatchSampler):
    """Divides as the samplers of accelerate and transformers do, which have no common base."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, 2, 0

    def __len__(self) -> int:
        return len(self.batch_sampler) // 2


def divided(sampler: Any = None, batch_sampler: Any = None) -> DataLoader:
    return loader(8, sampler=sampler, batch_sampler=batch_sampler)


def torchs(replicas: int) -> Any:
    return torch.utils.data.distributed.DistributedSampler(range(8), num_replicas=replicas, rank=0)  # type: ignore[arg-type]


def run_of(size: int) -> TrialRun:
    peers = DistributedContext(**nodes(size)[0], transport=SimpleNamespace())  # type: ignore[arg-type]
    return TrialRun(host=FakeHost(Path()), peers=peers, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "twice",
    [
        divided(torchs(2)),
        divided(samplers.RepeatSampler(torchs(2))),
        divided(samplers.DistributedSampler(range(8), 2, 0)),
        divided(batch_sampler=BatchSampler(torchs(2), 2, drop_last=False)),
        divided(batch_sampler=Shards(BatchSampler(range(8), 2, drop_last=False))),
    ],
    ids=["torch's", "wrapped", "ours", "in batches", "of batches"],
)
def test_a_sampler_that_divides_the_data_is_an_error_with_several_ranks(twice: DataLoader) -> None:
    loaders.training_data(twice, run_of(1), None)
    for build in (
        lambda run: loaders.training_data(twice, run, None),
        lambda run: loaders.validation_data(twice, run, full_dataset=True),
    ):
        with pytest.raises(ValueError, match=r"leave the sampler out \(shuffle=True shuffles\)"):
            build(run_of(2))


def test_a_sampler_of_one_replica_divides_nothing() -> None:
    assert len(loaders.training_data(divided(torchs(1)), run_of(2), None).batches) == 4


@pytest.mark.api("4.3")
def test_one_pass_is_torchs() -> None:
    for drop_last in (False, True):
        ours = loader(batch_size=4, drop_last=drop_last)
        torchs = torch.utils.data.DataLoader(range(10), batch_size=4, drop_last=drop_last, collate_fn=list)  # type: ignore[arg-type]
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)


@pytest.mark.api("4.5")
def test_repeating_keeps_the_partial_batch_of_each_epoch() -> None:
    assert batches(loader(5, batch_size=2), 5, repeat=True) == [[0, 1], [2, 3], [4], [0, 1], [2, 3]]


@pytest.mark.api("4.4")
@given(
    records=st.integers(1, 30),
    batch_size=st.integers(1, 7),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    replicas=st.integers(1, 4),
    skip=st.integers(0, 60),
    repeat=st.booleans(),
    own=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_data_are_repeated_then_sharded_by_batches_then_skipped(
    records: int, batch_size: int, drop_last: bool, shuffle: bool, replicas: int, skip: int, repeat: bool, own: bool
) -> None:
    """Against the rule in its plainest form, with our own order and with a sampler of the user's."""
    if own:
        made = loader(records, batch_size=batch_size, drop_last=drop_last, sampler=list(range(records)))
    else:
        made = loader(records, batch_size=batch_size, drop_last=drop_last, shuffle=shuffle)
    whole = batches(made, 200, repeat=repeat) if len(made) else []
    for rank in range(replicas):
        expected = whole[rank::replicas][skip : skip + 5]
        assert batches(made, 5, repeat=repeat, skip=skip, num_replicas=replicas, rank=rank)[: len(expected)] == expected
        share = made.get_data_loader(repeat=repeat, skip=skip, num_replicas=replicas, rank=rank)
        assert len(share) == len(range(rank, len(made), replicas))


@pytest.mark.api("4.7")
def test_each_epoch_is_another_permutation() -> None:
    made = loader(6, batch_size=2, shuffle=True)
    found = batches(made, 9, repeat=True)
    epochs = [sum(found[i : i + 3], []) for i in (0, 3, 6)]  # noqa: RUF017
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert batches(made, 9, repeat=True) == found
    made.seed = 6
    assert batches(made, 9, repeat=True) != found


def test_a_generator_seeds_the_order_in_place_of_the_trial() -> None:
    def order(seed: int, trial: int) -> list[list[int]]:
        made = loader(9, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(seed))
        made.seed = trial
        return batches(made, 3)

    assert order(1, 2) == order(1, 3) != order(2, 2)


def test_outside_of_training_shuffling_follows_torchs_seed() -> None:
    made = loader(20, batch_size=20, shuffle=True)
    made.seed = None
    torch.manual_seed(1)
    first, second = list(made), list(made)
    torch.manual_seed(1)
    assert list(made) == first != second


def test_outside_of_training_each_pass_continues_its_generator() -> None:
    def passes(seed: int, count: int) -> list[list[int]]:
        made = loader(9, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(seed))
        made.seed = None
        return [list(itertools.chain(*made)) for _ in range(count)]

    first, second, third = passes(7, 3)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(9))
    assert first != second != third != first
    assert passes(7, 3) == [first, second, third]
    assert passes(8, 1) != [first]

    before = torch.get_rng_state()
    passes(7, 2)
    assert torch.equal(torch.get_rng_state(), before)  # only the generator is drawn from


def test_loading_leaves_the_models_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    batches(loader(20, batch_size=2, shuffle=True), 15, repeat=True)
    assert torch.rand(()) == expected


def test_what_is_skipped_is_not_walked_over() -> None:
    """A walk over so many batches would take days."""
    [[*found]] = batches(loader(1000, batch_size=10, shuffle=True), 1, repeat=True, skip=10**12)
    assert len(found) == 10


@pytest.mark.slow
def test_worker_processes_load_the_same_batches() -> None:
    made = DataLoader(range(10), batch_size=4, shuffle=True, num_workers=2)
    made.seed = 3
    alone = DataLoader(range(10), batch_size=4, shuffle=True)
    alone.seed = 3
    share = made.get_data_loader(repeat=True, skip=1)
    found = [batch.tolist() for batch in itertools.islice(share, 4)]
    assert found == [batch.tolist() for batch in itertools.islice(alone.get_data_loader(repeat=True, skip=1), 4)]


def test_a_batch_sampler_is_used_as_it_is() -> None:
    made = loader(5, batch_sampler=BatchSampler(SequentialSampler(range(5)), 3, False))
    assert batches(made, 3, repeat=True, skip=1) == [[3, 4], [0, 1, 2], [3, 4]]


def test_ranks_with_random_numbers_of_their_own_still_share_one_pass() -> None:
    """As in a validation of unseeded processes under torchrun."""
    made = loader(12, batch_size=2, sampler=torch.utils.data.SubsetRandomSampler(range(12)))
    shares = []
    for rank in (0, 1, 2):
        torch.manual_seed(rank)
        shares.append(list(made.get_data_loader(num_replicas=3, rank=rank)))
    assert sorted(itertools.chain(*itertools.chain(*shares))) == list(range(12))


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank"):
        loader(batch_size=2).get_data_loader(num_replicas=2, rank=2)


@pytest.mark.api("1.10")
@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (torch.zeros(3), 3),
        (np.zeros((4, 2)), 4),
        ({"a": torch.zeros(5), "b": torch.zeros(6)}, 5),
        ([torch.zeros(2), 1], 2),
        (({"x": [np.zeros(7)]},), 7),
        (["a", "b", torch.zeros(2)], 2),
        ({"mask": None, "n": 3, "empty": [], "count": torch.tensor(3), "x": (torch.zeros(3),)}, 3),
        (collections.UserDict(ids=torch.zeros(4, 9)), 4),  # as a tokeniser's
    ],
)
def test_a_batch_is_as_long_as_its_first_leaf(batch: Any, length: int) -> None:
    assert data_length(batch) == length


@pytest.mark.api("2.14")
def test_what_moves_as_a_whole_is_not_taken_apart_though_it_is_a_tuple() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    # Lengths stay on the CPU, whatever the device is: the class knows that, its fields do not.
    moved = ToDevice(torch.device("meta"))({"text": packed})["text"]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


class Attributes(dict[str, Any]):
    """A batch that is read as `batch.x`."""

    __getattr__ = dict.get


class Encoding(collections.UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: moves its own tensors, in place, and has more than its items."""

    calls: ClassVar[list[bool]] = []

    def __init__(self, data: dict[str, Any], encodings: str = "") -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        self.calls.append(non_blocking)
        self.data = {
            key: item.to(device, non_blocking=non_blocking) if isinstance(item, torch.Tensor) else item
            for key, item in self.data.items()
        }
        return self


def test_a_mapping_that_moves_itself_keeps_its_type_and_the_loaders_copy_stays() -> None:
    data = {"ids": torch.ones(2, 3), "labels": np.ones(2), "images": [torch.ones(2)], "more": {"x": torch.ones(2)}}
    batch = Encoding(data, "of the tokeniser")
    moved = ToDevice(torch.device("meta"))([batch, {"inner": batch}])
    for each in (moved[0], moved[1]["inner"]):
        assert (type(each), each.encodings, list(each)) == (Encoding, "of the tokeniser", list(data))
        found = [each["ids"], each["labels"], each["images"][0], each["more"]["x"]]
        assert [tensor.device.type for tensor in found] == ["meta"] * 4
    assert Encoding.calls == [True, True], "asked not to wait"
    assert batch.data == data
    assert data_length(batch) == 2


def test_any_mapping_is_moved_by_its_items() -> None:
    x, move = torch.ones(2), ToDevice(torch.device("meta"))
    user, frozen, chained = collections.UserDict(x=x), MappingProxyType({"x": x}), collections.ChainMap({"x": x})
    for batch in (user, frozen, chained):
        moved = move(batch)
        assert (type(moved), moved["x"].device.type) == (type(batch), "meta")
        assert batch["x"] is x


class Named(NamedTuple):
    name: str
    x: Any


@pytest.mark.api("2.14")
def test_a_dict_and_a_named_tuple_keep_their_type() -> None:
    x, move = np.ones(2), ToDevice(torch.device("cpu"), {str, type(None)})
    attributes = Attributes(x=x)
    moved = move(attributes)
    # Python 3.10 can't copy a dict with such a __getattr__.
    kept = Attributes if sys.version_info >= (3, 11) else dict
    assert (type(moved), type(moved["x"]), attributes.x is x) == (kept, torch.Tensor, True)
    ordered = move(collections.OrderedDict(b=x, a=x))
    assert (list(ordered), ordered.popitem(last=False)[0]) == (["b", "a"], "b")
    assert move(collections.defaultdict(list, x=x))["missing"] == []
    named = move([Named("a", x)])[0]
    assert (type(named), type(named.x)) == (Named, torch.Tensor)


@pytest.mark.api("2.14")
def test_batches_are_moved_leaf_by_leaf(caplog: pytest.LogCaptureFixture) -> None:
    class Movable:
        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    move = ToDevice(torch.device("cpu"))
    odd = object()
    batch = {
        "a": [np.ones(2, dtype=np.int32), torch.ones(1)],
        "b": (Movable(), "text", np.array(["x"])),
        "c": "more",
        "d": (None, 3, 0.5, True, b"x", np.float32(1), odd),
    }
    with caplog.at_level(logging.WARNING):
        moved = move(batch)
        move(batch)
    assert torch.equal(moved["a"][0], torch.ones(2, dtype=torch.int32))
    assert isinstance(moved["b"], tuple)
    assert moved["b"][0] == "moved to cpu"
    assert (moved["b"][1], moved["c"]) == ("text", "more")
    assert isinstance(moved["b"][2], np.ndarray)
    assert moved["d"] == batch["d"]
    # Text, numbers and None are at home in a batch.
    assert [record.args[0] for record in caplog.records if record.args] == ["object"], "one warning a type"
