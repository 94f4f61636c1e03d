"""The loggers that a config names: MLflow, Weights & Biases."""

from __future__ import annotations

import functools
import importlib.util
import os

from dray.config.schema import ExperimentConfig
from dray.errors import ConfigError
from dray.observers.observer import Make, Observer
from dray.records.directory import ExperimentDirectory
from dray.text import one_line


def check_loggers(config: ExperimentConfig) -> None:
    """Check that the packages of the config's loggers are installed; `ConfigError` if one is not."""
    faults = [
        (f"loggers.{name}", f"the package {name} is not installed: pip install 'dray-train[loggers]', or remove it")
        for name in _named(config)
        if importlib.util.find_spec(name) is None
    ]
    if faults:
        raise ConfigError(faults)


def try_loggers(config: ExperimentConfig) -> None:
    """Write to MLflow and read from it before anything trains; `ConfigError` if that fails."""
    if config.loggers.mlflow is None:
        return
    from dray.observers.mlflow_runs import open_experiment

    try:
        client, experiment = open_experiment(config)
        client.set_experiment_tag(experiment, "dray.latest", config.name)
        client.get_experiment(experiment)
    except Exception as error:  # each kind of store has its own exceptions
        given = config.loggers.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "MLflow's default"
        what = f"{given} can't be used: {one_line(error)}; without a server, give a database: sqlite:////mnt/mlflow.db"
        raise ConfigError([("loggers.mlflow.tracking_uri", what)]) from error


def makes(directory: ExperimentDirectory, config: ExperimentConfig) -> dict[str, Make]:
    """The config's loggers, by name."""
    return {name: functools.partial(_made, name, directory, config) for name in _named(config)}


def _made(name: str, directory: ExperimentDirectory, config: ExperimentConfig) -> Observer:
    # Imported in the observer's thread, because each import takes a second or more.
    if name == "mlflow":
        from dray.observers.mlflow_runs import MLflowRuns

        return MLflowRuns(directory, config)
    from dray.observers.wandb_runs import WandBRuns

    return WandBRuns(directory, config)


def _named(config: ExperimentConfig) -> list[str]:
    return [name for name in type(config.loggers).model_fields if getattr(config.loggers, name) is not None]
