"""Every error condition of API.md: its type, what was given, and what to do.

Errors cross process boundaries, from a worker to the driver: each survives pickling.
"""

from __future__ import annotations

import pickle
import re
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
from tests.core.test_distributed import nodes
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


def scales(context: Context) -> None:
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


def resume(other: type[OneWeight]) -> Callable[[FakeHost], None]:
    def do(host: FakeHost) -> None:
        fit(OneWeight, host)
        fit(other, host, max_length=Batch(3), latest_checkpoint=host.checkpoints()[0])

    return do


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


class Alone:
    """A transport of one."""

    def allgather(self, stuff: Any, timeout_s: float | None = None) -> list[Any]:
        return [stuff] * 2

    def close(self) -> None: ...


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
    """What is done wrong, and which error says so, with which words: what was given, and what to do."""

    do: Callable[[FakeHost], Any]
    kind: type[Exception]
    words: str


def training(kind: type[Exception], words: str, **methods: Any) -> Case:
    """A trial that is sound but for these methods trains."""
    return Case(lambda host: fit(trial(**methods), host), kind, words)


def fitting(kind: type[Exception], words: str, **arguments: Any) -> Case:
    """A sound trial trains with these arguments of `fit()`."""
    return Case(lambda host: fit(OneWeight, host, **arguments), kind, words)


def asked(question: Callable[[Context], Any], kind: type[Exception], words: str, **init: Any) -> Case:
    """A context is asked outside of training."""
    return Case(ask(question, **init), kind, words)


def loading(kind: type[Exception], words: str, **arguments: Any) -> Case:
    return Case(lambda host: pytorch.DataLoader(**{"dataset": range(3), **arguments}), kind, words)


