"""Streams on two ranks: which records each of them gets, and where they stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.training import rng
from tests.pytorch import resuming, sharding
from tests.pytorch.fakes import FakeHost
from tests.pytorch.processes import gloo_first, serve  # noqa: F401 - a fixture
from tests.pytorch.resuming import Counted, SizedCounted
from tests.pytorch.test_streams import ARROW_WORKERS, LOADERS, RECORDS, kind_of

pytestmark = pytest.mark.slow

HUGGING_FACE = [kind for kind in LOADERS if kind.startswith("Hugging") and kind not in ARROW_WORKERS]


class Sized(resuming.Streaming):
    data = SizedCounted


class Uneven(resuming.Streaming):
    """Batches of four: three on rank 0, two on rank 1."""

    data = staticmethod(lambda: Counted(17))


class Wrong(SizedCounted):
    """Rank 1 has two batches, and says three."""

    def __len__(self) -> int:
        return 9


class Longer(Counted):
    """Three batches on rank 0, two on rank 1, which says one."""

    def __len__(self) -> int:
        return 9 - 5 * self.first


def two(kind: str, directory: Path, **fit: Any) -> dict[str, Any]:
    return resuming.run(kind, FakeHost(directory), distributed=DistributedContext.from_torch_distributed(), **fit)


@contextmanager
def said() -> Iterator[list[str]]:
    """What dray logs on this rank during the block."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dray").addHandler(handler)
    yield messages
    logging.getLogger("dray").removeHandler(handler)


def uneven(directory: Path) -> Any:
    resuming.KINDS["uneven"] = (Uneven, 1)
    with said() as messages:
        whole = two("uneven", directory / "whole")
    resumed = {}
    for cut in (2, 4):
        rng.seed_all(999)
        resumed[cut] = two(
            "uneven", directory / str(cut), latest_checkpoint=str(directory / "whole" / f"checkpoint_{cut}")
        )
    return {"whole": whole, "resumed": resumed, "said": [each for each in messages if "end of the pass" in each]}


def hugging_face(directory: Path) -> Any:
    os.environ["HF_HOME"] = str(directory / f"hf_{os.environ['RANK']}")
    found = {}
    for kind in HUGGING_FACE:
        place = directory / kind
        parquet = place / f"parquet_{os.environ['RANK']}"
        resuming.KINDS[kind] = (kind_of(LOADERS[kind], parquet), 1)
        whole = two(kind, place / "whole")
        resumed = {}
        for cut in resuming.cuts(kind, 1):
            rng.seed_all(999)
            resumed[cut] = two(kind, place / str(cut), latest_checkpoint=str(place / "whole" / f"checkpoint_{cut}"))
        found[kind] = {"whole": whole, "resumed": resumed}
    return found


def leaving(directory: Path) -> Any:
    """Rank 1 leaves in the middle of a batch for which the other waits, and both resume."""

    class Leaving(resuming.Streaming):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 4 and self.context.get_initial_batch() == 0 and self.context.distributed.rank == 1:
                raise pytorch.ShouldExit
            return super().train_batch(batch, epoch_idx, batch_idx)

    seen, latest = [], None
    for name in ("first", "second"):
        host = FakeHost(directory / name)
        peers = DistributedContext.from_torch_distributed()
        with use_host(host), pytorch.init(hparams={"global_batch_size": 8}, distributed=peers) as context:
            made = Leaving(context)
            pytorch.Trainer(made, context).fit(
                max_length=Batch(6),
                checkpoint_period=Batch(3),  # so that the checkpoint at 4 is made because of the leaving
                checkpoint_policy="none",
                latest_checkpoint=latest,
            )
        seen.append(made.seen)
        latest = peers_latest(directory / name)
    return seen


def peers_latest(directory: Path) -> str:
    return str(max(directory.glob("checkpoint_*"), key=lambda path: int(path.name.rpartition("_")[2])))


def wrong_length(directory: Path) -> Any:
    class Trial(resuming.Streaming):
        data = staticmethod(lambda: Wrong(17))

    resuming.KINDS["wrong"] = (Trial, 1)
    with pytest.raises(Exception) as caught:
        two("wrong", directory)
    return str(caught.value)


def longer(directory: Path) -> Any:
    class Trial(resuming.Streaming):
        data = staticmethod(lambda: Longer(17))

    resuming.KINDS["longer"] = (Trial, 1)
    with said() as messages:
        two("longer", directory)
    return [each for each in messages if "length" in each]


def validated(directory: Path) -> Any:
    """A sharded model and a whole one, validated on three batches on rank 0 and two on rank 1."""
    uneven = {"build_validation_data_loader": lambda self: pytorch.DataLoader(Counted(17), 4)}
    peers = DistributedContext.from_torch_distributed()
    found = {}
    for shard in (sharding.whole, sharding.fsdp):
        made = sharding.run(sharding.trial(shard, **uneven), directory / shard.__name__, distributed=peers, batches=4)
        found[shard.__name__] = [validation["validation_loss"] for _, _, validation in made["reports"] if validation]
    return found


