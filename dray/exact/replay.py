"""Runs a trial of an experiment again in this process, and records a digest of everything that each batch computes.

``python -m dray.exact.replay SPEC`` runs it in a process of its own: two trials have two copies of the code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dray.config.custom import Custom
from dray.config.search import as_extended, build_search
from dray.environment import device
from dray.experiment.local import OneTrialHost, load, process_for, train
from dray.pytorch.context import PyTorchTrialContext
from dray.pytorch.trainer import Trainer
from dray.pytorch.trial import PyTorchTrial
from dray.records.directory import ExperimentDirectory
from dray.records.journal import read_journal
from dray.training.errors import ShouldExit
from dray.training.trial import by_name
from dray.worker.lease import SharedSettings

STAGES = (
    "random numbers",
    "inputs",
    "metrics",
    "gradients",
    "optimizer settings",
    "parameters",
    "optimizer state",
)
"""What is recorded of a batch, in the order in which it is computed. Metrics are what `train_batch` returns."""
MAX_TEXT = 40
"""Longer texts of values are recorded as a digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A run of a trial.

    Attributes:
        experiment, code: the directories of the experiment, and of the trial's code.
        run: a directory for the run; a checkpoint in it is where it begins.
        digests: the file to which a line per batch is written.
        batches: after how many batches it ends, counted from the trial's start.
        is_changed: whether the checkpoint is another trial's, with other hyperparameters.
        keep: the batch whose values are written to `values`, and after which the run ends.
    """

    experiment: str
    trial: int
    code: str
    run: str
    digests: str
    batches: int
    is_changed: bool = False
    keep: int | None = None
    values: str = ""

    def perform(self) -> None:
        directory, code = ExperimentDirectory(Path(self.experiment)), Path(self.code)
        records = read_journal(directory.journal)
        config = as_extended(directory.config(), records)
        with process_for(config) as gpu, _working_in(code):
            program = load(config, code)
            search = build_search(config, lambda record: None, records=records, custom=Custom(directory=code))
            hparams: dict[str, Any] = dict(search.params(self.trial))
            host = OneTrialHost(
                SharedSettings.of(config, search.method.rungs, device(gpu=gpu)),
                trial_seed=search.seed_of(self.trial),
                batch_size=int(hparams.get("global_batch_size", 1)),
                code_dir=code,
                directory=Path(self.run),
                command="",
            )
            host.is_changed_fork = self.is_changed
            with open(self.digests, "w") as file, _observed(self, file.write):
                train(program, config, code, host, hparams)


@contextlib.contextmanager
def _working_in(code: Path) -> Iterator[None]:
    """Work in the directory of the code, as workers do."""
    before = Path.cwd()
    os.chdir(code)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _observed(replay: Replay, write: Callable[[str], object]) -> Iterator[None]:
    """Record the batches of the trial that trains within the block: the loop itself has no hook for that."""
    fit = Trainer.fit

    def observed_fit(self: Trainer, *args: Any, **kwargs: Any) -> None:
        observer = _Observer(self._trial, self._context, replay, write)
        self._trial.train_batch = observer.train_batch  # type: ignore[method-assign]
        fit(self, *args, **kwargs)

    Trainer.fit = observed_fit  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.fit = fit  # type: ignore[method-assign]


class _Observer:
    def __init__(
        self, trial: PyTorchTrial, context: PyTorchTrialContext, replay: Replay, write: Callable[[str], object]
    ) -> None:
        self._train_batch = by_name(trial.train_batch, "batch", "epoch_idx", "batch_idx")
        self._context, self._replay, self._write = context, replay, write
        self._now: dict[str, dict[str, Any]] = {}
        for optimizer in context.optimizers:
            optimizer.register_step_pre_hook(self._steps)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self._now = {stage: {} for stage in STAGES}
        self._add("random numbers", _random_numbers(self._context.device))
        self._add("inputs", batch)
        metrics = self._train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        self._add("metrics", metrics if isinstance(metrics, Mapping) else {"loss": metrics})
        self._add("parameters", self._by_model([model.state_dict() for model in self._context.models]))
        self._add("optimizer state", [optimizer.state_dict()["state"] for optimizer in self._context.optimizers])
        digests = {stage: {name: _digest(value) for name, value in now.items()} for stage, now in self._now.items()}
        self._write(json.dumps({"batch": batch_idx, "digests": digests}) + "\n")
        if batch_idx == self._replay.keep:
            tensors = {
                stage: {name: value for name, value in now.items() if isinstance(value, torch.Tensor)}
                for stage, now in self._now.items()
            }
            torch.save(tensors, self._replay.values)
        if batch_idx + 1 >= self._replay.batches or batch_idx == self._replay.keep:
            raise ShouldExit(skip_exit_checkpoint=True)
        return metrics

    def _steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called before each step of an optimizer: the trial's next call may clear the gradients."""
        models = [{name: each.grad for name, each in model.named_parameters()} for model in self._context.models]
        number = next(at for at, each in enumerate(self._context.optimizers) if each is optimizer)
        settings = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        self._add("gradients", self._by_model(models), keep=True)
        self._add("optimizer settings", {f"optimizer {number}": settings}, keep=True)

    def _by_model(self, models: list[dict[str, Any]]) -> Any:
        return models[0] if len(models) == 1 else {f"model {at}": each for at, each in enumerate(models)}

    def _add(self, stage: str, value: Any, *, keep: bool = False) -> None:
        found = dict(_flat(value, ""))
        copied = {
            name: each.detach().cpu().clone() if isinstance(each, torch.Tensor) else each
            for name, each in found.items()
        }
        self._now[stage] = {**(self._now[stage] if keep else {}), **copied}


def _random_numbers(on: torch.device) -> dict[str, Any]:
    state = {"python": repr(random.getstate()), "numpy": repr(np.random.get_state()), "torch": torch.get_rng_state()}
    return {**state, "cuda": torch.cuda.get_rng_state(on)} if on.type == "cuda" else state


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested containers, by dotted name."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(each, f"{name}.{key}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from _flat(each, f"{name}.{key}".removeprefix("."))
    else:
        yield name, value


def _digest(value: Any) -> str:
    """A text that two leaves share only if their type, shape and bits are equal: "#" and a digest, or the value."""
    if isinstance(value, torch.Tensor):
        bits = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        about = f"{value.dtype} {tuple(value.shape)}"
    elif isinstance(value, np.ndarray) and value.dtype != object:
        bits, about = value.tobytes(), f"{value.dtype} {value.shape}"
    elif len(about := repr(value)) <= MAX_TEXT:
        return about
    else:
        bits = b""
    return "#" + hashlib.sha256(about.encode() + bits).hexdigest()[:16]


def main() -> None:
    logging.getLogger("dray").setLevel(logging.ERROR)
    Replay(**json.loads(Path(sys.argv[1]).read_text())).perform()


if __name__ == "__main__":
    main()
