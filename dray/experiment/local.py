"""One trial of an experiment in the caller's own process: for a debugger, or a first look. No Ray."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from dray import pytorch
from dray.experiment.config import ExperimentConfig, build_method, build_space
from dray.experiment.entrypoint import load_trial_class
from dray.hosts import LocalHost, use_host
from searchers.search import Search

log = logging.getLogger(__name__)


class OneTrialHost(LocalHost):
    """A local host that knows the search's length, rungs and metric: the trial trains as it would in the search.

    Args:
        config: of the experiment.
        search: at its start; trial 0 is the one to run.
        code_dir: the model's code, which each checkpoint has a copy of.
        directory: for metrics and checkpoints; a fresh one below ``~/dray_results/local`` if None.
    """

    # One trial is the whole experiment here, so its best is known.
    best_supported = True

    def __init__(self, config: ExperimentConfig, search: Search, *, code_dir: Path, directory: Path | None) -> None:
        super().__init__(directory, trial_seed=search.seed_of(0), code_dir=code_dir)
        length = config.searcher.max_length
        self.metric = config.searcher.metric
        self.max_length = length.to_unit()
        self.rungs = [type(self.max_length)(int(rung)) for rung in search.method.rungs]
        self._sign = 1 if config.searcher.smaller_is_better else -1
        self._best = math.inf

    def worth_saving(self, validation: Mapping[str, object]) -> bool:
        value = validation.get(self.metric or "")
        score = self._sign * value if isinstance(value, int | float) else math.inf
        if not score < self._best:  # also where it is not a number
            return False
        self._best = score
        return True


def run_local(
    config: ExperimentConfig,
    model_dir: str | os.PathLike[str],
    *,
    trial: type[pytorch.PyTorchTrial] | None = None,
    path: str | os.PathLike[str] | None = None,
) -> Path:
    """Train trial 0 of an experiment, with the hyperparameters and the seed that the search would give it.

    Args:
        config: Any experiment; ``resources`` are ignored, there is one process.
        model_dir: The directory of the model's code.
        trial: The trial's class; by default ``config.entrypoint`` of ``model_dir``.
        path: Where metrics and checkpoints go; a fresh directory below ``~/dray_results/local`` by default.

    Returns:
        That directory.

    Raises:
        EntrypointError: the class cannot be loaded. Errors of the trial itself are not caught: a debugger sees them.
    """
    trial_class = trial if trial is not None else load_trial_class(config.entrypoint, model_dir)
    search = Search(
        build_method(config),
        build_space(config),
        seed=config.reproducibility.experiment_seed,
        smaller_is_better=config.searcher.smaller_is_better,
        log=lambda record: None,
    )
    search.start()
    hparams = dict(search.params(0))
    host = OneTrialHost(
        config, search, code_dir=Path(model_dir).resolve(), directory=None if path is None else Path(path)
    )
    log.info("trial 0 of %s, in this process: %s", config.name, hparams)
    period, saving = config.min_validation_period, config.min_checkpoint_period
    with host, use_host(host), pytorch.init(hparams=hparams, exp_conf=config.to_dict()) as context:
        pytorch.Trainer(trial_class(context), context).fit(
            validation_period=None if period is None else period.to_unit(),
            checkpoint_period=None if saving is None else saving.to_unit(),
            checkpoint_policy=config.checkpoint_policy,
        )
    return host.directory