def sized(directory: Path) -> Any:
    resuming.KINDS["sized"] = (Sized, 1)
    return two("sized", directory)


def test_ranks_share_a_stream_and_stop_at_the_same_batch(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["uneven"]["whole"]["seen"] for rank in ranks)
    assert [batch for _, _, batch in first[:3]] == [[0, 2, 4, 6], [8, 10, 12, 14], [0, 2, 4, 6]]
    assert [batch for _, _, batch in second[:3]] == [[1, 3, 5, 7], [9, 11, 13, 15], [1, 3, 5, 7]]
    assert len(first) == len(second) == resuming.BATCHES
    assert [len(rank["uneven"]["said"]) for rank in ranks] == [1, 0]
    assert "ranks [0] still have data" in ranks[0]["uneven"]["said"][0]
    for rank in ranks:
        for cut, resumed in rank["uneven"]["resumed"].items():
            assert resumed["seen"] == rank["uneven"]["whole"]["seen"][cut:]
            resuming.assert_equal(resumed["state"], rank["uneven"]["whole"]["state"])


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_hugging_face_streams_are_divided_and_resume_bit_for_bit(ranks: list[dict[str, Any]], kind: str) -> None:
    parts = [rank["hugging_face"][kind] for rank in ranks]
    pass_of = [{record for _, _, batch in part["whole"]["seen"][:3] for record in batch} for part in parts]
    assert not pass_of[0] & pass_of[1]
    assert pass_of[0] | pass_of[1] <= set(range(RECORDS))
    for part in parts:
        for cut, resumed in part["resumed"].items():
            assert resumed["seen"] == part["whole"]["seen"][cut:]
            resuming.assert_equal(resumed["state"], part["whole"]["state"])


def test_a_batch_that_one_rank_left_is_trained_again_by_all(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        epoch = [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
        expected = [[record + rank for record in batch] for batch in 2 * epoch]
        first, second = found["leaving"]
        # Where collectives are aborted, training since the last checkpoint at a period is lost.
        assert second[0][1] in (3, 4)
        assert second[-1][1] == 5
        assert all(batch == expected[batch_idx] for _, batch_idx, batch in [*first, *second])


def test_a_rank_that_ends_before_its_length_is_an_error(ranks: list[dict[str, Any]]) -> None:
    messages = [rank["wrong_length"] for rank in ranks]
    assert "the training loader of rank 1 ended after 2 batches, but has a length of 3" in messages[1]
    assert "rank 1" in messages[0]


def test_what_is_beyond_a_ranks_length_is_warned_of(ranks: list[dict[str, Any]]) -> None:
    assert ["more batches than its length, 1" in "".join(rank["longer"]) for rank in ranks] == [False, True]


def test_a_sharded_model_is_validated_on_a_stream_whose_parts_differ(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["validated"]
    assert len(found["whole"]) == 2  # after batches 3 and 4
    assert found["fsdp"] == pytest.approx(found["whole"], rel=1e-4)


def test_a_stream_is_divided_anew_between_epochs(
    ranks: list[dict[str, Any]], directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(resuming.KINDS, "sized", (Sized, 1))
    alone = resuming.run("sized", FakeHost(tmp_path / "a"), latest_checkpoint=str(directory / "sized" / "checkpoint_6"))
    both = zip(*(rank["sized"]["seen"][6:] for rank in ranks), strict=True)
    assert [batch for _, _, batch in alone["seen"]] == [sorted(one[2] + other[2]) for one, other in both]
    with pytest.raises(ValueError, match=r"positions of 2 ranks .* this run has 1: .* only between two epochs"):
        resuming.run("sized", FakeHost(tmp_path / "b"), latest_checkpoint=str(directory / "sized" / "checkpoint_5"))


@pytest.mark.parametrize("kind", ["Hugging Face", "Hugging Face, shuffled"])
def test_a_stream_divided_by_record_is_divided_anew_anywhere(
    ranks: list[dict[str, Any]], directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    place = directory / "hugging_face" / kind
    monkeypatch.setitem(resuming.KINDS, kind, (kind_of(LOADERS[kind], place / "parquet_0"), 1))
    alone = resuming.run(kind, FakeHost(tmp_path), latest_checkpoint=str(place / "whole" / "checkpoint_7"))
    both = zip(*(rank["hugging_face"][kind]["whole"]["seen"][7:] for rank in ranks), strict=True)
    expected = [sorted(one[2] + other[2]) for one, other in both]
    assert [sorted(batch) for _, _, batch in alone["seen"]] == expected


if __name__ == "__main__":
    serve([uneven, hugging_face, leaving, wrong_length, longer, validated, sized])
