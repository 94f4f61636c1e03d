"""Which records a process sees, in which order, from where on; samplers, rows and batches."""

from __future__ import annotations

import collections
import inspect
import itertools
import logging
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, ConcatDataset, SequentialSampler, Subset, TensorDataset, default_collate

from dray import pytorch
from dray.core import DistributedContext
from dray.pytorch import DataLoader, data_length, loaders, samplers
from dray.pytorch.batch_functions import ToDevice
from dray.pytorch.batches import SampledBatches, WorkerBatch
from dray.pytorch.data import rows
from dray.pytorch.trial_run import TrialRun
from dray.training.parallel.mesh import Division
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


BATCHES = [[0, 1], [2, 3], [4, 5], [6]]


def first(sampler: Any, count: int) -> list[Any]:
    return list(itertools.islice(sampler, count))


@pytest.mark.api("4.8")
def test_repeating_goes_on_for_ever_and_is_as_long_as_the_underlying() -> None:
    assert first(samplers.RepeatSampler([1, 2]), 5) == [1, 2, 1, 2, 1]
    assert first(samplers.RepeatBatchSampler(BATCHES), 6) == [*BATCHES, [0, 1], [2, 3]]
    assert len(samplers.RepeatSampler([1, 2])) == 2
    assert len(samplers.RepeatBatchSampler(BATCHES)) == 4


def test_repeating_nothing_ends() -> None:
    assert list(samplers.RepeatSampler([])) == []


@pytest.mark.api("4.8", "4.12")
def test_repeating_iterates_anew_so_that_a_shuffle_reshuffles() -> None:
    repeated = samplers.RepeatSampler(samplers.ReproducibleShuffleSampler(range(20), seed=1))
    both = first(repeated, 40)
    assert both[:20] != both[20:]


@pytest.mark.api("4.9", "4.10")
def test_shards_take_turns_and_are_exactly_long() -> None:
    for sampler in (samplers.DistributedSampler, samplers.DistributedBatchSampler):
        shards = [sampler(BATCHES, 3, rank) for rank in range(3)]
        assert [list(shard) for shard in shards] == [[[0, 1], [6]], [[2, 3]], [[4, 5]]]
        assert [len(shard) for shard in shards] == [2, 1, 1]


@pytest.mark.api("4.11")
def test_a_skip_is_done_once_and_does_not_shorten() -> None:
    for sampler, repeat in (
        (samplers.SkipSampler, samplers.RepeatSampler),
        (samplers.SkipBatchSampler, samplers.RepeatBatchSampler),
    ):
        skipped = sampler(repeat(BATCHES), 3)
        assert first(skipped, 3) == [[6], [0, 1], [2, 3]]
        assert len(skipped) == 4
        assert list(sampler(BATCHES, 9)) == []


@pytest.mark.api("4.12")
def test_a_reproducible_shuffle_depends_on_its_seed_alone() -> None:
    one, two = (samplers.ReproducibleShuffleSampler(range(10), seed=3) for _ in range(2))
    first_epoch, second_epoch = list(one), list(one)
    np.random.seed(0)
    assert [list(two), list(two)] == [first_epoch, second_epoch]
    assert sorted(first_epoch) == list(range(10))
    assert first_epoch != second_epoch
    expected = list(range(10))
    np.random.RandomState(3).shuffle(expected)
    assert first_epoch == expected


@pytest.mark.api("4.12")
def test_a_batch_shuffle_keeps_batches_together() -> None:
    shuffled = samplers.ReproducibleShuffleBatchSampler([[0, 1], [2, 3], [4, 5]], seed=3)
    assert sorted(shuffled) == [[0, 1], [2, 3], [4, 5]]
    assert len(shuffled) == 3
    assert all(isinstance(batch, list) for batch in shuffled)


X, Y = torch.randn(20, 3, 2), torch.arange(20)
WHOLE = TensorDataset(X, Y)


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * each for each in super().__getitem__(index))


