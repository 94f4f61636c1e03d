"""Checkpoints that the real determined 0.38.1 wrote, gone on from: with the losses that its own uninterrupted run had.

Those are in tests/golden/determined-0.38.1, made by tests/golden/determined/make.py. On the machine that made them the
losses are equal to the bit; another processor may round another way.
"""

from __future__ import annotations

import importlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dray import import_from_path, pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.training import rng
from dray.training.checkpoint import determined as legacy
from dray.training.checkpoint import files as checkpoint
from dray.training.parallel.division import Division
from dray.training.progress import Progress
from tests.pytorch.fakes import FakeHost
from tests.pytorch.processes import results_of_two

pytestmark = pytest.mark.api("9.11")

GOLDEN = Path(__file__).parents[1] / "golden" / "determined-0.38.1"
MODELS = GOLDEN.parent / "determined"
LENGTH = 15
EPOCH = 6  # batches of one process; of each of two it is half as many
OTHER_MACHINE = 1e-4
"""Relative, after 15 steps with the kernels of another processor: 2e-6 so far. A wrong order is 1e-1 off."""


@cache
def models() -> Any:
    """Its model_def.py, which imports `determined`."""
    with import_from_path(MODELS):
        return importlib.import_module("model_def")


def golden(name: str) -> tuple[dict[str, Any], Path, int]:
    """What a run of Determined's was; a checkpoint of it, `name` or `name/at-8`, and after how many batches."""
    name, _, which = name.partition("/")
    (at,) = (GOLDEN / name).glob(which or "at-*")
    return json.loads((GOLDEN / name / "run.json").read_text()), at, int(at.name.removeprefix("at-"))


def resumed(
    name: str,
    directory: Path,
    *,
    latest: Path | str | None = None,
    distributed: DistributedContext | None = None,
    global_batch_size: int = 4,
    **fit: Any,
) -> Any:
    """The trial that has gone on from Determined's checkpoint, or from another one of the same trial."""
    run, at, _ = golden(name)
    rng.seed_all(999)
    hparams = json.loads((at / "load_data.json").read_text())["hparams"] | {"global_batch_size": global_batch_size}
    with (
        use_host(FakeHost(directory)),
        pytorch.init(hparams=hparams, distributed=distributed, enable_tensorboard_logging=False) as context,
    ):
        trial = getattr(models(), run["trial"])(context)
        pytorch.Trainer(trial, context).fit(
            **{"max_length": pytorch.Batch(LENGTH), "validation_period": pytorch.Epoch(1), "latest_checkpoint": at}
            | ({} if latest is None else {"latest_checkpoint": latest})
            | fit
        )
    return trial


ONE = ["plain", "own", "two", "scaled", "shuffled", "still", "workers/at-6", "workers/at-8", "workers/at-10"]


@pytest.mark.api("9.8")
@pytest.mark.parametrize("name", ONE)
def test_a_run_of_determineds_goes_on_with_the_losses_that_it_would_have_had(name: str, tmp_path: Path) -> None:
    run, _, batches = golden(name)
    trial = resumed(name, tmp_path)
    assert trial.losses == pytest.approx(run["ranks"][0]["losses"][batches:], rel=OTHER_MACHINE)
    assert trial.best.state_dict() == pytest.approx(run["ranks"][0]["best"], rel=OTHER_MACHINE)


@pytest.mark.api("9.8")
@pytest.mark.parametrize("cut", [10, 12])
@pytest.mark.parametrize("name", ["plain", "shuffled", "still", "workers/at-8"])
def test_and_so_do_the_runs_that_go_on_from_its_own_checkpoints(name: str, cut: int, tmp_path: Path) -> None:
    run, _, _ = golden(name)
    resumed(name, tmp_path / "first", checkpoint_period=pytorch.Batch(cut))
    trial = resumed(name, tmp_path / "second", latest=tmp_path / "first" / f"checkpoint_{cut}")
    assert trial.losses == pytest.approx(run["ranks"][0]["losses"][cut:], rel=OTHER_MACHINE)


def test_an_epoch_that_was_cut_where_training_draws_too_goes_on_in_some_order(tmp_path: Path) -> None:
    """With dropout on the CPU the numbers that the order was made of are lost; the position is not."""
    (tmp_path / "first").mkdir()
    resumed("shuffled", tmp_path / "first", max_length=pytorch.Batch(8))
    ours = tmp_path / "first" / "checkpoint_8"
    state = checkpoint.read_state(ours, [])
    chief = checkpoint.read_rank(ours, state, 0, 1)
    assert chief is not None
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    about = {"experiment_config": None, "hparams": None, "trial_cls_spec": "model_def:Shuffled", "framework": "torch"}
    legacy.write(
        theirs, state=state, rng_state=chief.rng, progress=Progress(batches=8), epoch_length=EPOCH, about=about
    )
    trial = resumed("shuffled", tmp_path / "second", latest=theirs, max_length=pytorch.Batch(12))
    assert len(trial.losses) == 4


