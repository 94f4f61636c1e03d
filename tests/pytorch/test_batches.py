"""Batches begun anywhere: what is drawn to get there, how they are divided anew, what seeds worker processes."""

from __future__ import annotations

import inspect
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dray.pytorch import DataLoader
from dray.pytorch.batches import SampledBatches, WorkerBatch
from dray.training.parallel.mesh import Division


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


def loader(**kwargs: Any) -> DataLoader:
    made = DataLoader(range(10_000), collate_fn=list, **kwargs)
    made.seed = 5
    return made


def taken(made: DataLoader, count: int, **kwargs: Any) -> list[list[int]]:
    return list(itertools.islice(made.get_data_loader(repeat=True, **kwargs), count))


def test_a_sampler_with_set_epoch_is_not_drawn_from_for_skipped_epochs() -> None:
    whole = taken(loader(batch_size=4, sampler=ByEpoch(10)), 20)
    assert whole[3:5] == [[100, 101, 102, 103], [104, 105, 106, 107]]
    sampler = ByEpoch(10)
    assert taken(loader(batch_size=4, sampler=sampler), 6, skip=13) == whole[13:19]
    assert sampler.draws <= 10 + 6 * 4
    assert taken(loader(batch_size=4, sampler=ByEpoch(10)), 3, skip=4, num_replicas=2, rank=1) == whole[9:15:2]


def test_another_sampler_is_drawn_from_again() -> None:
    sampler = Counting(10)
    assert taken(loader(batch_size=4, sampler=sampler), 1, skip=13) == [[4, 5, 6, 7]]
    assert sampler.draws == 4 * 10 + 8


def test_a_sampler_that_is_a_sequence_is_not_walked() -> None:
    class Watched(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("walked")

    sampler = Watched(range(50, 60))
    expected = [[54, 55, 56, 57], [58, 59]]
    assert taken(loader(batch_size=4, sampler=sampler), 2, skip=3 * 10**12 + 1) == expected


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
            return loader(batch_sampler=torch.utils.data.BatchSampler(Counting(records), batch_size, drop_last))
        return loader(batch_size=batch_size, drop_last=drop_last, sampler=samplers[kind](records))

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
        whole = taken(loader(batch_size=4, sampler=sampler), 12)
        assert sorted(record for batch in whole[:3] for record in batch) == list(range(10))
        assert len({str(whole[epoch : epoch + 3]) for epoch in (0, 3, 6, 9)}) == 4
        undisturbed = (random.random(), torch.rand(()).item())
        torch.manual_seed(1)
        random.seed(1)
        assert (random.random(), torch.rand(()).item()) == undisturbed, "the model's numbers are left alone"
        assert taken(loader(batch_size=4, sampler=sampler), 5, skip=7) == whole[7:12]


def test_torchs_random_sampler_is_what_shuffle_is() -> None:
    sampler = torch.utils.data.RandomSampler(range(10_000))
    assert taken(loader(batch_size=4, sampler=sampler), 3) == taken(loader(batch_size=4, shuffle=True), 3)
    fewer = torch.utils.data.RandomSampler(range(10), num_samples=6)
    again = torch.utils.data.RandomSampler(range(3), replacement=True, num_samples=40)
    assert [len(batch) for batch in taken(loader(batch_size=4, sampler=fewer), 4)] == [4, 2, 4, 2]
    assert len(set(sum(taken(loader(batch_size=40, sampler=again), 1), []))) <= 3  # noqa: RUF017


def test_torchs_samplers_are_not_drawn_from_for_epochs_that_are_skipped() -> None:
    for sampler in (torch.utils.data.RandomSampler(range(10)), torch.utils.data.SubsetRandomSampler(range(10))):
        # A walk over so many epochs would take days.
        assert len(taken(loader(batch_size=4, sampler=sampler), 2, skip=3 * 10**9)) == 2
    mine = torch.utils.data.RandomSampler(range(10), generator=torch.Generator().manual_seed(1))
    whole = taken(loader(batch_size=4, sampler=mine), 9)
    mine.generator.manual_seed(1)
    assert taken(loader(batch_size=4, sampler=mine), 5, skip=4) == whole[4:], "one that keeps its own is"


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
    """From wherever the loader begins, and whatever the number of worker processes."""

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
    def parameters(loader: type) -> dict[str, tuple[Any, bool]]:
        signature = inspect.signature(loader)
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
