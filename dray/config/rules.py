"""The rules of a config that involve more than one field. Each checks the raw mapping, whatever else is wrong with it,
so that all faults are reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from dray.config.entrypoint import is_class, parse_entrypoint
from dray.config.faults import missing_field
from dray.config.resources import Resources, SlotRange, even_sizes
from dray.config.schema import constant
from dray.config.search import check_sampler, first_points
from dray.config.searcher import OWN_TIMES, SEARCHER_FIELDS, Searcher, searcher_fields, variant_of
from dray.config.storage import SECRETS, STORAGE_FIELDS, CheckpointStorage
from dray.errors import Fault
from dray.masking import MASK
from dray.script import Script
from searchers.errors import FieldError, SpaceError
from searchers.space import parse

#: The fields that a method requires, besides those that the schema requires of all.
REQUIRED = {
    "random": ("max_trials",),
    "asha": ("max_trials", "num_rungs"),
    "async_halving": ("max_trials", "num_rungs"),
    "adaptive_asha": ("max_trials",),
}
_KINDS = ("random", "grid", "asha", "adaptive_asha")
_IN_STEPS = ("max_steps", "target_trial_steps")


def broken_rules(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """The faults that no single field shows."""
    yield from _searcher(raw.get("searcher"))
    yield from _length(raw)
    yield from _storage(raw.get("checkpoint_storage"))
    yield from _resources(raw.get("resources"))
    hyperparameters = raw.get("hyperparameters", {})
    if isinstance(hyperparameters, Mapping):
        yield from _space(hyperparameters, raw.get("searcher"))
        yield from _batch_size(hyperparameters, raw)
        yield from _slot_range(hyperparameters, raw)


def counted_steps(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """Fields that Determined's oldest configs count in steps, each with its value in batches."""
    searcher = raw.get("searcher")
    counted = {}
    if isinstance(searcher, Mapping):
        counted = {f"searcher.{field}": searcher[field] for field in _IN_STEPS if field in searcher}
    if counted or "batches_per_step" in raw:
        counted |= {field: raw[field] for field in ("min_validation_period", "min_checkpoint_period") if field in raw}
    batches = raw.get("batches_per_step", 100)  # Determined's default
    for path, steps in counted.items():
        if isinstance(steps, int) and isinstance(batches, int):
            instead = f"{'max_length' if '.' in path else path}: {{batches: {steps * batches}}}"
            told = f"is in steps of {batches} batches, which Determined has removed, too; write {instead}"
            yield Fault(path, told)


def _searcher(raw: object) -> Iterator[Fault]:
    name = raw.get("name") if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(name, str) or not (is_class(name) or name in SEARCHER_FIELDS):
        return
    for field in REQUIRED.get(name, ()):
        if raw.get(field) is None:
            yield missing_field(("searcher",), field)
    for field in sorted((Searcher.model_fields.keys() - searcher_fields(name)) & raw.keys()):
        takers = [kind for kind in _KINDS if field in SEARCHER_FIELDS[kind]] or ["module:Class"]
        instead = f"put it below options, if {name} takes it" if is_class(name) else f"use name: {' or '.join(takers)}"
        yield Fault(f"searcher.{field}", f"{name} has no such field, got {raw[field]!r}; remove it, or {instead}")
    yield from _spellings(raw)


