"""Every error condition of API.md: its type, what was given, and what to do.

Errors cross process boundaries, from a worker to the driver: each survives pickling.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch, Epoch, samplers
from dray.pytorch.trial_run import TrialRun
from dray.training.checkpoint.plain_state import UnsavableState
from dray.training.errors import SearcherMetricError
from dray.training.metrics.reducers import ReducerRegistry
from dray.training.parallel.distributed import NotUnderTorchrun
from tests.pytorch.fakes import FakeHost, OneWeight

Context = pytorch.PyTorchTrialContext


def fit(trial_class: Callable[[Context], Any], host: FakeHost, init: dict[str, Any] | None = None, **fit: Any) -> None:
    """Make a trial and train it, for two batches unless `fit` says otherwise."""
    with use_host(host), pytorch.init(**(init or {})) as context:
        pytorch.Trainer(trial_class(context), context).fit(**{"max_length": Batch(2), **fit})


def trial(**methods: Any) -> type[OneWeight]:
    """A trial that is sound but for these methods."""
    return type("Faulty", (OneWeight,), methods)


def wrapping(after: Callable[[OneWeight, Context], Any]) -> type[OneWeight]:
    """A trial that does something more in its constructor."""

    def construct(self: OneWeight, context: Context) -> None:
        OneWeight.__init__(self, context)
        after(self, context)

    return trial(__init__=construct)


def ask(question: Callable[[Context], Any], **init: Any) -> Callable[[FakeHost], Any]:
    """Ask a context outside of training."""

    def do(host: FakeHost) -> None:
        with use_host(host), pytorch.init(**init) as context:
            question(context)

    return do


def returns(value: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: value


def loads(loader: Callable[[], Any], **more: Any) -> dict[str, Any]:
    return {"build_training_data_loader": lambda self: loader(), **more}


def validates(loader: Callable[[], Any]) -> dict[str, Any]:
    return {"build_validation_data_loader": lambda self: loader()}


class Unchecked(OneWeight):
    """A trial with a loader of its own."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()


NOT_EVALUATE = {"evaluate_batch": pytorch.PyTorchTrial.evaluate_batch}


def own_loader(records: int) -> Callable[[], Any]:
    return lambda: torch.utils.data.DataLoader(torch.ones(records, 1), batch_size=2)  # type: ignore[arg-type]


def empty() -> pytorch.DataLoader:
    return pytorch.DataLoader(torch.ones(1, 1), batch_size=2, drop_last=True)


def strange(batch: Any) -> Callable[[], pytorch.DataLoader]:
    return lambda: pytorch.DataLoader(torch.ones(4, 1), batch_size=2, collate_fn=lambda rows: batch)


def wrap_schedule(after_wrapping: bool, schedule: Callable[[Any], Any]) -> Callable[[Context], Any]:
    def do(context: Context) -> None:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        if after_wrapping:
            context.wrap_optimizer(optimizer)
        context.wrap_lr_scheduler(schedule(optimizer), pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)

    return do


def scale_twice(context: Context) -> None:
    for _ in range(2):
        context.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False))


def scale_late(context: Context) -> None:
    context.wrap_model(nn.Linear(1, 1))
    context.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False))


def keeps_gradients(self: OneWeight, batch: Any, epoch_idx: int, batch_idx: int) -> None:
    self.context.backward(self.loss(batch))
    self.context.step_optimizer(self.optimizer, auto_zero_grads=False)


def reduce_with(function: Callable[[list[Any]], Any], name: str | None) -> None:
    registry = ReducerRegistry()
    registry.wrap_reducer(function, name=name)
    registry.cross_slot([registry.per_slot(training=True)], training=True)


def broken(values: list[Any]) -> float:
    raise LookupError("no such label")


def reducer_twice(context: Context) -> None:
    reducer = context.wrap_reducer(len, name="a")
    context.wrap_reducer(reducer, name="b")


def resume(other: type[OneWeight]) -> Callable[[FakeHost], None]:
    def do(host: FakeHost) -> None:
        fit(OneWeight, host)
        fit(other, host, max_length=Batch(3), latest_checkpoint=host.checkpoints()[0])

    return do


class Wider(OneWeight):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.models[0] = self.model = nn.Linear(3, 1)


