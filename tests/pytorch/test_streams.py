"""Training data from loaders that keep their own position: streams of torchdata and Hugging Face, and any other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.core import DistributedContext
from dray.pytorch import Batch, Epoch
from dray.pytorch.streams import Stream
from dray.training import rng
from dray.training.checkpoint.plain_state import UnsavableState
from tests.forks.process import ROOT, run_script
from tests.pytorch import resuming
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FakeHost, OneWeight, trial
from tests.pytorch.resuming import Counted, Numbered

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

RECORDS = 21
KILLED = Path(__file__).with_name("killed_stream.py")


class Own:
    """A loader of nobody's: ones, in passes of some batches, and a position."""

    def __init__(self, batches: int = 3, length: int | None = None, **state: Any) -> None:
        self.batches, self.length, self.state = batches, length, state
        self.start = self.done = 0
        self.calls: list[tuple[str, int]] = []
        self.draws: list[float] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.calls.append(("pass", self.start))
        self.draws.append(random.random())
        self.done, self.start = self.start, 0
        return self._rest()

    def _rest(self) -> Iterator[torch.Tensor]:
        while self.done < self.batches:
            self.done += 1
            yield torch.ones(2, 1)

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, **self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["done"]


class Sized(Own):
    def __len__(self) -> int:
        return self.batches if self.length is None else self.length


def reading(loader: Any, **methods: Any) -> type[Any]:
    """A trial that trains on this loader."""
    return trial(build_training_data_loader=lambda self: loader, **methods)


