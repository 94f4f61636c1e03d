"""Restores a trial's run from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from dray.pytorch.streams import Stream
from dray.pytorch.trial_run import TrialRun
from dray.training import rng
from dray.training.callback import PyTorchCallback, overrides
from dray.training.checkpoint import files, sharded
from dray.training.checkpoint.joint import open_together
from dray.training.checkpoint.mapped import MappedTensors
from dray.training.lr_scheduler import follow_length, keep_own
from dray.training.optimisation import bare
from dray.training.parallel.sharding import is_dtensor
from dray.training.progress import Progress

log = logging.getLogger(__name__)


def open_checkpoint(run: TrialRun, checkpoint: str | None) -> Path | None:
    """Open a checkpoint, if any, and return its directory. All ranks call this together."""
    if checkpoint is None:
        return None
    return open_together(run.peers, lambda: run.host.open_checkpoint(checkpoint), "opening a checkpoint")


def start_at(run: TrialRun, directory: Path | None) -> Progress:
    """Set a run's position and seed to a checkpoint's; without one it begins at batch 0."""
    if directory is not None and (seed := files.read_trial_seed(directory)) is not None:
        run.seed = seed  # the data keep their order even if this run drew a new seed
    at = Progress() if directory is None else files.read_progress(directory)
    run.position.start(at.batches)
    return at


def _load_state(run: TrialRun, directory: Path, callbacks: Mapping[str, PyTorchCallback]) -> dict[str, Any]:
    """Load models, optimizers, schedulers and callbacks from a checkpoint, and return its state dict."""
    models = [bare(model) for model in run.optimisation.models]
    # Mapped, so that a machine's ranks share one copy, and read only their part of a sharded state.
    state = files.read_state(directory, models)
    mapped = MappedTensors(state)
    state = mapped.copied(state)
    sharded.load(state, directory, models, run.optimisation.optimizers)
    for callback in callbacks.values():
        callback.on_checkpoint_load_start(state)
    built = [_hyperparameters(run, optimizer) for optimizer in run.optimisation.optimizers]
    before, now = files.read_length(directory, "total_batches"), run.total_batches
    if before is not None and now is not None and now != before and not run.host.is_changed_fork:
        follow_length(
            state,
            run.optimisation.lr_schedulers,
            run.optimisation.optimizers,
            before=before,
            now=now,
            uses_total=run.uses_total_batches,
        )
    if run.host.is_changed_fork:
        keep_own(state, run.optimisation.lr_schedulers, run.optimisation.optimizers)
    run.optimisation.load_state_dict(state)
    mapped.release(models, run.optimisation.optimizers)
    if run.peers.rank == 0:
        _warn_of_overridden(run, built)
    saved = state.get("callbacks", {})
    for name, callback in callbacks.items():
        if name in saved:
            callback.load_state_dict(saved[name])
        elif overrides(callback, "load_state_dict"):
            log.warning("callback %r has no state in the checkpoint; it starts afresh", name)
    return state


#: Hyperparameters of torch's optimizers that only a schedule changes during training.
_FIXED = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "betas", "eps", "alpha", "amsgrad")
_SCHEDULED = ("lr", "momentum", "betas")


def _hyperparameters(run: TrialRun, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each parameter group's hyperparameters that resuming should not change; with a schedule, its initial rate."""
    schedules = [getattr(scheduler, "optimizer", None) for scheduler in run.optimisation.lr_schedulers]

    def fixed(group: dict[str, Any]) -> dict[str, Any]:
        is_scheduled = "initial_lr" in group or optimizer in schedules
        names = ["initial_lr", *(name for name in _FIXED if not (is_scheduled and name in _SCHEDULED))]
        values = {name: group[name] for name in names if name in group}
        return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()}

    return [fixed(group) for group in optimizer.param_groups]


def _warn_of_overridden(run: TrialRun, built: list[list[dict[str, Any]]]) -> None:
    for index, optimizer in enumerate(run.optimisation.optimizers):
        loaded = _hyperparameters(run, optimizer)
        changed = {
            f"{name} {after[name]} instead of {value}": None
            for before, after in zip(built[index], loaded, strict=True)
            for name, value in before.items()
            if name in after and after[name] != value
        }
        if changed:
            log.warning(
                "optimizer %d trains with the checkpoint's values: %s; to use the trial's, set them in "
                "optimizer.param_groups (and those of its schedule) in a callback's on_training_start()",
                index,
                ", ".join(changed),
            )


def restore(
    run: TrialRun,
    resumed: Path | None,
    source: Path | None,
    callbacks: Mapping[str, PyTorchCallback],
    stream: Stream | None = None,
) -> None:
    """Load everything needed to resume a run, including gradients, RNG state and the position in a stream; or only the
    state of `source`."""
    directory = resumed or source
    if directory is None:
        return
    state = _load_state(run, directory, callbacks)
    if resumed is None:
        return
    if stream is not None:
        _restore_position(run, resumed, stream)
    # The RNG state comes last, so that random numbers drawn while loading don't count.
    saved = files.read_rank(directory, state, run.peers.rank, run.peers.size, run.mesh_shape.sharing)
    if saved is not None and saved.gradients is not None:
        run.optimisation.restore_gradients(_gradients(run, directory, saved.gradients))
    if saved is not None and saved.rng:
        rng.restore(saved.rng, run.device)
    else:
        # From the state that the constructor left, the RNGs would repeat the random numbers of the first batches.
        log.info("the checkpoint has no RNG state of rank %d; its RNGs are seeded again", run.peers.rank)
        rng.seed_all(Random(f"{run.seed}:{run.replica}:{run.position.initial_batch}").getrandbits(31))


def _restore_position(run: TrialRun, directory: Path, stream: Stream) -> None:
    position, before = files.read_data_position(directory, run.replica)
    if position is None:
        log.warning("the checkpoint has no position of this training loader, which begins at the start of its data")
    elif before == run.replicas:
        stream.load_state_dict(position)
    else:
        stream.load_divided_anew(position, before, run.replicas)


def _gradients(
    run: TrialRun, directory: Path, gradients: list[list[torch.Tensor | None]]
) -> list[list[torch.Tensor | None]]:
    """The gradients in a checkpoint, sharded like the parameters of this run."""
    parameters = [list(model.parameters()) for model in run.optimisation.models]

    # Ranks with whole models each wrote their own gradients.
    if any(
        gradient is not None and gradient.device.type != "meta" and is_dtensor(parameters[model][index])
        for (model, index), gradient in sharded.leaves(gradients)
    ):
        gradients = files.read_mean_gradients(directory)
    return sharded.fill(gradients, directory, lambda keys: parameters[keys[1]][keys[2]], "gradients")