class Richer(OneWeight):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.wrap_model(nn.Linear(1, 1))


def load_both_ways(host: FakeHost) -> None:
    fit(OneWeight, host)
    pytorch.load_trial_from_checkpoint_path(
        host.checkpoints()[0], trial_class=OneWeight, torch_load_kwargs={"map_location": "cpu"}, map_location="cpu"
    )


def torchrun_without(name: str) -> Callable[[FakeHost], None]:
    def do(host: FakeHost) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for known in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
                patch.setenv(known, "0" if known.endswith("RANK") else "1")
            patch.delenv(name)
            DistributedContext.from_torch_distributed()

    return do


def two_ranks() -> dict[str, int]:
    return {"rank": 0, "size": 2, "local_rank": 0, "local_size": 2, "cross_rank": 0, "cross_size": 1}


class Alone:
    """A transport of one."""

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        return [stuff] * 2

    def close(self) -> None: ...


def loader(**arguments: Any) -> Callable[[FakeHost], Any]:
    return lambda host: pytorch.DataLoader(**{"dataset": range(3), **arguments})


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def unsavable(host: FakeHost) -> None:
    class Remembering(pytorch.PyTorchCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": object()}

    fit(trial(build_callbacks=returns({"memory": Remembering()})), host)


@dataclass(frozen=True)
class Case:
    """What is done wrong, and which error says so.

    Args:
        given, cure: words of the message.
    """

    row: str
    do: Callable[[FakeHost], Any]
    kind: type[Exception]
    given: str
    cure: str


CASES = {
    "no method": Case("1.1", lambda h: type("T", (pytorch.PyTorchTrial,), {})(None), TypeError, "train_batch", "T"),
    "metrics of no kind": Case(
        "1.3",
        lambda h: fit(trial(train_batch=returns(3.0)), h),
        TypeError,
        "got 3.0 of type float",
        "a dict of metrics",
    ),
    "callbacks of no kind": Case(
        "1.4", lambda h: fit(trial(build_callbacks=returns([1])), h), TypeError, "got [1]", "must return a dict"
    ),
    "neither evaluates": Case(
        "1.5", lambda h: fit(trial(**NOT_EVALUATE), h), ValueError, "it overrides neither", "must override exactly one"
    ),
    "both evaluate": Case(
        "1.5",
        lambda h: fit(trial(evaluate_full_dataset=returns({})), h),
        ValueError,
        "it overrides both",
        "must override exactly one",
    ),
    "validation of no kind": Case(
        "1.6", lambda h: fit(trial(evaluate_batch=returns(None)), h), TypeError, "got None", "must return a dict"
    ),
    "full validation of no kind": Case(
        "1.8",
        lambda h: fit(trial(**NOT_EVALUATE, evaluate_full_dataset=returns(3.0)), h),
        TypeError,
        "got 3.0 of type float",
        "must return a dict",
    ),
    "reducers of other metrics": Case(
        "1.9",
        lambda h: fit(trial(evaluation_reducer=returns({"other": pytorch.Reducer.AVG})), h),
        ValueError,
        "got ['other']",
        "must name exactly the metrics of evaluate_batch(): ['validation_loss']",
    ),
    "reducer of no kind": Case(
        "1.9", lambda h: fit(trial(evaluation_reducer=returns("avg")), h), TypeError, "got 'avg'", "a pytorch.Reducer"
    ),
    "batch of nothing": Case(
        "1.10", lambda h: fit(trial(**loads(strange({"x": []}))), h), ValueError, "{'x': []}", "at least one record"
    ),
    "batch of no kind": Case(
        "1.10",
        lambda h: fit(trial(**loads(strange("text"))), h),
        TypeError,
        "of type builtins.str",
        "override PyTorchTrial.get_batch_length()",
    ),
    "validation metrics change": Case(
        "1.12",
        lambda h: fit(trial(evaluate_batch=lambda self, batch, batch_idx: {f"m{batch_idx}": 1.0}), h),
        ValueError,
        "['m0'] before, ['m1'] now",
        "must return the same metrics for every batch",
    ),
    "validation is empty": Case(
        "1.12", lambda h: fit(trial(**validates(empty)), h), RuntimeError, "without a batch", "check its dataset"
    ),
    "training is empty": Case(
        "2.30", lambda h: fit(trial(**loads(empty)), h), RuntimeError, "without a batch", "check its dataset"
    ),
    "no model": Case(
        "1.13",
        lambda h: fit(wrapping(lambda self, context: context.models.clear()), h),
        ValueError,
        "Faulty has wrapped no model",
        "call self.model = context.wrap_model(model)",
    ),
    "no optimizer": Case(
        "1.13",
        lambda h: fit(wrapping(lambda self, context: context.optimizers.clear()), h),
        ValueError,
        "Faulty has wrapped no optimizer",
        "call self.optimizer = context.wrap_optimizer(optimizer)",
    ),
    "training metrics change": Case(
        "1.15",
        lambda h: fit(trial(train_batch=lambda self, batch, epoch_idx, batch_idx: {f"m{batch_idx}": 1.0}), h),
        ValueError,
        "['m0'] before, ['m1'] now",
        "must return the same metrics for every batch",
    ),
    "no hyperparameters": Case(
        "2.1", ask(lambda c: c.get_hparams()), ValueError, "no hyperparameters", "pytorch.init(hparams=...)"
    ),
    "unknown hyperparameter": Case(
        "2.1",
        ask(lambda c: c.get_hparam("lr"), hparams={"rate": 1}),
        ValueError,
        "no hyperparameter 'lr'",
        "there are: rate",
    ),
    "no batch size": Case(
        "2.2", ask(lambda c: c.get_per_slot_batch_size()), ValueError, "'global_batch_size'", "init(hparams=...)"
    ),
    "no global batch size": Case(
        "2.2", ask(lambda c: c.get_global_batch_size()), ValueError, "'global_batch_size'", "init(hparams=...)"
    ),
    "batch size of no kind": Case(
        "2.3",
        ask(lambda c: None, hparams={"global_batch_size": "8"}),
        ValueError,
        "got '8' of type str",
        "must be an int",
    ),
    "batch size below the slots": Case(
        "2.3",
        lambda h: TrialRun(
            host=h,
            peers=DistributedContext(**two_ranks(), transport=Alone()),
            device=torch.device("cpu"),
            hparams={"global_batch_size": 1},
        ),
        ValueError,
        "is 1, less than the trial's 2 slot(s)",
        "each slot needs at least one record",
    ),
    "no config": Case(
        "2.4", ask(lambda c: c.get_experiment_config()), ValueError, "no experiment config", "init(exp_conf=...)"
    ),
    "no data config": Case(
        "2.4", ask(lambda c: c.get_data_config()), ValueError, "no experiment config", "init(exp_conf=...)"
    ),
    "logging of no kind": Case(
        "2.10", ask(lambda c: c.set_enable_tensorboard_logging(1)), AssertionError, "got 1", "must be a bool"
    ),
    "stop of no kind": Case(
        "2.12", ask(lambda c: c.set_stop_requested("x")), AssertionError, "got 'x'", "must be a bool"
    ),
    **{
        f"{name} before training": Case(
            "2.13",
            ask(lambda c, name=name: getattr(c, name)()),
            RuntimeError,
            "training has not started",
            "train_batch",
        )
        for name in ("is_epoch_start", "is_epoch_end", "current_train_epoch", "current_train_batch")
    },
    "model of no kind": Case(
        "2.16", ask(lambda c: c.wrap_model(len)), TypeError, "got <built-in function len>", "a torch.nn.Module"
    ),
    "model twice": Case(
        "2.16",
        lambda h: fit(wrapping(lambda self, context: context.wrap_model(self.model)), h),
        ValueError,
        "twice",
        "with the same model",
    ),
    "optimizer of no kind": Case(
        "2.17", ask(lambda c: c.wrap_optimizer(1)), TypeError, "got 1", "needs a torch.optim.Optimizer"
    ),
    "no backward pass": Case(
        "2.17",
        ask(lambda c: c.wrap_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), backward_passes_per_step=0)),
        ValueError,
        "got 0",
        "must be at least 1",
    ),
    "no aggregation": Case(
        "2.20", ask(lambda c: None, aggregation_frequency=0), ValueError, "got 0", "must be an int >= 1"
    ),
    "gradients kept while aggregating": Case(
        "2.21",
        lambda h: fit(trial(train_batch=keeps_gradients), h, {"aggregation_frequency": 2}),
        ValueError,
        "aggregation_frequency=2",
        "leave auto_zero_grads at True",
    ),
    "schedule of another's optimizer": Case(
        "2.22",
        ask(wrap_schedule(False, lambda o: torch.optim.lr_scheduler.StepLR(o, 1))),
        ValueError,
        "the LR scheduler's optimizer is not wrapped",
        "optimizer = context.wrap_optimizer(optimizer)",
    ),
    "schedule by metric": Case(
        "2.22",
        ask(wrap_schedule(True, torch.optim.lr_scheduler.ReduceLROnPlateau)),
        ValueError,
        "ReduceLROnPlateau.step() needs a metric",
        "wrap it with MANUAL_STEP",
    ),
    "scaler twice": Case("2.24", ask(scale_twice), RuntimeError, "called twice", "a trial has one scaler"),
    "scaler after the model": Case(
        "2.24", ask(scale_late), RuntimeError, "called after wrap_model", "call it before wrap_model"
    ),
    "half precision of no kind": Case(
        "2.25",
        ask(lambda c: c.experimental.use_amp(torch.float64)),
        ValueError,
        "got torch.float64",
        "must be torch.float16 or torch.bfloat16",
    ),
    "half precision twice": Case(
        "2.25",
        ask(lambda c: (c.experimental.use_amp(), c.experimental.use_amp())),
        RuntimeError,
        "called twice",
        "call it once",
    ),
    "half precision beside a scaler": Case(
        "2.25",
        ask(lambda c: (c.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False)), c.experimental.use_amp())),
        RuntimeError,
        "use_amp can't be combined with wrap_scaler()",
        "call one of the two",
    ),
    "scaler beside half precision": Case(
        "2.24",
        ask(lambda c: (c.experimental.use_amp(), c.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False)))),
        RuntimeError,
        "wrap_scaler can't be combined with use_amp()",
        "call one of the two",
    ),
    "training loader of no kind": Case(
        "2.27",
        lambda h: fit(trial(**loads(own_loader(4))), h),
        RuntimeError,
        "got torch.utils.data.dataloader.DataLoader",
        "context.experimental.disable_dataset_reproducibility_checks()",
    ),
    "validation loader of no kind": Case(
        "2.27",
        lambda h: fit(trial(**validates(own_loader(4))), h),
        RuntimeError,
        "got torch.utils.data.dataloader.DataLoader",
        "context.experimental.disable_dataset_reproducibility_checks()",
    ),
    "epochs that can't be counted": Case(
        "2.29",
        lambda h: fit(
            type("Unsized", (Unchecked,), loads(lambda: iter([torch.ones(2, 1)] * 9))), h, validation_period=Epoch(1)
        ),
        ValueError,
        "validation_period=Epoch(1)",
        "use pytorch.Batch(n)",
    ),
    "data that end": Case(
        "2.30",
        lambda h: fit(type("Short", (Unchecked,), loads(own_loader(2))), h, max_length=Batch(9)),
        pytorch.DataExhausted,
        "ended after 1 batches",
        "samplers.RepeatBatchSampler",
    ),
    "some numbers": Case(
        "3.1",
        lambda h: DistributedContext(rank=0, size=2),
        ValueError,
        "missing: local_rank, local_size, cross_rank, cross_size",
        "takes all of",
    ),
    "numbers without names": Case("3.1", lambda h: DistributedContext(0, 2), TypeError, "3 were given", "1 positional"),
    "several machines without an address": Case(
        "3.1",
        lambda h: DistributedContext(**{**two_ranks(), "local_size": 1}),
        ValueError,
        "size=2 but local_size=1",
        "needs chief_ip",
    ),
    **{
        f"torchrun without {name}": Case(
            "3.5", torchrun_without(name), NotUnderTorchrun, f"{name}, which is not set", "torchrun"
        )
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    },
    "several processes without a backend": Case(
        "3.7",
        ask(lambda c: None, distributed=DistributedContext(**two_ranks(), transport=Alone())),
        RuntimeError,
        "training in 2 process(es)",
        "torch.distributed.init_process_group(",
    ),
    "iterable dataset": Case(
        "4.2", loader(dataset=Stream()), ValueError, "an IterableDataset", "disable_dataset_reproducibility_checks()"
    ),
    "no batching": Case("4.2", loader(batch_size=None), ValueError, "batch_size=None", "needs a batch_sampler"),
    "workers below none": Case("4.2", loader(num_workers=-1), ValueError, "got -1", "must be >= 0"),
    "timeout below none": Case("4.2", loader(timeout=-1), ValueError, "got -1", "must be >= 0"),
    "prefetch without workers": Case(
        "4.2", loader(prefetch_factor=2), ValueError, "prefetch_factor=2", "needs num_workers > 0"
    ),
    "persistence without workers": Case(
        "4.2", loader(persistent_workers=True), ValueError, "persistent_workers=True", "needs num_workers > 0"
    ),
    "sampler and shuffle": Case("4.2", loader(sampler=[0], shuffle=True), ValueError, "shuffle=True", "not both"),
    **{
        f"batch_sampler and {next(iter(other))}": Case(
            "4.2",
            loader(batch_sampler=[[0]], **other),
            ValueError,
            f"got {next(iter(other))} too",
            "batch_sampler can't be combined with",
        )
        for other in ({"batch_size": 2}, {"shuffle": True}, {"sampler": [0]}, {"drop_last": True})
    },
    "rank below none": Case(
        "4.10", lambda h: samplers.DistributedBatchSampler([[0]], 2, -1), ValueError, "got -1", "must be >= 0 and < "
    ),
    "rank beyond all": Case(
        "4.10", lambda h: samplers.DistributedBatchSampler([[0]], 2, 2), ValueError, "got 2", "num_workers=2"
    ),
    "no shard": Case(
        "4.10", lambda h: samplers.DistributedBatchSampler([[0]], 0, 0), ValueError, "got 0", "must be >= 1"
    ),
    "mode of no kind": Case(
        "5.1",
        lambda h: pytorch.LRScheduler(object(), 2),  # type: ignore[arg-type]
        TypeError,
        "got 2",
        "must be a pytorch.LRScheduler.StepMode",
    ),
    "frequency of none": Case(
        "5.2",
        lambda h: pytorch.LRScheduler(object(), pytorch.LRScheduler.StepMode.MANUAL_STEP, 0),
        ValueError,
        "got 0",
        "must be an int >= 1",
    ),
    "reducer without methods": Case(
        "6.2", lambda h: type("R", (pytorch.MetricReducer,), {})(), TypeError, "abstract", "cross_slot_reduce"
    ),
    "a name and a dict": Case(
        "6.4",
        lambda h: reduce_with(lambda values: {"a": 1}, "auc"),
        ValueError,
        "got {'a': 1}",
        "must not return a dict",
    ),
    "neither name nor dict": Case(
        "6.4", lambda h: reduce_with(lambda values: 0.5, None), ValueError, "got 0.5", "must return a dict"
    ),
    "reducer that fails": Case(
        "6.4", lambda h: reduce_with(broken, "auc"), ValueError, "LookupError('no such label')", "broken (name='auc')"
    ),
    "reducer twice": Case("6.4", ask(reducer_twice), AssertionError, "name='b'", "twice with the same reducer"),
    "reducer that is none": Case(
        "6.4",
        ask(lambda c: c.wrap_reducer(3, name="a")),
        AssertionError,
        "got 3",
        "an instance of pytorch.MetricReducer",
    ),
    "init without names": Case("8.1", lambda h: pytorch.init({"lr": 1}), TypeError, "1 was given", "0 positional"),
    "no length": Case("8.3", lambda h: fit(OneWeight, h, max_length=None), ValueError, "needs max_length", "Epoch(1)"),
    "length of no kind": Case(
        "8.3", lambda h: fit(OneWeight, h, max_length=3), TypeError, "got 3 of type int", "a pytorch.Batch or"
    ),
    "length that is a schedule": Case(
        "8.3", lambda h: fit(OneWeight, h, max_length=Batch([3])), TypeError, "got Batch([3])", "must hold an int"
    ),
    "length of nothing": Case(
        "8.3", lambda h: fit(OneWeight, h, max_length=Batch(0)), ValueError, "got Batch(0)", "at least 1"
    ),
    **{
        f"{name} of no kind": Case(
            "8.3",
            lambda h, name=name: fit(OneWeight, h, **{name: 1}),
            TypeError,
            "got 1 of type int",
            f"{name} must be",
        )
        for name in ("validation_period", "checkpoint_period", "reporting_period")
    },
    "unit of no kind": Case(
        "8.3",
        lambda h: Batch(1.5),  # type: ignore[arg-type]
        TypeError,
        "got 1.5 of type float",
        "takes an int",
    ),
    "policy that is none": Case(
        "8.7",
        lambda h: fit(OneWeight, h, checkpoint_policy="some"),
        ValueError,
        "got 'some'",
        "one of 'best', 'all', 'none'",
    ),
    "invalid without words": Case(
        "8.12",
        lambda h: pytorch.InvalidHP(3),  # type: ignore[arg-type]
        TypeError,
        "got 3 of type int",
        "a message (str)",
    ),
    "metric that is not there": Case(
        "8.16",
        lambda h: (setattr(h, "metrics", ("accuracy",)), fit(OneWeight, h)),
        SearcherMetricError,
        "'accuracy', but validation returned ['validation_loss']",
        "return it from evaluate_batch()",
    ),
    "metric that is no number": Case(
        "9.3b",
        lambda h: fit(trial(evaluate_batch=returns({"a": nn.Linear(1, 1)})), h),
        TypeError,
        "of type Linear for the metric 'a'",
        "return a number, or use context.wrap_reducer()",
    ),
    "metric that is no JSON": Case(
        "9.3b",
        lambda h: fit(trial(**NOT_EVALUATE, evaluate_full_dataset=returns({"a": nn.Linear(1, 1)})), h),
        TypeError,
        "'a' of type Linear",
        "return numbers, strings",
    ),
    "state that is no data": Case(
        "9.2", unsavable, UnsavableState, "callback 'memory' at ['seen'] is of type builtins.object", "Return tensors"
    ),
    "arguments twice": Case("9.4", load_both_ways, ValueError, "(map_location)", "torch_load_kwargs only"),
    "no such path": Case(
        "9.4",
        lambda h: pytorch.load_trial_from_checkpoint_path("/nowhere", trial_class=OneWeight),
        FileNotFoundError,
        "'/nowhere'",
        "no such directory",
    ),
    "no such checkpoint": Case(
        "9.7",
        lambda h: fit(OneWeight, h, latest_checkpoint="nowhere"),
        FileNotFoundError,
        "'nowhere'",
        "no such directory",
    ),
    "other shapes": Case(
        "9.7", resume(Wider), ValueError, "size mismatch for weight", "load it into the trial class that wrote it"
    ),
    "more models": Case(
        "9.7",
        resume(Richer),
        ValueError,
        "the trial has wrapped 2 model(s)",
        "load it into the trial class that wrote it",
    ),
}