def test_passes_follow_one_another_and_learn_their_number(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    loader = Own()
    fit(reading(loader), max_length=Batch(7), checkpoint_period=Batch(1))
    assert loader.calls == [("epoch", 0), ("pass", 0), ("epoch", 1), ("pass", 0), ("epoch", 2), ("pass", 0)]
    resumed = Own()
    again = FakeHost(tmp_path / "again")
    fit(reading(resumed), again, max_length=Batch(7), latest_checkpoint=host.checkpoints()[4])
    assert resumed.calls == [("epoch", 1), ("pass", 2), ("epoch", 2), ("pass", 0)]
    assert resumed.draws == loader.draws[1:]
    assert len(set(loader.draws)) == 3


def test_a_position_that_was_loaded_is_saved_again_before_a_batch_is_drawn() -> None:
    def stream(begin: int) -> Stream:
        made = Stream(Own(), begin=begin, seed=1, peers=DistributedContext(), device=torch.device("cpu"))
        made.agree()
        return made

    first, resumed = stream(0), stream(2)
    next(first), next(first)
    resumed.load_state_dict(first.state_dict(2))
    assert resumed.state_dict(2) == first.state_dict(2)
    assert first.state_dict(2)["loader"] == {"done": 2}


def test_only_a_fork_that_continues_takes_the_position(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    """A trial that starts from another's weights starts its data at the beginning."""
    fit(reading(Own()), max_length=Batch(5))
    [checkpoint] = host.checkpoints()
    loader, fork, started = Own(), FakeHost(tmp_path / "fork"), FakeHost(tmp_path / "started")
    fork.is_changed_fork = True
    fit(reading(loader), fork, max_length=Batch(6), latest_checkpoint=checkpoint)
    assert loader.calls == [("epoch", 1), ("pass", 2)]
    started.source_checkpoint = checkpoint
    loader = Own()
    fit(reading(loader), started, max_length=Batch(2))
    assert loader.calls == [("epoch", 0), ("pass", 0)]


def test_epochs_have_the_loaders_length(fit: Fit) -> None:
    made = fit(reading(Sized()), max_length=Epoch(2))
    assert [epoch for epoch, _ in made.seen] == [0, 0, 0, 1, 1, 1]


def test_epochs_may_be_shorter_than_a_pass(fit: Fit) -> None:
    loader = Own(5)
    exp_conf = {"records_per_epoch": 4}
    made = fit(reading(loader), init={"exp_conf": exp_conf, "hparams": {"global_batch_size": 2}}, max_length=Epoch(3))
    assert [epoch for epoch, _ in made.seen] == [0, 0, 1, 1, 2, 2]
    assert [call for call in loader.calls if call[0] == "epoch"] == [("epoch", 0), ("epoch", 1)]


@pytest.mark.parametrize(
    ("length", "passes", "words"),
    [(4, 4, "ended after 3 batches, but has a length of 4"), (2, 3, "more batches than its length, 2")],
)
def test_a_wrong_length_is_warned_of(
    fit: Fit, caplog: pytest.LogCaptureFixture, length: int, passes: int, words: str
) -> None:
    loader = Sized(3, length)
    made = fit(reading(loader), max_length=Epoch(3))
    assert len(made.seen) == 3 * length
    assert loader.calls[1::2] == passes * [("pass", 0)]
    assert sum(words in message for message in caplog.messages) == 1


def test_a_batch_that_was_left_is_trained_again(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    """The loader has given it, so that its own state is one batch too far."""
    seen: list[list[int]] = []

    class Leaving(resuming.Streaming):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 5 and self.context.get_initial_batch() == 0:
                raise pytorch.ShouldExit
            seen.append(batch[0].tolist())
            return super().train_batch(batch, epoch_idx, batch_idx)

    hparams = {"hparams": {"global_batch_size": 8}}
    fit(Leaving, init=hparams, max_length=Batch(8), checkpoint_period=Batch(2), checkpoint_policy="none")
    again = FakeHost(tmp_path / "again")
    fit(Leaving, again, init=hparams, max_length=Batch(8), latest_checkpoint=host.checkpoints()[-1])
    epoch = [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert seen == (3 * epoch)[:8]


@pytest.mark.parametrize(("size", "cut"), [(4, 4), (16, 5)])
def test_another_batch_size_continues_with_the_next_record(
    fit: Fit, host: FakeHost, tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, cut: int
) -> None:
    """Also in a second run of the same pass, whose number of batches is no longer the loader's length."""

    class Sized(resuming.Streaming):
        data = resuming.SizedCounted

    def init(size: int) -> dict[str, Any]:
        return {"hparams": {"global_batch_size": size}}

    fit(Sized, init=init(8), max_length=Batch(cut))
    seen, latest = [], host.checkpoints()[-1]
    for length in (cut + 1, cut + 5):
        again = FakeHost(tmp_path / str(length))
        made = fit(Sized, again, init=init(size), max_length=Batch(length), latest_checkpoint=latest)
        seen += [records for _, _, records in made.seen]
        latest = again.checkpoints()[-1]
    starts = [*range(cut % 3 * 8, 20, size), *3 * list(range(0, 20, size))]
    assert seen == [list(range(start, min(start + size, 20))) for start in starts[:5]]
    assert not any("length" in message for message in caplog.messages)


def test_a_checkpoint_without_a_position_is_warned_of(
    fit: Fit, host: FakeHost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(OneWeight, max_length=Batch(2))
    loader = Own()
    fit(reading(loader), FakeHost(tmp_path / "b"), max_length=Batch(3), latest_checkpoint=host.checkpoints()[-1])
    assert loader.calls == [("epoch", 0), ("pass", 0)]
    assert any("no position of this training loader" in message for message in caplog.messages)


def test_a_stream_is_validated_too(fit: Fit, host: FakeHost) -> None:
    class Ones(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(5, 1))

    streams = {"build_validation_data_loader": lambda self: pytorch.DataLoader(Ones(), batch_size=2)}
    made = fit(reading(pytorch.DataLoader(Ones(), batch_size=2), **streams), max_length=Batch(4))
    assert host.reports[-1].validation == {"validation_loss": pytest.approx((made.weight - 1) ** 2)}


def test_a_stream_outside_of_training() -> None:
    loader = pytorch.DataLoader(Counted(5), batch_size=2)
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    shares = [loader.get_data_loader(num_replicas=2, rank=rank) for rank in range(2)]
    assert [[batch[0].tolist() for batch in share] for share in shares] == [[[0, 2], [4]], [[1, 3]]]
    with pytest.raises(TypeError):
        len(loader)


class Late(Own):
    """Looks at its state as late as Hugging Face's streams do."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from super().__iter__() if self.start == 0 else iter(self.start["done"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state


def resumed_with(loader: Any) -> Callable[[Fit, FakeHost], Any]:
    def do(fit: Fit, host: FakeHost) -> None:
        plain = stateful_dataloader.StatefulDataLoader
        ones = torch.ones(8, 1)
        fit(reading(plain(ones, batch_size=2)), max_length=Batch(3))
        fit(reading(loader(plain, ones)), max_length=Batch(5), latest_checkpoint=host.checkpoints()[-1])

    return do


def trained_on(loader: Any) -> Callable[[Fit, FakeHost], Any]:
    return lambda fit, host: fit(reading(loader), max_length=Batch(3))


class Drawn(torch.utils.data.IterableDataset[Any]):
    """Without state. Draws its order from the process's random numbers when it is asked for the first record."""

    def __iter__(self) -> Iterator[Any]:
        for index in random.sample(range(resuming.RECORDS), resuming.RECORDS):
            yield Numbered()[index]


class Lazy(stateful_dataloader.StatefulDataLoader[Any]):
    """Begins a pass when it is asked for the first batch, as MosaicML's loader does."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Indivisible(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


#: What is done wrong, the kind of error, and its words.
ERRORS: dict[str, tuple[Callable[[Fit, FakeHost], Any], type[Exception], str]] = {
    "state that is not data": (
        trained_on(Own(inner={"order": [random.Random(1)]})),
        UnsavableState,
        r"training loader' at \['inner'\]\['order'\]\[0\] is of type random\.Random",
    ),
    "no data": (trained_on(Own(0)), RuntimeError, "training data is empty"),
    "no data by its length": (trained_on(Sized(0)), RuntimeError, "training data is empty"),
    "another number of workers": (
        resumed_with(lambda plain, ones: plain(ones, batch_size=2, num_workers=2)),
        ValueError,
        "can't continue from its state in the checkpoint.*same loader, data set and number of workers",
    ),
    "a state that the first record refuses": (
        resumed_with(lambda plain, ones: Late()),
        ValueError,
        r"can't continue from its state in the checkpoint: KeyError\('done'\)",
    ),
    "a data set without a length": (
        lambda fit, host: pytorch.DataLoader(iter(range(3))),
        TypeError,
        "needs a dataset with __len__ and __getitem__, or an instance of torch's IterableDataset",
    ),
    "a set that can't be divided": (
        lambda fit, host: pytorch.DataLoader(Indivisible()).get_data_loader(num_replicas=2, rank=0),
        ValueError,
        r"2 slots can't share Indivisible.*shard\(num_shards, index\)",
    ),
    "skipped outside of training": (
        lambda fit, host: pytorch.DataLoader(Indivisible()).get_data_loader(skip=1),
        ValueError,
        "can't be repeated or skipped",
    ),
    "a sampler": (
        lambda fit, host: pytorch.DataLoader(Indivisible(), sampler=[0]),
        ValueError,
        "leave out shuffle, sampler and batch_sampler",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(fit: Fit, host: FakeHost, case: str) -> None:
    do, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        do(fit, host)
    assert all(report.batches <= 3 for report in host.reports)


def test_torchdata_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'dray-train\[data\]'"):
        pytorch.DataLoader(Indivisible())


# ------------------------------------------------------------------------------------------------- bit for bit
def parquet(directory: Path) -> list[str]:
    """Three files of Parquet with all records."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        records = [Numbered(RECORDS)[index] for index in range(number * 7, number * 7 + 7)]
        columns = {
            "record": [index for index, _, _ in records],
            "x": [x.tolist() for _, x, _ in records],
            "y": [y.tolist() for _, _, y in records],
        }
        pq.write_table(pa.table(columns), directory / f"{number}.parquet", row_group_size=3)
    return [str(directory / f"{number}.parquet") for number in range(3)]


def hugging_face(files: list[str], *, shuffle: bool = False) -> Any:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True).with_format("torch")
    # Of several files at a time, datasets 5.2 waits five seconds for a thread at the end of each pass.
    return data.shuffle(seed=3, buffer_size=6, max_buffer_input_shards=1) if shuffle else data


#: The training loader by kind, from the batch size and the files.
LOADERS: dict[str, Callable[[int, list[str]], Any]] = {
    "iterable, 2 workers": lambda size, files: pytorch.DataLoader(Counted(), size, num_workers=2),
    "stateful loader, 2 workers": lambda size, files: stateful_dataloader.StatefulDataLoader(
        Numbered(), size, shuffle=True, num_workers=2
    ),
    "stateful loader, generator": lambda size, files: stateful_dataloader.StatefulDataLoader(
        Numbered(), size, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
    "stateful loader, persistent workers": lambda size, files: stateful_dataloader.StatefulDataLoader(
        Counted(), size, num_workers=2, persistent_workers=True, snapshot_every_n_steps=3
    ),
    "Hugging Face": lambda size, files: pytorch.DataLoader(hugging_face(files), size),
    "Hugging Face, 2 workers": lambda size, files: pytorch.DataLoader(
        hugging_face(files), size, num_workers=2, multiprocessing_context="forkserver"
    ),
    "Hugging Face, shuffled": lambda size, files: pytorch.DataLoader(hugging_face(files, shuffle=True), size),
    "Hugging Face, shuffled, 2 workers": lambda size, files: pytorch.DataLoader(
        hugging_face(files, shuffle=True), size, num_workers=2, multiprocessing_context="forkserver"
    ),
}
# Arrow's threads do not survive a fork: one run in some ten crashed. Other workers take seconds to start.
ARROW_WORKERS = [kind for kind in LOADERS if kind.startswith("Hugging") and "workers" in kind]
LONG = (*ARROW_WORKERS, "stateful loader, 2 workers")
OF_KINDS = [pytest.param(kind, marks=pytest.mark.long if kind in LONG else ()) for kind in LOADERS]


def kind_of(loader: Callable[[int, list[str]], Any], directory: Path) -> type[resuming.Plain]:
    class Trial(resuming.Momentum):
        def build_training_data_loader(self) -> Any:
            return loader(self.context.get_per_slot_batch_size(), parquet(directory))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            batch = [batch["record"], batch["x"], batch["y"]] if isinstance(batch, dict) else batch
            return super().train_batch(batch, epoch_idx, batch_idx)

    return Trial


@pytest.mark.parametrize("kind", ["stream", "stateful loader", "drawn", "lazy"])
def test_a_stream_resumes_bit_for_bit_after_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    drawn = kind_of(lambda size, files: pytorch.DataLoader(Drawn(), size), tmp_path / "parquet")
    lazy = kind_of(lambda size, files: Lazy(Counted(), size), tmp_path / "parquet")
    monkeypatch.setitem(resuming.KINDS, "drawn", (drawn, 1))
    monkeypatch.setitem(resuming.KINDS, "lazy", (lazy, 1))
    whole = resuming.run(kind, FakeHost(tmp_path / "whole"))
    for cut in range(1, resuming.BATCHES):
        checkpoint = str(tmp_path / "whole" / f"checkpoint_{cut}")
        resumed = resuming.run(kind, FakeHost(tmp_path / f"cut_{cut}"), latest_checkpoint=checkpoint)
        resuming.assert_goes_on(resumed, whole, cut, checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_KINDS)
def test_a_stream_resumes_bit_for_bit_wherever_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setitem(resuming.KINDS, kind, (kind_of(LOADERS[kind], tmp_path / "parquet"), 1))
    whole = resuming.run(kind, FakeHost(tmp_path / "whole"))
    records = RECORDS if kind.startswith("Hugging") else resuming.RECORDS
    seen = [record for _, _, batch in whole["seen"] for record in batch]
    assert sorted(seen[:records]) == list(range(records))
    for cut in resuming.cuts(kind, 1):
        rng.seed_all(999)
        checkpoint = str(tmp_path / "whole" / f"checkpoint_{cut}")
        resumed = resuming.run(kind, FakeHost(tmp_path / f"cut_{cut}"), latest_checkpoint=checkpoint)
        resuming.assert_goes_on(resumed, whole, cut, checkpoint)


@pytest.mark.slow
def test_a_stream_that_the_trial_has_divided_is_not_divided_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    from datasets.distributed import split_dataset_by_node

    mine = split_dataset_by_node(hugging_face(parquet(tmp_path)), rank=1, world_size=2)
    loader = pytorch.DataLoader(mine, batch_size=4).get_data_loader(num_replicas=2, rank=1)
    assert [record for batch in loader for record in batch["record"].tolist()] == list(range(1, RECORDS, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "stateful loader, 2 workers",
        pytest.param("Hugging Face", marks=pytest.mark.long),
        pytest.param("Hugging Face, shuffled", marks=pytest.mark.long),
    ],
)
def test_a_run_killed_at_four_random_batches_is_the_whole_run(tmp_path: Path, kind: str) -> None:
    def seen_of(directory: Path, kills: list[int]) -> tuple[dict[int, list[int]], Any]:
        directory.mkdir()
        run_script(KILLED, str(directory), kind, str(kills), directory=ROOT)
        seen: dict[int, list[int]] = {}
        for line in (directory / "seen.jsonl").read_text().splitlines():
            batch, records = json.loads(line)
            assert seen.setdefault(batch, records) == records, "a batch that was trained again has other records"
        return seen, torch.load(directory / "state.pth")

    whole, state = seen_of(tmp_path / "whole", [])
    killed, state_killed = seen_of(tmp_path / "killed", sorted(random.Random(kind).sample(range(40), 4)))
    assert list(whole) == sorted(killed) == list(range(40))
    assert killed == whole
    resuming.assert_equal(state_killed, state)