CASES = {
    "1.1 no method": Case(lambda h: type("T", (pytorch.PyTorchTrial,), {})(None), TypeError, "T ... train_batch"),
    "1.3 metrics of no kind": training(TypeError, "a dict ... got 3.0 of type float", train_batch=returns(3.0)),
    "1.4 callbacks of no kind": training(TypeError, "must return a dict ... got [1]", build_callbacks=returns([1])),
    "1.5 neither evaluates": training(ValueError, "must override exactly one ... it overrides neither", **NOT_EVALUATE),
    "1.5 both evaluate": training(ValueError, "exactly one ... it overrides both", evaluate_full_dataset=returns({})),
    "1.6 validation of no kind": training(TypeError, "must return a dict ... got None", evaluate_batch=returns(None)),
    "1.8 full validation of no kind": training(
        TypeError, "must return a dict ... got 3.0 of type float", **NOT_EVALUATE, evaluate_full_dataset=returns(3.0)
    ),
    "1.9 reducers of other metrics": training(
        ValueError,
        "must name exactly the metrics of evaluate_batch(): ['validation_loss'] ... got ['other']",
        evaluation_reducer=returns({"other": pytorch.Reducer.AVG}),
    ),
    "1.9 reducer of no kind": training(TypeError, "a pytorch.Reducer ... got 'avg'", evaluation_reducer=returns("avg")),
    "1.10 batch of nothing": training(ValueError, "at least one record ... {'x': []}", **loads(strange({"x": []}))),
    "1.10 batch of no kind": training(
        TypeError, "of type builtins.str ... override PyTorchTrial.get_batch_length()", **loads(strange("text"))
    ),
    "1.12 validation metrics change": training(
        ValueError,
        "must return the same metrics for every batch ... ['m0'] before, ['m1'] now",
        evaluate_batch=lambda self, batch, batch_idx: {f"m{batch_idx}": 1.0},
    ),
    "1.12 validation is empty": training(RuntimeError, "without a batch ... check its dataset", **validates(empty)),
    "2.30 training is empty": training(RuntimeError, "without a batch ... check its dataset", **loads(empty)),
    "1.13 no model": Case(
        lambda h: fit(wrapping(lambda self, context: context.models.clear()), h),
        ValueError,
        "Faulty has wrapped no model ... call self.model = context.wrap_model(model)",
    ),
    "1.13 no optimizer": Case(
        lambda h: fit(wrapping(lambda self, context: context.optimizers.clear()), h),
        ValueError,
        "Faulty has wrapped no optimizer ... call self.optimizer = context.wrap_optimizer(optimizer)",
    ),
    "1.15 training metrics change": training(
        ValueError,
        "must return the same metrics for every batch ... ['m0'] before, ['m1'] now",
        train_batch=lambda self, batch, epoch_idx, batch_idx: {f"m{batch_idx}": 1.0},
    ),
    "2.1 no hyperparameters": asked(lambda c: c.get_hparams(), ValueError, "no hyperparameters ... init(hparams="),
    "2.1 unknown hyperparameter": asked(
        lambda c: c.get_hparam("lr"), ValueError, "no hyperparameter 'lr' ... there are: rate", hparams={"rate": 1}
    ),
    "2.2 no batch size": asked(lambda c: c.get_per_slot_batch_size(), ValueError, "'global_batch_size' ... init("),
    "2.2 no global batch size": asked(lambda c: c.get_global_batch_size(), ValueError, "'global_batch_size' ... "),
    "2.3 batch size of no kind": asked(
        lambda c: None, ValueError, "must be an int ... got '8' of type str", hparams={"global_batch_size": "8"}
    ),
    "2.3 batch size below the slots": Case(
        lambda h: TrialRun(
            host=h,
            peers=DistributedContext(**nodes(2)[0], transport=Alone()),
            device=torch.device("cpu"),
            hparams={"global_batch_size": 1},
        ),
        ValueError,
        "is 1, less than the trial's 2 slot(s) ... each slot needs at least one record",
    ),
    "2.4 no config": asked(lambda c: c.get_experiment_config(), ValueError, "no experiment config ... init(exp_conf="),
    "2.4 no data config": asked(lambda c: c.get_data_config(), ValueError, "no experiment config ... init(exp_conf="),
    "2.10 logging of no kind": asked(lambda c: c.set_enable_tensorboard_logging(1), AssertionError, "a bool ... got 1"),
    "2.12 stop of no kind": asked(lambda c: c.set_stop_requested("x"), AssertionError, "must be a bool ... got 'x'"),
    **{
        f"2.13 {name} before training": Case(
            ask(lambda c, name=name: getattr(c, name)()), RuntimeError, "training has not started ... train_batch"
        )
        for name in ("is_epoch_start", "is_epoch_end", "current_train_epoch", "current_train_batch")
    },
    "2.16 model of no kind": asked(
        lambda c: c.wrap_model(len), TypeError, "torch.nn.Module ... got <built-in function"
    ),
    "2.16 model twice": Case(
        lambda h: fit(wrapping(lambda self, context: context.wrap_model(self.model)), h),
        ValueError,
        "twice ... with the same model",
    ),
    "2.17 optimizer of no kind": asked(lambda c: c.wrap_optimizer(1), TypeError, "a torch.optim.Optimizer ... got 1"),
    "2.17 no backward pass": asked(
        lambda c: c.wrap_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), backward_passes_per_step=0),
        ValueError,
        "must be at least 1 ... got 0",
    ),
    "2.20 no aggregation": asked(lambda c: None, ValueError, "must be an int >= 1 ... got 0", aggregation_frequency=0),
    "2.21 gradients kept while aggregating": Case(
        lambda h: fit(trial(train_batch=keeps_gradients), h, {"aggregation_frequency": 2}),
        ValueError,
        "aggregation_frequency=2 ... leave auto_zero_grads at True",
    ),
    "2.22 schedule of another's optimizer": asked(
        wrap_schedule(False, lambda o: torch.optim.lr_scheduler.StepLR(o, 1)),
        ValueError,
        "the LR scheduler's optimizer is not wrapped ... optimizer = context.wrap_optimizer(optimizer)",
    ),
    "2.22 schedule by metric": asked(
        wrap_schedule(True, torch.optim.lr_scheduler.ReduceLROnPlateau),
        ValueError,
        "ReduceLROnPlateau.step() needs a metric ... wrap it with MANUAL_STEP",
    ),
    "2.24 scaler twice": asked(
        lambda c: (scales(c), scales(c)), RuntimeError, "called twice ... a trial has one scaler"
    ),
    "2.24 scaler after the model": asked(
        lambda c: (c.wrap_model(nn.Linear(1, 1)), scales(c)),
        RuntimeError,
        "after wrap_model ... call it before wrap_model",
    ),
    "2.25 half precision of no kind": asked(
        lambda c: c.experimental.use_amp(torch.float64),
        ValueError,
        "must be torch.float16 or torch.bfloat16 ... got torch.float64",
    ),
    "2.25 half precision twice": asked(
        lambda c: (c.experimental.use_amp(), c.experimental.use_amp()), RuntimeError, "called twice ... call it once"
    ),
    "2.25 half precision beside a scaler": asked(
        lambda c: (scales(c), c.experimental.use_amp()),
        RuntimeError,
        "use_amp can't be combined with wrap_scaler() ... call one of the two",
    ),
    "2.24 scaler beside half precision": asked(
        lambda c: (c.experimental.use_amp(), scales(c)),
        RuntimeError,
        "wrap_scaler can't be combined with use_amp() ... call one of the two",
    ),
    "2.27 training loader of no kind": training(
        RuntimeError,
        "got torch.utils.data.dataloader.DataLoader ... context.experimental.disable_dataset_reproducibility_checks()",
        **loads(own_loader(4)),
    ),
    "2.27 validation loader of no kind": training(
        RuntimeError,
        "got torch.utils.data.dataloader.DataLoader ... context.experimental.disable_dataset_reproducibility_checks()",
        **validates(own_loader(4)),
    ),
    "2.29 epochs that can't be counted": Case(
        lambda h: fit(
            type("Unsized", (Unchecked,), loads(lambda: iter([torch.ones(2, 1)] * 9))), h, validation_period=Epoch(1)
        ),
        ValueError,
        "validation_period=Epoch(1) ... use pytorch.Batch(n)",
    ),
    "2.30 data that end": Case(
        lambda h: fit(type("Short", (Unchecked,), loads(own_loader(2))), h, max_length=Batch(9)),
        pytorch.DataExhausted,
        "ended after 1 batch, ... samplers.RepeatBatchSampler",
    ),
    "3.1 some numbers": Case(
        lambda h: DistributedContext(rank=0, size=2),
        ValueError,
        "takes all of ... missing: local_rank, local_size, cross_rank, cross_size",
    ),
    "3.1 numbers without names": Case(lambda h: DistributedContext(0, 2), TypeError, "1 positional ... 3 were given"),
    "3.1 several machines without an address": Case(
        lambda h: DistributedContext(**{**nodes(2)[0], "local_size": 1}),
        ValueError,
        "size=2 but local_size=1 ... needs chief_ip",
    ),
    **{
        f"3.5 torchrun without {name}": Case(
            torchrun_without(name), NotUnderTorchrun, f"{name}, which is not set ... torchrun"
        )
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    },
    "3.7 several processes without a backend": asked(
        lambda c: None,
        RuntimeError,
        "training in 2 process(es) ... torch.distributed.init_process_group(",
        distributed=DistributedContext(**nodes(2)[0], transport=Alone()),
    ),
    "4.2 iterable dataset, shuffled": loading(
        ValueError, "IterableDataset ... in its own order ... shuffle in the dataset", dataset=Stream(), shuffle=True
    ),
    "4.2 no batching": loading(ValueError, "batch_size=None ... needs a batch_sampler", batch_size=None),
    "4.2 workers below none": loading(ValueError, "must be >= 0 ... got -1", num_workers=-1),
    "4.2 timeout below none": loading(ValueError, "must be >= 0 ... got -1", timeout=-1),
    "4.2 prefetch without workers": loading(ValueError, "prefetch_factor=2 ... num_workers > 0", prefetch_factor=2),
    "4.2 persistence without workers": loading(ValueError, "needs num_workers > 0", persistent_workers=True),
    "4.2 sampler and shuffle": loading(ValueError, "shuffle=True ... not both", sampler=[0], shuffle=True),
    **{
        f"4.2 batch_sampler and {next(iter(other))}": loading(
            ValueError,
            f"batch_sampler can't be combined with ... got {next(iter(other))} too",
            batch_sampler=[[0]],
            **other,
        )
        for other in ({"batch_size": 2}, {"shuffle": True}, {"sampler": [0]}, {"drop_last": True})
    },
    "4.10 low rank": Case(
        lambda h: samplers.DistributedBatchSampler([[0]], 2, -1), ValueError, ">= 0 and <  ... got -1"
    ),
    "4.10 high rank": Case(
        lambda h: samplers.DistributedBatchSampler([[0]], 2, 2), ValueError, "num_workers=2 ... got 2"
    ),
    "4.10 none": Case(lambda h: samplers.DistributedBatchSampler([[0]], 0, 0), ValueError, "must be >= 1 ... got 0"),
    "5.1 mode of no kind": Case(
        lambda h: pytorch.LRScheduler(object(), 2), TypeError, "LRScheduler.StepMode ... got 2"
    ),
    "5.2 frequency of none": Case(
        lambda h: pytorch.LRScheduler(object(), pytorch.LRScheduler.StepMode.MANUAL_STEP, 0),
        ValueError,
        "must be an int >= 1 ... got 0",
    ),
    "6.2 no methods": Case(
        lambda h: type("R", (pytorch.MetricReducer,), {})(), TypeError, "abstract ... cross_slot_reduce"
    ),
    "6.4 a name and a dict": Case(
        lambda h: reduce_with(lambda values: {"a": 1}, "auc"), ValueError, "must not return a dict ... got {'a': 1}"
    ),
    "6.4 neither name nor dict": Case(
        lambda h: reduce_with(lambda _: 0.5, None), ValueError, "return a dict ... got 0.5"
    ),
    "6.4 reducer that fails": Case(
        lambda h: reduce_with(broken, "auc"), ValueError, "broken (name='auc') ... LookupError('no such label')"
    ),
    "6.4 reducer twice": asked(
        lambda c: c.wrap_reducer(c.wrap_reducer(len, name="a"), name="b"),
        AssertionError,
        "twice with the same reducer ... name='b'",
    ),
    "6.4 reducer that is none": asked(
        lambda c: c.wrap_reducer(3, name="a"), AssertionError, "an instance of pytorch.MetricReducer ... got 3"
    ),
    "8.1 init without names": Case(lambda h: pytorch.init({"lr": 1}), TypeError, "0 positional ... 1 was given"),
    "8.3 no length": fitting(ValueError, "needs max_length ... Epoch(1)", max_length=None),
    "8.3 length of no kind": fitting(TypeError, "a pytorch.Batch or ... got 3 of type int", max_length=3),
    "8.3 length that is a schedule": fitting(TypeError, "must hold an int ... got Batch([3])", max_length=Batch([3])),
    "8.3 length of nothing": fitting(ValueError, "at least 1 ... got Batch(0)", max_length=Batch(0)),
    **{
        f"8.3 {name} of no kind": Case(
            lambda h, name=name: fit(OneWeight, h, **{name: 1}), TypeError, f"{name} must be ... got 1 of type int"
        )
        for name in ("validation_period", "checkpoint_period", "reporting_period")
    },
    "8.3 unit of no kind": Case(lambda h: Batch(1.5), TypeError, "takes an int ... got 1.5 of type float"),
    "8.7 policy that is none": fitting(ValueError, "'best', 'all', 'none' ... got 'some'", checkpoint_policy="some"),
    "8.12 invalid without words": Case(lambda h: pytorch.InvalidHP(3), TypeError, "a message ... got 3 of type int"),
    "8.16 metric that is not there": Case(
        lambda h: (setattr(h, "metrics", ("accuracy",)), fit(OneWeight, h)),
        SearcherMetricError,
        "'accuracy', but validation returned ['validation_loss'] ... return it from evaluate_batch()",
    ),
    "9.3b metric that is no number": training(
        TypeError,
        "of type Linear for the metric 'a' ... return a number, or use context.wrap_reducer()",
        evaluate_batch=returns({"a": nn.Linear(1, 1)}),
    ),
    "9.3b metric that is no JSON": training(
        TypeError,
        "'a' of type Linear ... return numbers, strings",
        **NOT_EVALUATE,
        evaluate_full_dataset=returns({"a": nn.Linear(1, 1)}),
    ),
    "9.2 state that is no data": Case(
        unsavable, UnsavableState, "callback 'memory' at ['seen'] is of type builtins.object ... Return tensors"
    ),
    "9.4 arguments twice": Case(load_both_ways, ValueError, "torch_load_kwargs only ... (map_location)"),
    "9.4 no such path": Case(
        lambda h: pytorch.load_trial_from_checkpoint_path("/nowhere", trial_class=OneWeight),
        FileNotFoundError,
        "'/nowhere' ... no such directory",
    ),
    "9.7 no such checkpoint": fitting(FileNotFoundError, "'nowhere' ... no such", latest_checkpoint="nowhere"),
    "9.7 other shapes": Case(
        resume(wrapping(lambda self, context: context.models.__setitem__(0, nn.Linear(3, 1)))),
        ValueError,
        "size mismatch for weight ... the trial class that wrote it",
    ),
    "9.7 more models": Case(
        resume(wrapping(lambda self, context: context.wrap_model(nn.Linear(1, 1)))),
        ValueError,
        "has wrapped 2 model(s) ... the trial class that wrote it",
    ),
}


@pytest.mark.api("1.1", "1.3", "1.4", "1.5", "1.6", "1.8", "1.9", "1.10", "1.12", "1.13", "1.15")
@pytest.mark.api("2.1", "2.2", "2.3", "2.4", "2.10", "2.12", "2.13", "2.16", "2.17", "2.20", "2.21", "2.22", "2.24")
@pytest.mark.api("2.25", "2.27", "2.29", "2.30", "3.1", "3.5", "3.7", "4.2", "4.10", "5.1", "5.2", "6.2", "6.4")
@pytest.mark.api("8.1", "8.3", "8.7", "8.12", "8.16", "9.2", "9.3b", "9.4", "9.7")
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_a_mistake_is_an_error_with_the_cure(case: Case, tmp_path: Path) -> None:
    with pytest.raises(case.kind) as caught:
        case.do(FakeHost(tmp_path))
    error = caught.value
    assert type(error) is case.kind
    assert re.search(".*".join(map(re.escape, case.words.split(" ... "))), str(error), re.DOTALL), str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (case.kind, str(error))
