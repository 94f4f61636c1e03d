"""One trial with the real Determined, in its local mode: ``python3 reference.py SPEC.json OUT.json``, or by torchrun.

Run with the Python that has Determined, in a copy of the model directory. It says the few things that a cluster would
have said (the hyperparameters, the seed, how long), and writes down what the trial reports. It needs nothing of dray.

One thing it is told of dray: the order of ``shuffle=True``. Determined draws it from the process's random numbers, dray
makes it from the trial's seed and the epoch, so that a resumed run needs no history; both are as random. Given the same
order, all the rest is to be equal. A model directory without ``shuffle=True`` runs with Determined as it is.
"""

import contextlib
import json
import os
import random
import runpy
import sys

import determined
import numpy as np
import torch
from determined import core, load, pytorch


class Recorded:
    """All that is reported, at full precision, by the number of batches trained; `batches` has each batch's own."""

    def __init__(self):
        self.told = {"batches": {}, "training": {}, "validation": {}}

    def report(self, train, group, steps_completed, metrics, batch_metrics=None):
        self.told[group][steps_completed] = _numbers(metrics)
        if group == "training":
            each = batch_metrics or [metrics]
            first = steps_completed - len(each) + 1
            self.told["batches"].update({first + n: _numbers(metrics) for n, metrics in enumerate(each)})


def _numbers(metrics):
    return {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}


def _unit(raw):
    """Batch or Epoch, from ``{batches: 10}`` or ``{epochs: 1}``."""
    [(unit, value)] = raw.items()
    return {"batches": pytorch.Batch, "epochs": pytorch.Epoch}[unit](value)


def _seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Shuffled(torch.utils.data.RandomSampler):
    """The order that dray's documentation gives for an epoch of `shuffle=True`."""

    seed, epoch = 0, 0

    def __iter__(self):
        generator = torch.Generator()
        generator.manual_seed(random.Random(f"{self.seed}:shuffle:{self.epoch}").getrandbits(63))
        self.epoch += 1
        return iter(torch.randperm(len(self.data_source), generator=generator).tolist())


def shuffle_by(seed):
    """And no draw for torch's loaders, which have a generator of their own with dray."""
    Shuffled.seed = seed
    torch.utils.data.RandomSampler = Shuffled
    made = pytorch.DataLoader.get_data_loader

    def get_data_loader(self, *args, **kwargs):
        loader = made(self, *args, **kwargs)
        loader.generator = torch.Generator()
        return loader

    pytorch.DataLoader.get_data_loader = get_data_loader


def train_class(spec):
    """What Determined's harness does on a cluster with an entrypoint that is a class."""
    config = spec["config"]
    searcher = config["searcher"]
    length = searcher.get("max_length") or {searcher["time_metric"]: searcher["max_time"]}
    optimizations = config.get("optimizations", {})
    periods = {
        argument: _unit(config[field])
        for argument, field in {
            "validation_period": "min_validation_period",
            "checkpoint_period": "min_checkpoint_period",
        }.items()
        if field in config
    }
    trial_class = load.trial_class_from_entrypoint(spec["class"])
    distributed = None
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        distributed = core.DistributedContext.from_torch_distributed()
    _seed(spec["seed"])
    with pytorch.init(
        hparams=spec["hparams"],
        exp_conf=config,
        distributed=distributed,
        aggregation_frequency=optimizations.get("aggregation_frequency", 1),
    ) as context:
        context._set_default_average_aggregated_gradients(optimizations.get("average_aggregated_gradients", True))
        pytorch.Trainer(trial_class(context), context).fit(
            max_length=_unit(length),
            reporting_period=pytorch.Batch(config.get("scheduling_unit", 100)),
            checkpoint_policy="all",
            step_zero_validation=config.get("perform_initial_validation", False),
            **periods,
        )


def main(spec_path, out):
    with open(spec_path) as file:
        spec = json.load(file)
    recorded = Recorded()
    core.DummyTrainContext._report_trial_metrics = lambda *args, **kwargs: recorded.report(*args, **kwargs)
    if spec["shuffled"]:
        shuffle_by(spec["seed"])
    sys.path.insert(0, os.getcwd())
    if spec["class"]:
        train_class(spec)
    else:
        sys.argv = spec["command"]
        with contextlib.suppress(SystemExit):
            runpy.run_path(spec["command"][0], run_name="__main__")
    if int(os.environ.get("RANK", 0)) == 0:
        versions = {"determined": determined.__version__, "torch": torch.__version__.partition("+")[0]}
        with open(out, "w") as file:
            json.dump({"versions": versions, **recorded.told}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
