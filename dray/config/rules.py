"""The rules of a config that concern several fields.

Each reads the valid fields by path, even if other fields are wrong, so that all faults are reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

from dray.config.entrypoint import is_class
from dray.config.faults import missing_field
from dray.config.length import Length
from dray.config.resources import SlotRange, even_sizes
from dray.config.schema import ExperimentConfig, constant
from dray.config.search import AUTO_SAMPLER, LIMITS, sampling_faults
from dray.config.searcher import COUNTED, MAX_POINTS, METHODS, SamplerChoice, Searcher, objectives_of
from dray.errors import Fault
from dray.script import Script
from dray.training.parallel.mesh_shape import MeshShape, mesh_shape
from dray.training.plan import FIRST_TRACED, window_fault
from searchers.domains import Categorical, Const
from searchers.errors import FieldError, did_you_mean
from searchers.numeric_domains import Int
from searchers.space import parse

#: Fields that need another one.
_PAIRS = (
    ("searcher.max_time", "searcher.time_metric"),
    ("searcher.time_metric", "searcher.max_time"),
    ("checkpoint_storage.access_key", "checkpoint_storage.secret_key"),
    ("checkpoint_storage.secret_key", "checkpoint_storage.access_key"),
    ("checkpoint_storage.credential", "checkpoint_storage.account_url"),
)
_SLOTS = "resources.slots_per_trial"
_BATCH = "hyperparameters.global_batch_size"


def broken_rules(given: Mapping[str, Any], wrong: Set[str]) -> Iterator[Fault]:
    """The faults that no single field shows, found in the valid fields, given the paths of known faults."""
    for field, other in _PAIRS:
        if field in given and other not in given:
            yield missing_field(other)
    if any(path.startswith("searcher.") for path in given):  # else the whole section is wrong
        yield from _searcher(given, wrong)
        yield from _population_sampler(given)
        yield from _metrics(given, wrong)
        yield from _length(given, wrong)
    if "space" in given and "searcher.name" in given:
        points, metrics = given.get("searcher.points", []), given.get("searcher.metrics")
        sampler = given.get("searcher.sampler", SamplerChoice())
        if given["searcher.name"] == "auto":
            sampler = AUTO_SAMPLER
        objectives = None if metrics is None else objectives_of(metrics)
        prior = given.get("searcher.prior", {})
        most = given.get("searcher.max_points", MAX_POINTS)
        yield from sampling_faults(given["searcher.name"], sampler, points, given["space"], objectives, prior, most)
    if "resources.slot_type" in given and given.get("resources.slot") == "cpu":
        yield Fault("resources.slot_type", "is about GPUs, but resources.slot is cpu; remove one of them")
    asked, most = given.get(_SLOTS, 1), given.get("resources.max_slots")
    fewest = asked.min if isinstance(asked, SlotRange) else asked
    if most is not None and most < fewest:
        what = f"must be at least slots_per_trial ({fewest}), or no trial can run, got {most}; raise it"
        yield Fault("resources.max_slots", what)
    begin = given.get("profiling.begin_on_batch", FIRST_TRACED)
    end = given.get("profiling.end_after_batch", begin)
    if "profiling.begin_on_batch" not in wrong and (fault := window_fault(begin, end)):
        yield Fault("profiling.end_after_batch", fault)
    if "hyperparameters" not in wrong:
        yield from _batch_size(given)
        yield from _slot_range(given)
    yield from _mesh(given)
    yield from _sandbox(given)
    if (
        given.get("budget.usd") is not None
        and not given.get("prices")
        and not any(path.startswith("prices") for path in wrong)
    ):
        yield Fault("prices", "required with budget.usd; for example prices: {A100: 2.9}")
    yield from _until(given)
    yield from _repeat(given, wrong)


def _until(given: Mapping[str, Any]) -> Iterator[Fault]:
    names = [each.name for each in given.get("searcher.metrics") or ()]
    if metric := given.get("searcher.metric"):
        names.append(metric)
    for name in given.get("until") or ():
        if names and name not in names:
            what = f"must be a metric that the searcher compares: {', '.join(names)}"
            yield Fault(f"until.{name}", f"{what}{did_you_mean(name, names)}")


def _repeat(given: Mapping[str, Any], wrong: Set[str]) -> Iterator[Fault]:
    """Repeats come when the search has ended by itself, and are compared by one metric."""
    if given.get("repeat") is None:
        return
    name = given.get("searcher.name")
    model = METHODS.get(str(name), Searcher)
    if given.get("searcher.metrics") is not None:
        yield Fault("repeat", "compares trials by one metric, not by metrics; remove it, or write metric")
    elif name == "pbt":
        what = "can't be given with pbt, whose trials continue from one another; train the best one again by itself"
        yield Fault("repeat", f"{what}, with name: single")
    elif (
        "max_trials" in model.model_fields
        and given.get("searcher.max_trials") is None
        and "searcher.max_trials" not in wrong
    ):
        what = "required with repeat, since the best trials are repeated once all trials have ended"
        yield Fault("searcher.max_trials", what)


def _searcher(given: Mapping[str, Any], wrong: Set[str]) -> Iterator[Fault]:
    if "searcher.source_trial_id" in given and "searcher.source_checkpoint_uuid" in given:
        what = "can't be given together with source_checkpoint_uuid; remove one of them"
        yield Fault("searcher.source_trial_id", what)
    points = given.get("searcher.points", [])
    for field in ("max_trials", "population"):
        most = given.get(f"searcher.{field}")
        if most is not None and len(points) > most:
            yield Fault("searcher.points", f"must be at most {field} ({most}) points, got {len(points)}; raise {field}")
    interval, length = given.get("searcher.interval"), given.get("searcher.max_length")
    if interval is not None and length is not None and interval.unit != length.unit:
        what = f"must be in the unit of max_length, {length.unit}, got {interval}; write {{{length.unit}: 1}}"
        yield Fault("searcher.interval", what)
    model = METHODS.get(str(given.get("searcher.name")), Searcher)
    if (
        given.get("searcher.max_trials") is None
        and "max_trials" in model.model_fields
        and "searcher.max_trials" not in wrong
    ):
        # A wrong limit is still one.
        if not any(name in LIMITS for name in (path.partition(".")[0] for path in (*given, *wrong))):
            yield missing_field("searcher.max_trials")
        elif given.get("searcher.max_concurrent_trials") == 0:
            what = "0 (no limit) would create all trials at once; give a number, or max_trials"
            yield Fault("searcher.max_concurrent_trials", what)


def _population_sampler(given: Mapping[str, Any]) -> Iterator[Fault]:
    sampler = given.get("searcher.sampler", SamplerChoice())
    if given.get("searcher.name") == "pbt" and not is_class(sampler.name):
        if sampler.name not in ("random", "pb2"):
            what = f"must be random, pb2 or module:Class with pbt, got {sampler.name!r}"
            yield Fault("searcher.sampler.name", what)
        if sampler.options:
            yield Fault(
                "searcher.sampler.options", f"{sampler.name} has no options, got {sampler.options}; remove them"
            )
    elif sampler.name == "pb2":
        yield Fault("searcher.sampler.name", "pb2 is a sampler of pbt; write name: pbt, or another sampler")
    for field in ("resample_probability", "factors"):
        if f"searcher.{field}" in given and sampler.name != "random":
            yield Fault(f"searcher.{field}", f"has no effect with sampler {sampler.name}; remove it")


def _metrics(given: Mapping[str, Any], wrong: Set[str]) -> Iterator[Fault]:
    if "searcher.metrics" not in given and not any(path.startswith("searcher.metrics") for path in wrong):
        if "searcher.metric" not in given and "searcher.metric" not in wrong:
            yield missing_field("searcher.metric")
        return
    if "searcher.metric" in given:
        yield Fault("searcher.metric", "can't be given together with metrics; remove one of them")
    if "searcher.smaller_is_better" in given:
        what = "belongs to metric; remove it, and set smaller_is_better in the entries of metrics that are objectives"
        yield Fault("searcher.smaller_is_better", what)
    if given.get("searcher.name") == "pbt":
        yield Fault("searcher.metrics", "pbt compares trials by one metric; write metric and smaller_is_better")
    if given.get("searcher.skip_uninformative_rungs"):
        yield Fault("searcher.skip_uninformative_rungs", "compares trials by one metric, not by metrics; remove it")


def _length(given: Mapping[str, Any], wrong: Set[str]) -> Iterator[Fault]:
    """A search needs a length, unless it compares trials only at their ends and a program's ``fit()`` sets it."""
    if "entrypoint" in wrong:
        return  # it may be a program
    is_program = isinstance(given.get("entrypoint"), Script)
    if "searcher.max_time" in given:
        is_counted = given.get("searcher.time_metric") in COUNTED
        if not is_counted and not is_program and given.get("min_validation_period") is None:
            what = "required with searcher.max_time: the time is checked whenever a trial validates; "
            yield Fault("min_validation_period", f"{what}for example min_validation_period: {{epochs: 1}}")
    elif "searcher.max_length" not in given:
        has_rungs = given.get("searcher.name") in ("asha", "async_halving", "adaptive_asha", "auto", "pbt")
        if has_rungs or not is_program:
            yield missing_field("searcher.max_length")


