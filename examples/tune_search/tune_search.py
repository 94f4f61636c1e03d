"""A dray search for Ray Tune users: ASHA with promotion and TPE, on a plain training function.

::

    python3 tune_search.py

Run it again after an interruption, even by kill -9: the search continues from the state that Tune saved last.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from ray import tune
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from searchers import PromotionASHA
from searchers.tune import Scheduler, Searcher


def train(config: dict[str, Any]) -> None:
    """Train one hidden layer on scikit-learn's digits; report and save each epoch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    parts = train_test_split(digits.data / 16.0, digits.target, test_size=0.2, stratify=digits.target, random_state=0)
    x_train, x_test, y_train, y_test = (torch.as_tensor(part) for part in parts)
    model = nn.Sequential(nn.Linear(64, config["hidden"]), nn.ReLU(), nn.Linear(config["hidden"], 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    loss_fn = nn.CrossEntropyLoss()

    epoch = 0
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]
    while True:  # the search ends the trial
        order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(64):
            loss = loss_fn(model(x_train[batch].float()), y_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch += 1
        with torch.no_grad():
            validation_loss = loss_fn(model(x_test.float()), y_test).item()
        with tempfile.TemporaryDirectory() as directory:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(directory) / "state.pt")
            tune.report({"loss": validation_loss, "epoch": epoch}, checkpoint=tune.Checkpoint.from_directory(directory))
        time.sleep(config["pause_s"])


def new_tuner(path: Path, *, trials: int, epochs: int, pause_s: float = 0.0) -> tune.Tuner:
    """A search in this directory."""
    method = PromotionASHA(max_trials=trials, max_length=epochs, num_rungs=3, divisor=2, max_concurrent_trials=2)
    searcher = Searcher(method, sampler="tpe", seed=7)
    return tune.Tuner(
        train,
        param_space={"lr": tune.loguniform(1e-4, 1e-1), "hidden": tune.lograndint(8, 257), "pause_s": pause_s},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            num_samples=-1,
            search_alg=searcher,
            scheduler=Scheduler(searcher),
            reuse_actors=True,  # a paused trial leaves its process to the next one
        ),
        run_config=tune.RunConfig(name=path.name, storage_path=str(path.parent)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, default=Path("~/ray_results/dray_digits").expanduser())
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each epoch")
    arguments = parser.parse_args()
    path = arguments.path.resolve()
    if tune.Tuner.can_restore(path):
        tuner = tune.Tuner.restore(str(path), train)
    else:
        tuner = new_tuner(path, trials=arguments.trials, epochs=arguments.epochs, pause_s=arguments.pause_s)
    results = tuner.fit()
    best = results.get_best_result()
    print(f"best of {len(results)} trials: {best.config}, loss {best.metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
