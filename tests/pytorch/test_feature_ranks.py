"""TensorBoard, torchmetrics, compiled models, DDP's settings and mixed precision over two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pytorch import feature_ranks
from tests.pytorch.fakes import FakeHost
from tests.pytorch.feature_ranks import KINDS, TRAINING
from tests.pytorch.processes import gloo_first, results_of_two  # noqa: F401 - a fixture
from tests.pytorch.test_tensorboard import scalars
from tests.pytorch.two_ranks import run

# Two processes, each of which starts torch's compiler: half a minute where others work beside.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Path:
    return tmp_path_factory.mktemp("feature_ranks")


@pytest.fixture(scope="module")
def ranks(backend: str, directory: Path) -> list[dict[str, Any]]:
    return results_of_two(feature_ranks.__file__, directory, backend)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name])


def test_every_kind_trains_and_ranks_agree(ranks: list[dict[str, Any]]) -> None:
    assert {kind: found["error"] for kind, found in ranks[0].items()} == dict.fromkeys(KINDS)
    for kind in KINDS:
        one, other = (rank[kind]["weights"] for rank in ranks)
        assert all(torch.equal(one[name], other[name]) for name in one), kind


def test_cached_data_are_the_same_on_all_ranks_and_leave_the_trials_random_numbers_alone(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        weights, plain = rank["on cached data"]["weights"], rank["plain"]["weights"]
        assert all(torch.equal(weights[name], plain[name]) for name in plain)


@pytest.mark.api("2.11")
def test_the_chief_writes_scalars_averaged_over_ranks(ranks: list[dict[str, Any]], directory: Path) -> None:
    place = directory / "shown" / "tensorboard"
    assert len(list(place.iterdir())) == 1
    found = scalars(place)
    assert found["Determined/rank"] == [(i, 0.5) for i in range(7)]
    assert found["Determined/at"] == [(i, 2 * i + 0.5) for i in range(7)]
    (reported,) = [training for batches, training, *_ in ranks[0]["shown"]["reports"] if batches == 3]
    losses = [value for _, value in found["Determined/loss"][:3]]
    assert sum(losses) / 3 == pytest.approx(reported["loss"])
    assert [step for step, _ in found["Determined/validation_loss"]] == [7]
    records, batches = (found[f"system/{name}_per_second"][-1][1] for name in ("records", "batches"))
    assert records == pytest.approx(8 * batches, rel=1e-5), "of both ranks"


@pytest.mark.api("2.16")
@pytest.mark.parametrize("kind", ["compiled before", "compiled after"])
def test_compiled_models_train_what_plain_ones_train(
    ranks: list[dict[str, Any]], directory: Path, tmp_path: Path, kind: str
) -> None:
    assert_close(ranks[0][kind]["weights"], ranks[0]["plain"]["weights"])
    # A checkpoint of theirs is one of the plain model, for one process too.
    resumed = run(
        KINDS["plain"], FakeHost(tmp_path), **TRAINING, latest_checkpoint=str(directory / kind / "checkpoint_4")
    )
    assert_close(resumed["weights"], ranks[0]["plain"]["weights"])


@pytest.mark.api("2.25")
def test_mixed_precision_is_close_to_full(ranks: list[dict[str, Any]]) -> None:
    for name, weight in ranks[0]["plain"]["weights"].items():
        half = ranks[0]["half"]["weights"][name]
        assert half.dtype is torch.float32
        assert not torch.equal(half, weight)
        torch.testing.assert_close(half, weight, rtol=0.05, atol=0.02)