def _batch_size(given: Mapping[str, Any]) -> Iterator[Fault]:
    """Each possible ``global_batch_size`` is divided among a trial's slots, and must give every slot a record."""
    hyperparameters = given.get("hyperparameters", {})
    if "global_batch_size" not in hyperparameters:
        lengths = [given.get(f) for f in ("searcher.max_length", "min_validation_period", "min_checkpoint_period")]
        if any(isinstance(length, Length) and length.unit == "records" for length in lengths):
            yield Fault(_BATCH, "required for lengths in records, which are converted to batches of this size")
        return
    spec, length = hyperparameters["global_batch_size"], given.get("searcher.max_length")
    is_searched = isinstance(spec, Mapping) and spec.get("type") != "const"
    if is_searched and given.get("searcher.name") == "pbt" and length is not None and length.unit != "batches":
        what = (
            f"must be a constant with pbt and lengths in {length.unit}, since trials continue at their sources' batch"
        )
        yield Fault(_BATCH, f"{what}; make it one, or give max_length and interval in batches")
    shape = _mesh_shape(given)
    slots = shape.replicas if isinstance(shape, MeshShape) else 1  # that get different records
    for value in _batch_sizes(hyperparameters["global_batch_size"]):
        if isinstance(value, bool) or not isinstance(value, int):
            yield Fault(_BATCH, f"must be an integer, got {value!r}; for example global_batch_size: 64")
            return
        if value < slots:
            yield Fault(
                _BATCH,
                f"must be at least {_SLOTS} ({slots}) so that every slot gets a record, got {value}; "
                "raise it, or use fewer slots",
            )
            return