@pytest.mark.parametrize(
    ("dataset", "records"),
    [
        (WHOLE, [3, 1, -1]),
        (TensorDataset(Y.double()), [19]),
        (TensorDataset(X > 0, X.to(torch.complex64)), [0, 0]),
        (Subset(WHOLE, range(5, 15)), [0, 9, 3]),
        (Subset(Subset(WHOLE, [7, 3, 5, 2]), [3, 0]), [1, 0, 1]),
        (TensorDataset(torch.empty(4, 0)), [2, 1]),
    ],
)
def test_rows_are_what_torch_collates(dataset: Any, records: list[int]) -> None:
    found = rows(dataset, records)
    expected = default_collate([dataset[record] for record in records])
    assert type(found) is type(expected) is list
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("dataset", "records"),
    [
        (Doubled(X, Y), [1]),
        (ConcatDataset([WHOLE, WHOLE]), [1]),
        (Subset(ConcatDataset([WHOLE]), [1]), [0]),
        (Subset(WHOLE, torch.tensor([1, 2])), [0]),  # type: ignore[arg-type]
        (TensorDataset(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)), [1]),
        (TensorDataset(Y.expand(2, 20)), [1]),
        (TensorDataset(torch.eye(3).to_sparse()), [1]),
        (TensorDataset(torch.nn.Parameter(X)), [1]),
        (WHOLE, [np.int64(1)]),
        (WHOLE, [True, False]),
        (WHOLE, []),
        (WHOLE, 3),
    ],
)
def test_what_might_differ_is_left_to_torch(dataset: Any, records: Any) -> None:
    assert rows(dataset, records) is None


def test_a_record_that_is_out_of_range_is_an_index_error_as_ever() -> None:
    with pytest.raises(IndexError):
        rows(WHOLE, [20])


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": 6, "drop_last": True}, {"collate_fn": len}])
def test_loaders_give_the_batches_of_torchs_loader_and_draw_as_many_random_numbers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(make: Callable[[], pytorch.DataLoader]) -> Any:
        torch.manual_seed(1)
        found = list(make().get_data_loader())
        return found, torch.rand(()).item()

    def make() -> pytorch.DataLoader:
        return pytorch.DataLoader(Subset(WHOLE, range(2, 19)), **{"batch_size": 4, **options})

    fast, drawn = batches(make)
    taken = []
    monkeypatch.setattr("dray.pytorch.data.rows", lambda *given: taken.append(given))
    slow, drawn_then = batches(make)
    assert bool(taken) == ("collate_fn" not in options)
    assert drawn == drawn_then
    assert [str(batch) for batch in fast] == [str(batch) for batch in slow]


class Counting:
    """A sampler that counts its draws, over some records in an order of its own."""

    def __init__(self, records: int) -> None:
        self.records = records
        self.draws = 0

    def __len__(self) -> int:
        return self.records

    def __iter__(self) -> Iterator[int]:
        for record in range(self.records):
            self.draws += 1
            yield record