def _spellings(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """Fields that contradict each other, or need another one."""
    stop_once, variant = raw.get("stop_once"), raw.get("variant")
    if isinstance(stop_once, bool) and variant in ("stopping", "promotion") and variant != variant_of(stop_once):
        what = f"{str(stop_once).lower()} means variant: {variant_of(stop_once)}, but variant is {variant}; remove one"
        yield Fault("searcher.stop_once", what)
    for field, other in (("max_time", "time_metric"), ("time_metric", "max_time")):
        if field in raw and other not in raw:
            yield missing_field(("searcher",), other)
    if "source_trial_id" in raw and "source_checkpoint_uuid" in raw:
        yield Fault(
            "searcher.source_trial_id", "can't be given together with source_checkpoint_uuid; remove one of them"
        )
    points, most = raw.get("points"), raw.get("max_trials")
    if isinstance(points, list) and isinstance(most, int) and len(points) > most:
        yield Fault(
            "searcher.points", f"must be at most max_trials ({most}) points, got {len(points)}; raise max_trials"
        )


def _length(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """A search needs no length of its own only if it compares trials at their ends, and a program's ``fit()`` gives the
    length."""
    searcher = raw.get("searcher")
    if not isinstance(searcher, Mapping):
        return
    try:
        program = parse_entrypoint(raw["entrypoint"]) if "entrypoint" in raw else None
    except ValueError:
        return  # reported elsewhere; it is unknown whether it is a program
    if "max_time" in searcher:
        by_itself = searcher.get("time_metric") in OWN_TIMES
        if not by_itself and not isinstance(program, Script) and raw.get("min_validation_period") is None:
            what = "required with searcher.max_time, got nothing; the time is checked whenever a trial validates, "
            yield Fault("min_validation_period", what + "for example min_validation_period: {epochs: 1}")
        return
    if searcher.get("max_length") is not None or any(field in searcher for field in _IN_STEPS):
        return
    if not isinstance(program, Script) or searcher.get("name") in ("asha", "async_halving", "adaptive_asha"):
        yield missing_field(("searcher",), "max_length")


def _storage(raw: object) -> Iterator[Fault]:
    if not isinstance(raw, Mapping):
        return
    kind = raw.get("type")
    if not isinstance(kind, str | None) or kind not in STORAGE_FIELDS:
        return  # reported elsewhere
    fields = STORAGE_FIELDS[kind]
    if kind == "directory":
        paths = sorted({"container_path", "storage_path"} & raw.keys())
        if len(paths) != 1:
            yield Fault(
                "checkpoint_storage",
                "type directory needs exactly one of container_path and storage_path, "
                f"got {' and '.join(paths) or 'none'}; for example {{type: directory, container_path: /mnt/results}}",
            )
    elif kind is not None and fields[0] not in raw:
        yield missing_field(("checkpoint_storage",), fields[0])
    for name in sorted((CheckpointStorage.model_fields.keys() - set(fields)) & raw.keys()):
        takers = [str(each) for each, known in STORAGE_FIELDS.items() if each and name in known]
        what = f"type {kind} has no such field; remove it, or use" if kind else "needs"
        yield Fault(f"checkpoint_storage.{name}", f"{what} type: {' or '.join(takers)}")
    for name in SECRETS:
        if raw.get(name) == MASK:
            told = (
                "is masked, as det experiment config shows it; write the true key, or none for that of the environment"
            )
            yield Fault(f"checkpoint_storage.{name}", told)
    for name, other in (("access_key", "secret_key"), ("secret_key", "access_key"), ("credential", "account_url")):
        if name in raw and other not in raw:
            yield missing_field(("checkpoint_storage",), other)


def _space(hyperparameters: Mapping[str, Any], searcher: object) -> Iterator[Fault]:
    """The space, and whether the searcher can draw from it."""
    try:
        space = parse(hyperparameters)
    except SpaceError as error:
        yield from (Fault(path, what) for path, what in error.faults)
        return
    try:
        choice = Searcher.model_validate(searcher)
    except ValidationError:
        return  # reported elsewhere
    for check in (check_sampler, first_points):
        try:
            check(choice, space)
        except FieldError as error:
            yield from (Fault(path, what) for path, what in error.faults)


def _batch_size(hyperparameters: Mapping[str, Any], raw: Mapping[str, Any]) -> Iterator[Fault]:
    """``global_batch_size`` is divided among a trial's slots: each possible value must give every slot a record."""
    path = "hyperparameters.global_batch_size"
    if "global_batch_size" not in hyperparameters:
        units = [raw.get("min_validation_period"), raw.get("min_checkpoint_period")]
        units += [raw["searcher"].get("max_length")] if isinstance(raw.get("searcher"), Mapping) else []
        if any(isinstance(unit, Mapping) and "records" in unit for unit in units):
            yield Fault(path, "required, got nothing; lengths in records are converted to batches of this size")
        return
    asked = _slots(raw)
    slots = asked if isinstance(asked, int) else 1
    for value in _extremes(hyperparameters["global_batch_size"]):
        if isinstance(value, bool) or not isinstance(value, int):
            yield Fault(path, f"must be an integer, got {value!r}; for example global_batch_size: 64")
            return
        if value < slots:
            yield Fault(
                path,
                f"must be at least resources.slots_per_trial ({slots}) so that every slot gets a record, got {value}; "
                "raise it, or ask for fewer slots",
            )
            return


def _slots(raw: Mapping[str, Any]) -> int | float | SlotRange | None:
    """``resources.slots_per_trial``; None if its fault is reported elsewhere."""
    try:
        return Resources.model_validate(raw.get("resources", {})).slots_per_trial
    except ValidationError:
        return None


def _resources(raw: object) -> Iterator[Fault]:
    if not isinstance(raw, Mapping):
        return
    placed = raw.get("placement_strategy", "STRICT_PACK")
    if raw.get("is_single_node") is True and placed != "STRICT_PACK":
        told = f"true means placement_strategy: STRICT_PACK, but placement_strategy is {placed}; remove one"
        yield Fault("resources.is_single_node", told)
    if raw.get("slots_per_trial") == 0 and raw.get("slot", "cpu") != "cpu":
        told = f"0 means one slot of slot: cpu, but slot is {raw['slot']}; write slots_per_trial: 1"
        yield Fault("resources.slots_per_trial", told)
    asked, most = _slots({"resources": raw}), raw.get("max_slots")
    fewest = asked.min if isinstance(asked, SlotRange) else asked
    if isinstance(most, int) and fewest is not None and most < fewest:
        told = f"must be at least slots_per_trial ({fewest}), or no trial can run, got {most}; raise it"
        yield Fault("resources.max_slots", told)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _slot_range(hyperparameters: Mapping[str, Any], raw: Mapping[str, Any]) -> Iterator[Fault]:
    """A trial takes all available slots up to the range's end, and divides its global batch among them."""
    asked, searcher = _slots(raw), raw.get("searcher")
    if not isinstance(asked, SlotRange):
        return
    path, batch_path = "resources.slots_per_trial", "hyperparameters.global_batch_size"
    if asked.min > asked.max:
        yield Fault(path, f"min must be at most max, got {asked.min} and {asked.max}; swap them")
        return
    for field in ("placement_strategy", "is_single_node"):
        placed = raw["resources"].get(field)
        if placed is True or str(placed).startswith("STRICT_"):
            told = f"can't be {_written(placed)} with a range of slots ({path})"
            yield Fault(f"resources.{field}", f"{told}; give one number of slots, or remove this field")
    if isinstance(searcher, Mapping):
        name, at_once = searcher.get("name"), searcher.get("max_concurrent_trials")
        if name != "single" and at_once != 1:
            takes = isinstance(name, str) and "max_concurrent_trials" in SEARCHER_FIELDS.get(name, ())
            instead = "set searcher.max_concurrent_trials: 1" if takes else "use searcher.name: single"
            told = (
                f"can be a range only if one trial runs at a time; {instead}, or give one number, such as {asked.min}"
            )
            yield Fault(path, told)
    spec = hyperparameters.get("global_batch_size")
    if isinstance(spec, Mapping) and spec.get("type") != "const":
        yield Fault(batch_path, f"must be a constant with a range of slots ({path}), got {spec!r:.60}")
    elif spec is None:
        yield Fault(batch_path, f"required with a range of slots ({path}), got nothing; for example 64")
        return
    most = raw["resources"].get("max_slots")
    last = min(asked.max, most) if isinstance(most, int) else asked.max
    size = constant(spec)
    if isinstance(size, int) and size >= 1 and asked.min <= last and not even_sizes(asked, size, last):
        told = f"must be divisible by a number of slots from {asked.min} to {last} ({path}), got {size}"
        yield Fault(batch_path, f"{told}; set it to a multiple of {last}")


def _extremes(spec: object) -> list[object]:
    """The values that a hyperparameter can take, or the least of them; none for a spec that ``parse`` refuses."""
    if not isinstance(spec, Mapping) or "type" not in spec:
        return [spec]
    match spec["type"]:
        case "const":
            return [spec["val"]] if "val" in spec else []
        case "categorical":
            return list(spec["vals"]) if isinstance(spec.get("vals"), list) else []
        case "int":
            return [spec["minval"]] if isinstance(spec.get("minval"), int) else []
        case "double" | "log":
            return [f"a {spec['type']}"]
        case _:
            return []
