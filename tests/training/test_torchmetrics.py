"""Metrics of torchmetrics over one rank and over two: what torchmetrics itself says of all the data."""

from __future__ import annotations

import importlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.training.metrics.reducers import TorchMetricReducer
from tests.pytorch.fakes import FakeHost, OneWeight

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all:UserWarning"),
]


class ImportedLate:
    """torchmetrics, which takes two seconds to import with what it brings, also where none of these tests is chosen."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # what pytest asks all that a module has, to find its fixtures
            raise AttributeError(name)
        return getattr(importlib.import_module("torchmetrics"), name)


torchmetrics: Any = ImportedLate()

BATCHES = 7


def data(kind: str) -> list[tuple[torch.Tensor, ...]]:
    draw = torch.Generator().manual_seed(5)
    if kind == "binary":
        return [(torch.rand(6, generator=draw), torch.randint(2, (6,), generator=draw)) for _ in range(BATCHES)]
    if kind == "classes":
        return [(torch.randn(6, 3, generator=draw), torch.randint(3, (6,), generator=draw)) for _ in range(BATCHES)]
    if kind == "values":
        return [(torch.randn(6, generator=draw),) for _ in range(BATCHES)]
    return [(torch.randn(6, generator=draw), torch.randn(6, generator=draw)) for _ in range(BATCHES)]


METRICS: dict[str, tuple[str, Callable[[], Any]]] = {
    "counts": ("classes", lambda: torchmetrics.classification.MulticlassF1Score(3)),
    "one value a class": ("classes", lambda: torchmetrics.classification.MulticlassAccuracy(3, average=None)),
    "confusion matrix": ("classes", lambda: torchmetrics.classification.MulticlassConfusionMatrix(3)),
    "lists": ("binary", lambda: torchmetrics.classification.BinaryAUROC(thresholds=None)),
    "sums": ("pairs", lambda: torchmetrics.regression.R2Score()),
    "states that are not added": ("pairs", lambda: torchmetrics.regression.PearsonCorrCoef()),
    "ranks of all values": ("pairs", lambda: torchmetrics.regression.SpearmanCorrCoef()),
    "mean": ("values", lambda: torchmetrics.MeanMetric()),
    "maximum": ("values", lambda: torchmetrics.MaxMetric()),
    "values in their order": ("values", lambda: torchmetrics.CatMetric()),
    "a dict": (
        "classes",
        lambda: torchmetrics.ClasswiseWrapper(torchmetrics.classification.MulticlassRecall(3, average=None)),
    ),
    "a collection with common states": (
        "classes",
        lambda: torchmetrics.MetricCollection(
            {
                "recall": torchmetrics.classification.MulticlassRecall(3),
                "precision": torchmetrics.classification.MulticlassPrecision(3),
                "auroc": torchmetrics.classification.MulticlassAUROC(3),
            }
        ),
    ),
}


def reduced(make: Callable[[], Any], ranks: list[list[tuple[torch.Tensor, ...]]]) -> Any:
    """The metrics of batches spread over ranks, with contributions pickled as between processes."""
    reducers = [TorchMetricReducer(make()) for _ in ranks]
    words = []
    for reducer, batches in zip(reducers, ranks, strict=True):
        for batch in batches:
            reducer.metric.update(*batch)
        words.append(pickle.loads(pickle.dumps(reducer.per_slot_reduce())))
    results = [reducer.cross_slot_reduce(words) for reducer in reducers]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    return results[0]


@pytest.mark.api("6.2", "6.3")
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_result_is_that_of_torchmetrics_on_all_the_data(name: str, size: int) -> None:
    kind, make = METRICS[name]
    batches = data(kind)
    whole = make()
    for batch in batches:
        whole.update(*batch)
    found = reduced(make, [batches[rank::size] for rank in range(size)])
    torch.testing.assert_close(found, whole.compute())


@pytest.mark.api("6.2")
@pytest.mark.parametrize("name", ["lists", "counts", "mean"])
def test_a_rank_without_a_batch_adds_nothing(name: str) -> None:
    kind, make = METRICS[name]
    batches = data(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(reduced(make, [batches, []]), reduced(make, [batches]))


class Measured(OneWeight):
    """Each workload's mean of the numbers of its batches."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.mean = context.wrap_reducer(torchmetrics.MeanMetric(), name="mean")
        both = torchmetrics.MetricCollection({"least": torchmetrics.MinMetric(), "most": torchmetrics.MaxMetric()})
        self.both = context.wrap_reducer(both, for_training=False)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.mean.update(torch.tensor(float(batch_idx)))
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.mean.update(torch.tensor(float(batch_idx)))
        self.both.update(torch.tensor(float(batch_idx)))
        return super().evaluate_batch(batch, batch_idx)


@pytest.mark.api("6.2", "6.4", "6.5")
def test_a_trials_metric_is_reset_and_reported_with_each_workload(tmp_path: Any) -> None:
    host = FakeHost(tmp_path)
    with use_host(host), pytorch.init() as context:
        trial = Measured(context)
        pytorch.Trainer(trial, context).fit(max_length=Batch(6), reporting_period=Batch(4))
    assert isinstance(trial.mean, torchmetrics.MeanMetric), "the trial's own metric"
    assert [(r.training or {})["mean"] for r in host.reports] == [1.5, 4.5]
    validation = dict(host.reports[-1].validation or {})
    assert {name: validation[name] for name in ("mean", "least", "most")} == {"mean": 1.0, "least": 0.0, "most": 2.0}
