"""The digits trial without dray, in the two plain Ray variants that ``sweep.py`` compares with.

Both train the model of ``examples/digits/model_def.py`` on its data, with its batch size and optimizer, validate after
each epoch, and start from the same hyperparameters and seeds. Ray is left with its defaults, but prints nothing, and
has a dashboard only where it needs one.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from _measure import stamp
from model_def import datasets
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from torch import nn
from torch.utils.data import DataLoader


class Digits:
    """The model, its data and one epoch at a time.

    Args:
        trial: ``trial`` (its number), ``seed`` and ``hparams``, as dray's search has them.
        model: applied to the model before it is trained.
    """

    def __init__(self, trial: dict[str, Any], wrap: Any = lambda model: model) -> None:
        self.trial, self.begun = trial["trial"], False
        torch.manual_seed(trial["seed"])
        hidden, lr = trial["hparams"]["hidden"], trial["hparams"]["lr"]
        self.model = wrap(nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.loss = nn.CrossEntropyLoss()
        train, test = datasets()
        self.batches = DataLoader(train, batch_size=trial["hparams"]["global_batch_size"], shuffle=True)
        self.test_batches = DataLoader(test, batch_size=60)

    def epoch(self) -> dict[str, float]:
        """Train one epoch, validate, and return the metrics."""
        loss_sum = torch.zeros(())
        self.model.train()
        for images, labels in self.batches:
            if not self.begun:
                self.begun = True
                stamp("first_batch", trial=self.trial, rank=0)
            loss = self.loss(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            loss_sum += loss.detach()
        metrics = {"loss": loss_sum.item() / len(self.batches), **self._validate()}
        stamp("validated", trial=self.trial, rank=0, loss=metrics["validation_loss"], accuracy=metrics["accuracy"])
        return metrics

    @torch.no_grad()
    def _validate(self) -> dict[str, float]:
        self.model.eval()
        loss_sum, hits, batches = torch.zeros(()), torch.zeros(()), 0
        for images, labels in self.test_batches:
            scores = self.model(images)
            loss_sum += self.loss(scores, labels)
            hits += (scores.argmax(dim=1) == labels).float().mean()
            batches += 1
        return {"validation_loss": loss_sum.item() / batches, "accuracy": hits.item() / batches}


def asha(max_epochs: int) -> ASHAScheduler:
    """The search of asha.yaml, as Tune has it."""
    return ASHAScheduler(time_attr="training_iteration", grace_period=1, reduction_factor=4, max_t=max_epochs)


# --------------------------------------------------------- (b) as documented: a TorchTrainer in each function trainable
def documented(trials: list[dict[str, Any]], max_epochs: int) -> None:
    """https://docs.ray.io/en/latest/train/user-guides/hyperparameter-optimization.html, two trials at a time."""
    # By default a trial takes one CPU for its driver and one for its worker, so Ray needs four for two at a time. They
    # really share the machine's CPUs.
    # Without a dashboard Train does not find out that the driver of a trial was stopped, and never frees its CPUs.
    with _ray(num_cpus=4, dashboard=True) as storage:
        tune.Tuner(
            _train_driver,
            param_space={
                "trial": tune.grid_search(trials),
                "max_epochs": max_epochs,
                "storage": str(storage),
            },
            tune_config=tune.TuneConfig(
                metric="validation_loss", mode="min", scheduler=asha(max_epochs), max_concurrent_trials=2
            ),
            run_config=tune.RunConfig(name="tune", storage_path=str(storage), verbose=0),
        ).fit()


def _train_driver(config: dict[str, Any]) -> None:
    trainer = ray.train.torch.TorchTrainer(
        _train_worker,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name=f"train-trial_id={tune.get_context().get_trial_id()}",
            storage_path=config["storage"],
            callbacks=[TuneReportCallback()],
        ),
    )
    trainer.fit()


def _train_worker(config: dict[str, Any]) -> None:
    digits = Digits(config["trial"], wrap=ray.train.torch.prepare_model)
    for _ in range(config["max_epochs"]):
        ray.train.report(digits.epoch())


# -------------------------------------------------------------- (c) a plain class trainable whose actors are used again
class DigitsTrainable(tune.Trainable):
    """One step is one epoch with its validation."""

    def setup(self, config: dict[str, Any]) -> None:
        self.digits = Digits(config["trial"])
        # None: the scheduler ends the trial.
        self.length = config["trial"].get("length")

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        metrics = self.digits.epoch()
        return {**metrics, "done": self.iteration + 1 == self.length}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        state = {"model": self.digits.model.state_dict(), "optimizer": self.digits.optimizer.state_dict()}
        torch.save(state, Path(checkpoint_dir) / "state.pt")


def class_trainable(trials: list[dict[str, Any]], max_epochs: int, *, lengths_given: bool, saves: bool) -> None:
    """One trial a core at a time, each in one of two actors.

    Args:
        trials: as for `Digits`, with the ``length`` of each in epochs if these are given.
        max_epochs: of a trial.
        lengths_given: trials train for their ``length``; otherwise ASHA decides.
        saves: every trial saves its state at its end, which is Tune's default.
    """
    with _ray(num_cpus=2, dashboard=False) as storage:
        tune.Tuner(
            DigitsTrainable,
            param_space={"trial": tune.grid_search(trials)},
            tune_config=tune.TuneConfig(
                metric="validation_loss",
                mode="min",
                scheduler=FIFOScheduler() if lengths_given else asha(max_epochs),
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(storage),
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=saves),
            ),
        ).fit()


@contextlib.contextmanager
def _ray(*, num_cpus: int, dashboard: bool) -> Iterator[Path]:
    """Ray, started and ended by this process, and a directory for it."""
    with tempfile.TemporaryDirectory() as directory:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=dashboard,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        stamp("ray_ready")
        try:
            yield Path(directory)
        finally:
            ray.shutdown()