@pytest.mark.api("1.1", "1.3", "1.4", "1.5", "1.6", "1.8", "1.9", "1.10", "1.12", "1.13", "1.15")
@pytest.mark.api("2.1", "2.2", "2.3", "2.4", "2.10", "2.12", "2.13", "2.16", "2.17")
@pytest.mark.api("2.20", "2.21", "2.22", "2.24", "2.25", "2.27", "2.29", "2.30")
@pytest.mark.api("3.1", "3.5", "3.7")
@pytest.mark.api("4.2", "4.10")
@pytest.mark.api("5.1", "5.2")
@pytest.mark.api("6.2", "6.4")
@pytest.mark.api("8.1", "8.3", "8.7", "8.12", "8.16")
@pytest.mark.api("9.2", "9.3b", "9.4", "9.7")
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_a_mistake_is_an_error_with_the_cure(case: Case, tmp_path: Path) -> None:
    with pytest.raises(case.kind) as caught:
        case.do(FakeHost(tmp_path))
    error = caught.value
    assert type(error) is case.kind
    assert case.given in str(error)
    assert case.cure in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (case.kind, str(error))


def test_rows_of_the_mistakes_are_those_of_the_marks() -> None:
    marks = [mark for mark in vars(test_a_mistake_is_an_error_with_the_cure)["pytestmark"] if mark.name == "api"]
    assert {case.row for case in CASES.values()} == {row for mark in marks for row in mark.args}