class ByEpoch(Counting):
    """Its order is a matter of the epoch alone, as that of torch's DistributedSampler."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for record in super().__iter__():
            yield 100 * self.epoch + record


def loader_of(**kwargs: Any) -> DataLoader:
    made = DataLoader(range(10_000), collate_fn=list, **kwargs)
    made.seed = 5
    return made


def taken(made: DataLoader, count: int, **kwargs: Any) -> list[list[int]]:
    return list(itertools.islice(made.get_data_loader(repeat=True, **kwargs), count))


def test_a_sampler_with_set_epoch_is_not_drawn_from_for_skipped_epochs() -> None:
    whole = taken(loader_of(batch_size=4, sampler=ByEpoch(10)), 20)
    assert whole[3:5] == [[100, 101, 102, 103], [104, 105, 106, 107]]
    sampler = ByEpoch(10)
    assert taken(loader_of(batch_size=4, sampler=sampler), 6, skip=13) == whole[13:19]
    assert sampler.draws <= 10 + 6 * 4
    assert taken(loader_of(batch_size=4, sampler=ByEpoch(10)), 3, skip=4, num_replicas=2, rank=1) == whole[9:15:2]


def test_another_sampler_is_drawn_from_again() -> None:
    sampler = Counting(10)
    assert taken(loader_of(batch_size=4, sampler=sampler), 1, skip=13) == [[4, 5, 6, 7]]
    assert sampler.draws == 4 * 10 + 8


def test_a_sampler_that_is_a_sequence_is_not_walked() -> None:
    class Watched(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("walked")

    sampler = Watched(range(50, 60))
    expected = [[54, 55, 56, 57], [58, 59]]
    assert taken(loader_of(batch_size=4, sampler=sampler), 2, skip=3 * 10**12 + 1) == expected


@pytest.mark.slow
@given(
    kind=st.sampled_from(["drawn", "by epoch", "torch's", "batches"]),
    records=st.integers(1, 20),
    batch_size=st.integers(1, 5),
    drop_last=st.booleans(),
    replicas=st.integers(1, 3),
    skip=st.integers(0, 30),
)
def test_samplers_are_repeated_then_sharded_by_batches_then_skipped(
    kind: str, records: int, batch_size: int, drop_last: bool, replicas: int, skip: int
) -> None:
    """Against the rule in its plainest form, however the place is found."""

    def made() -> DataLoader:
        samplers = {
            "drawn": Counting,
            "by epoch": ByEpoch,
            "torch's": lambda n: torch.utils.data.RandomSampler(range(n)),
        }
        if kind == "batches":
            return loader_of(batch_sampler=torch.utils.data.BatchSampler(Counting(records), batch_size, drop_last))
        return loader_of(batch_size=batch_size, drop_last=drop_last, sampler=samplers[kind](records))

    whole = taken(made(), (skip + 4) * replicas)
    if records < batch_size and drop_last:
        assert whole == []
    for rank in range(replicas):
        assert taken(made(), 4, skip=skip, num_replicas=replicas, rank=rank) == whole[rank::replicas][skip:]


def test_what_a_sampler_draws_as_an_epoch_begins_is_a_matter_of_the_epoch() -> None:
    """With torch's samplers, and with one that shuffles by python's generator."""

    class Shuffling:
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(10), 10))

    torchs = torch.utils.data
    for sampler in (torchs.RandomSampler(range(10)), torchs.SubsetRandomSampler(range(10)), Shuffling()):
        torch.manual_seed(1)
        random.seed(1)
        whole = taken(loader_of(batch_size=4, sampler=sampler), 12)
        assert sorted(record for batch in whole[:3] for record in batch) == list(range(10))
        assert len({str(whole[epoch : epoch + 3]) for epoch in (0, 3, 6, 9)}) == 4
        undisturbed = (random.random(), torch.rand(()).item())
        torch.manual_seed(1)
        random.seed(1)
        assert (random.random(), torch.rand(()).item()) == undisturbed, "the model's numbers are left alone"
        assert taken(loader_of(batch_size=4, sampler=sampler), 5, skip=7) == whole[7:12]


def test_torchs_random_sampler_is_what_shuffle_is() -> None:
    sampler = torch.utils.data.RandomSampler(range(10_000))
    assert taken(loader_of(batch_size=4, sampler=sampler), 3) == taken(loader_of(batch_size=4, shuffle=True), 3)
    fewer = torch.utils.data.RandomSampler(range(10), num_samples=6)
    again = torch.utils.data.RandomSampler(range(3), replacement=True, num_samples=40)
    assert [len(batch) for batch in taken(loader_of(batch_size=4, sampler=fewer), 4)] == [4, 2, 4, 2]
    assert len(set(sum(taken(loader_of(batch_size=40, sampler=again), 1), []))) <= 3  # noqa: RUF017


def test_torchs_samplers_are_not_drawn_from_for_epochs_that_are_skipped() -> None:
    for sampler in (torch.utils.data.RandomSampler(range(10)), torch.utils.data.SubsetRandomSampler(range(10))):
        # A walk over so many epochs would take days.
        assert len(taken(loader_of(batch_size=4, sampler=sampler), 2, skip=3 * 10**9)) == 2
    mine = torch.utils.data.RandomSampler(range(10), generator=torch.Generator().manual_seed(1))
    whole = taken(loader_of(batch_size=4, sampler=mine), 9)
    mine.generator.manual_seed(1)
    assert taken(loader_of(batch_size=4, sampler=mine), 5, skip=4) == whole[4:], "one that keeps its own is"


@pytest.mark.parametrize("sampler", [[], [1, 2, 3]])
def test_a_sampler_without_a_whole_batch_ends_wherever_it_is_begun(sampler: list[int]) -> None:
    for skip in (0, 2):
        assert list(SampledBatches(sampler, batch_size=4, drop_last=True, repeat=True, first=skip)) == []


@pytest.mark.slow
@given(
    records=st.integers(1, 30),
    batch_size=st.integers(1, 5),
    drop_last=st.booleans(),
    own=st.booleans(),
    before=st.integers(1, 4),
    now=st.integers(1, 4),
    skip=st.integers(0, 40),
)
def test_a_step_has_the_same_records_when_resharded(
    records: int, batch_size: int, drop_last: bool, own: bool, before: int, now: int, skip: int
) -> None:
    """For any number of processes before and now, and for runs that began with whole shards or without."""
    arguments: dict[str, Any] = {"sampler": Counting(records)} if own else {"shuffle": True}
    # Another size than before: nothing but the division decides.
    made = DataLoader(range(records), 7, drop_last=drop_last, collate_fn=list, **arguments)
    made.seed = 5
    division = Division(replicas=before, batch_size=batch_size)
    then = DataLoader(range(records), batch_size, drop_last=drop_last, collate_fn=list, **arguments)
    then.seed = 5
    old = [taken(then, 6, skip=skip, num_replicas=before, rank=rank) for rank in range(before)]
    new = [
        made._resharded(division, skip=skip, num_replicas=now, rank=rank)  # noqa: SLF001 - no user calls it
        for rank in range(now)
    ]
    assert {len(share) for share in new} == {len(then.get_data_loader(num_replicas=before))}
    for parts, shares in zip(
        zip(*old, strict=True), zip(*(itertools.islice(n, 6) for n in new), strict=True), strict=True
    ):
        whole = [record for part in parts for record in part]
        assert all(shares), "no process is left without a record"
        if len(whole) >= now:
            assert [record for share in shares for record in share] == whole
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
        else:
            assert Counter(whole).keys() == Counter(record for share in shares for record in share).keys()


def test_batches_of_other_sizes_divide_differently() -> None:
    assert Division(replicas=2, batch_size=4).same_global_batch(Division(replicas=1, batch_size=8))
    assert not Division(replicas=2, batch_size=4).same_global_batch(Division(replicas=1, batch_size=4))
    assert not Division(replicas=2, batch_size=None).same_global_batch(Division(replicas=1, batch_size=None))


def test_a_seeded_batch_seeds_no_process_that_loads_for_itself() -> None:
    before = (random.getstate(), torch.get_rng_state())
    assert pickle.loads(pickle.dumps(WorkerBatch([3, 1], 7))) == [3, 1]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


class Augmenting(torch.utils.data.Dataset[tuple[int, float, float, float]]):
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


@pytest.mark.slow
@pytest.mark.api("9.8")
@pytest.mark.parametrize("own", [False, True])
def test_augmentation_in_worker_processes_resumes_with_the_same_random_numbers(own: bool) -> None:
    """From wherever the loader_of begins, and whatever the number of worker processes."""

    def made(num_workers: int) -> DataLoader:
        order: dict[str, Any] = {"sampler": Counting(11)} if own else {"shuffle": True}
        found = DataLoader(Augmenting(), batch_size=4, num_workers=num_workers, **order)
        found.seed = 3
        return found

    def rows(num_workers: int, count: int, skip: int) -> list[list[list[float]]]:
        share = made(num_workers).get_data_loader(repeat=True, skip=skip, num_replicas=2, rank=1)
        return [[column.tolist() for column in batch] for batch in itertools.islice(share, count)]

    whole = rows(2, 7, 0)
    assert rows(2, 4, 3) == rows(1, 4, 3) == whole[3:]
    drawn = [number for batch in whole for column in batch[1:] for number in column]
    assert len(set(drawn)) == len(drawn), "no two batches, records or generators draw the same"


@pytest.mark.slow
def test_validations_augment_alike() -> None:
    made = DataLoader(Augmenting(), batch_size=4, num_workers=1)
    made.seed = 3
    share = made.get_data_loader()
    first, second = ([[c.tolist() for c in batch] for batch in share] for _ in range(2))
    assert first == second


@pytest.mark.api("4.1")
def test_the_loader_takes_what_torchs_takes_with_its_defaults() -> None:
    def parameters(loader_of: type) -> dict[str, tuple[Any, bool]]:
        signature = inspect.signature(loader_of)
        return {p.name: (p.default, p.kind is p.KEYWORD_ONLY) for p in signature.parameters.values()}

    ours, torchs = parameters(DataLoader), parameters(torch.utils.data.DataLoader)
    # Younger than Determined; where each is, no default differs.
    torchs = {name: value for name, value in torchs.items() if name in ours}
    assert list(ours) == list(torchs)
    different = {name for name in ours if ours[name][0] != torchs[name][0]}
    assert different == {"shuffle"}, "torch's None is False"
    assert ours["shuffle"][0] is False
    assert {name for name, (_, keyword_only) in ours.items() if keyword_only} == {
        "prefetch_factor",
        "persistent_workers",
    }


@pytest.mark.api("4.1")
def test_arguments_reach_torchs_loader() -> None:
    def started(worker: int) -> None:
        """Initialises a worker process."""

    arguments = {
        "num_workers": 2,
        "collate_fn": list,
        "pin_memory": True,
        "timeout": 3.0,
        "worker_init_fn": started,
        "prefetch_factor": 5,
        "persistent_workers": True,
    }
    made = DataLoader(range(7), 2, multiprocessing_context="spawn", drop_last=True, **arguments)  # type: ignore[arg-type]
    made.seed = 1
    torchs = made.get_data_loader()
    assert {name: getattr(torchs, name) for name in arguments} == arguments
    assert torchs.multiprocessing_context.get_start_method() == "spawn"
    assert len(torchs) == 3