@pytest.mark.api("9.4")
@pytest.mark.parametrize("name", ["plain", "plain-2", "two-2"])
def test_its_trial_is_loaded_with_the_class_in_its_code(name: str) -> None:
    run, at, _ = golden(name)
    trial: Any = pytorch.load_trial_from_checkpoint_path(at)
    assert type(trial).__name__ == run["trial"]
    state = torch.load(at / "state_dict.pth", weights_only=False)
    for model, saved in zip(trial.context.models, state["models_state_dict"], strict=True):
        plain = {key.removeprefix("module."): value for key, value in saved.items()}
        assert all(torch.equal(value, plain[key]) for key, value in model.state_dict().items())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, backend: str) -> list[dict[str, list[float]]]:
    from tests.pytorch import determined_ranks

    return results_of_two(determined_ranks.__file__, tmp_path_factory.mktemp("ranks"), backend)


@pytest.mark.slow
@pytest.mark.api("9.8")
@pytest.mark.parametrize(
    ("name", "until"),
    # Over several processes shuffle=True draws no further orders, for each could draw another one.
    [("plain-2", LENGTH), ("two-2", LENGTH), ("shuffled-2", EPOCH), ("still-2", EPOCH)],
)
def test_two_processes_go_on_with_their_losses(ranks: list[dict[str, list[float]]], name: str, until: int) -> None:
    run, _, batches = golden(name)
    for rank, mine in enumerate(ranks):
        theirs = run["ranks"][rank]["losses"]
        assert mine[name][: until - batches] == pytest.approx(theirs[batches:until], rel=OTHER_MACHINE)


@pytest.mark.slow
@pytest.mark.api("9.9")
def test_two_processes_go_on_from_a_checkpoint_of_one(ranks: list[dict[str, list[float]]]) -> None:
    """On the records of the same global batches, half of each on either."""
    run, _, batches = golden("still")
    whole = [sum(losses) / 2 for losses in zip(*(rank["still"] for rank in ranks), strict=True)]
    ends = 2 * EPOCH
    assert whole[: ends - batches] == pytest.approx(run["ranks"][0]["losses"][batches:ends], rel=OTHER_MACHINE)


@pytest.mark.api("9.9")
def test_one_process_goes_on_from_a_checkpoint_of_two(tmp_path: Path) -> None:
    run, _, batches = golden("still-2")
    trial = resumed("still-2", tmp_path, global_batch_size=8)
    first, second = (rank["losses"] for rank in run["ranks"])
    theirs = [sum(losses) / 2 for losses in zip(first, second, strict=True)]
    assert trial.losses[: EPOCH - batches] == pytest.approx(theirs[batches:EPOCH], rel=OTHER_MACHINE)


def test_how_a_run_of_determineds_divided_its_data() -> None:
    assert legacy.read_division(golden("still-2")[1]) == Division(replicas=2, batch_size=4)
    assert legacy.read_division(golden("still")[1]) == Division(replicas=1, batch_size=4)


def test_a_trial_of_ours_on_a_share_of_a_slot_was_one_process(tmp_path: Path) -> None:
    about = {"experiment_config": {"resources": {"slots_per_trial": 0.25}}, "hparams": {"global_batch_size": 8}}
    (tmp_path / legacy.LOAD_DATA).write_text(json.dumps(about))
    assert legacy.read_division(tmp_path) == Division(replicas=1, batch_size=8)


@pytest.mark.parametrize("before", [0, 1, 5, 310, 311, 400])
def test_the_last_numbers_of_torchs_generator_are_known_from_its_state(before: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(before):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
    drawn = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
    high, low = legacy.mt19937_drawn(generator.get_state(), 2) or (0, 0)
    assert (high << 32 | low) % 2**63 == drawn


def test_numbers_that_the_generator_has_replaced_are_not_known() -> None:
    generator = torch.Generator().manual_seed(3)
    assert legacy.mt19937_drawn(generator.get_state(), 2) is None


def test_the_order_of_an_epoch_is_known_after_a_validation_too(tmp_path: Path) -> None:
    run, at, batches = golden("still")
    state = checkpoint.read_state(at, [])
    begun = {1: EPOCH, 2: 2 * EPOCH}
    seeds = legacy.order_seeds(at, state, begun)
    assert seeds.keys() == {1}
    # As torch's loaders do for a validation.
    rng_state = dict(state["rng_state"])
    generator = torch.Generator()
    generator.set_state(rng_state["cpu_rng_state"])
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    rng_state["cpu_rng_state"] = generator.get_state()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    packed = legacy.rng_of({"rng_state": rng_state})
    about = {"experiment_config": None, "hparams": None, "trial_cls_spec": "model_def:Still", "framework": "torch"}
    progress = Progress(batches=batches, validated=batches)
    legacy.write(theirs, state=state, rng_state=packed, progress=progress, epoch_length=EPOCH, about=about)
    assert checkpoint.read_order_seeds(theirs, begun) == seeds
    trial = resumed("still", tmp_path / "run", latest=theirs, max_length=pytorch.Batch(2 * EPOCH))
    assert trial.losses == pytest.approx(run["ranks"][0]["losses"][batches : 2 * EPOCH], rel=OTHER_MACHINE)


def test_random_numbers_are_written_as_they_are_read() -> None:
    rng.seed_all(5)
    packed = rng.capture(torch.device("cpu"))
    expected = (random.random(), np.random.rand(), torch.rand(()).item())
    again = legacy.rng_of({"rng_state": legacy._rng_state(packed)})
    assert again is not None
    rng.restore(again, torch.device("cpu"))
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