def _slot_range(given: Mapping[str, Any]) -> Iterator[Fault]:
    """A trial uses all available slots of the range, and divides its global batch among them."""
    asked = given.get(_SLOTS)
    if not isinstance(asked, SlotRange):
        return
    if asked.min > asked.max:
        yield Fault(_SLOTS, f"min must be at most max, got {asked.min} and {asked.max}; swap them")
        return
    placed = given.get("resources.placement_strategy", "PACK")
    if placed.startswith("STRICT_"):
        what = f"can't be {placed} with a range of slots ({_SLOTS}); remove it, or is_single_node, or give one number"
        yield Fault("resources.placement_strategy", f"{what} of slots, such as {asked.min}")
    name = given.get("searcher.name", "single")
    if name != "single" and given.get("searcher.max_concurrent_trials") != 1:
        has_limit = name in METHODS and "max_concurrent_trials" in METHODS[name].model_fields
        instead = "set searcher.max_concurrent_trials: 1" if has_limit else "use searcher.name: single"
        what = f"can be a range only if one trial runs at a time; {instead}, or give one number, such as {asked.min}"
        yield Fault(_SLOTS, what)
    spec = given.get("hyperparameters", {}).get("global_batch_size")
    if isinstance(spec, Mapping) and spec.get("type") != "const":
        yield Fault(_BATCH, f"must be a constant with a range of slots ({_SLOTS}), got {spec!r:.60}")
    elif spec is None:
        yield Fault(_BATCH, f"required with a range of slots ({_SLOTS}); for example global_batch_size: 64")
        return
    last = min(asked.max, given.get("resources.max_slots", asked.max))
    size = constant(spec)
    if isinstance(size, int) and size >= 1 and asked.min <= last and not even_sizes(asked, size, last):
        what = f"must be divisible by a number of slots from {asked.min} to {last} ({_SLOTS}), got {size}"
        yield Fault(_BATCH, f"{what}; set it to a multiple of {last}")


def _mesh(given: Mapping[str, Any]) -> Iterator[Fault]:
    product = math.prod((given.get("resources.mesh") or {}).values())
    if not isinstance(given.get(_SLOTS, 1), int) and product > 1:
        what = f"can't be given with a range of slots, or with trials that share a slot ({_SLOTS}); give one number"
        yield Fault("resources.mesh", f"{what} of slots, such as {product}")
    elif isinstance(shape := _mesh_shape(given), str):
        yield Fault("resources.mesh", shape)


def _mesh_shape(given: Mapping[str, Any]) -> MeshShape | str:
    """The mesh of a trial, or what is wrong with it. A range of slots, or a part of one, counts as one slot."""
    asked = given.get(_SLOTS, 1)
    try:
        return mesh_shape(given.get("resources.mesh"), asked if isinstance(asked, int) else 1)
    except ValueError as error:
        return str(error)


def _sandbox(given: Mapping[str, Any]) -> Iterator[Fault]:
    """In a sandbox, one process trains, and nothing that the experiment brings runs outside."""
    if given.get("isolation.name", "none") != "sandbox":
        if given.get("isolation.read"):
            yield Fault("isolation.read", "has no effect without name: sandbox; add that, or remove it")
        return
    if (asked := given.get(_SLOTS, 1)) != 1:
        got = "a range" if isinstance(asked, SlotRange) else f"{asked:g}"
        yield Fault("isolation", f"sandbox needs {_SLOTS}: 1, got {got}; change one of them")
    for field, name in (
        ("searcher.name", given.get("searcher.name")),
        ("searcher.sampler.name", given.get("searcher.sampler", SamplerChoice()).name),
    ):
        if is_class(name):
            what = f"can't be {name} with isolation: sandbox, because it would run outside of the sandbox"
            yield Fault(field, f"{what}; choose one of dray's own")
    if given.get("notify.command") is not None:
        what = "can't be given with isolation: sandbox, because it would run outside of the sandbox; use notify.url"
        yield Fault("notify.command", what)


def _batch_sizes(spec: object) -> list[object]:
    """The possible values of a batch size; the smallest one of a range; [] if it is invalid, which is another fault."""
    try:
        [(_, domain)] = parse({"global_batch_size": spec}).root.domains
    except FieldError:
        return []
    match domain:
        case Const():
            return [domain.val]
        case Categorical():
            return list(domain.vals)
        case Int():
            return [domain.minval]
        case _:
            return [spec]


def beyond_sandbox(config: ExperimentConfig) -> list[Fault]:
    """The fields by which an experiment reaches beyond its sandboxes: files, directories and addresses that the config
    names. For a server that takes configs from programs that it does not trust."""
    given = {
        "isolation": not config.isolation.is_sandbox,
        "isolation.read": config.isolation.read,
        "searcher.source_checkpoint_uuid": config.searcher.source_checkpoint_uuid,
        "searcher.source_trial_id": config.searcher.source_trial_id,
        "searcher.like": [name for name in getattr(config.searcher, "like", ()) if "/" in name],
        "checkpoint_storage": config.checkpoint_storage.location,
        "notify.url": config.notify.url,
        "loggers.mlflow": config.loggers.mlflow,
        "loggers.wandb": config.loggers.wandb,
    }
    what = {"isolation": "must be sandbox"}
    return [
        Fault(field, what.get(field, "would reach beyond the sandbox; remove it")) for field in given if given[field]
    ]
