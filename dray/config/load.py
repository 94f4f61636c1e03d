"""Loads an experiment config from a file or a mapping into a frozen, checked object, or reports all faults at once."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from dray.config.faults import faults_of, missing_field
from dray.config.rules import broken_rules
from dray.config.schema import ExperimentConfig
from dray.config.search import CHANGEABLE, build_method, rungs_of
from dray.config.searcher import AdaptiveASHASearcher, AutoSearcher, ClassSearcher, CustomSearcher, SingleSearcher
from dray.config.section import ConfigNotes
from dray.config.yaml_file import check_limits, read_mapping, with_changes
from dray.errors import ConfigError, Fault
from dray.storage import Location
from dray.text import counted, one_line
from searchers.auto import DIVISOR
from searchers.convert import from_optuna, from_ray_tune
from searchers.domains import Categorical, Nested, ranges
from searchers.errors import FieldError
from searchers.numeric_domains import Log
from searchers.rows import unreadable
from searchers.space import plain

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A parsed config."""

    config: ExperimentConfig | None  # None: it has faults
    faults: list[Fault]  # the first fault of each field
    ignored: dict[str, str]  # Determined's fields without effect, by path, with their replacements


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig, changes: Sequence[str] = ()
) -> ExperimentConfig:
    """Read and check an experiment config.

    Args:
        source: the path of a YAML file, or a mapping of the same form. A field that is null gets its default.
            In a mapping, ``hyperparameters`` may also be Optuna's distributions, or domains of ``ray.tune``.
            Without a ``name``, the experiment is named after the file, or the entrypoint's class. Without an
            ``experiment_seed``, a random one is set. Determined's fields that have no meaning here are ignored, with
            one warning in the log; another warning names likely mistakes (`doubts`).
        changes: values for fields of a file, such as ``searcher.max_trials=8``.

    Raises:
        ConfigError: the file can't be read, or the config has faults; all are listed, each with its path.

    >>> config = load_config({"searcher": {"name": "single", "metric": "loss", "max_length": {"epochs": 2}}})
    >>> str(config.searcher.max_length), config.max_restarts
    ('2 epochs', 5)
    """
    if isinstance(source, ExperimentConfig):
        return source
    if isinstance(source, Mapping):
        origin = "The experiment config"
        content = source
    else:
        origin = str(source)
        content = with_changes(read_mapping(Path(source)), changes)
        if content.get("name") is None:
            content["name"] = Path(source).stem
    parsed = parse_config(content)
    if parsed.config is None:
        raise ConfigError(parsed.faults, origin)
    for warning in warnings_of(content, parsed):
        log.warning("%s %s", origin, warning)
    return parsed.config


def warnings_of(content: Mapping[Any, Any], parsed: Parsed) -> Iterator[str]:
    """What `load_config` warns of in a config: a line about it, and one for each field."""
    if parsed.ignored:
        lines = (f"\n  {field}: {why}" for field, why in sorted(parsed.ignored.items()))
        yield f"has fields of Determined that are ignored here:{''.join(lines)}"
    if parsed.config and (found := [*doubts(parsed.config), *direction_doubts(content.get("searcher"))]):
        lines = (f"\n  {field}: {what}" for field, what in found)
        yield f"may not mean what you want:{''.join(lines)}"


def stored_config(path: Path) -> ExperimentConfig:
    """The config in an experiment's directory, without warnings: they were given when it was created. If it can't be
    read, `DamagedFile`."""
    try:
        parsed = parse_config(read_mapping(path))
    except ConfigError as error:
        raise unreadable(path, error.faults[0].what) from None
    if parsed.config is None:
        raise unreadable(path, one_line(parsed.faults[0]))
    return parsed.config


def parse_config(content: Mapping[Any, Any]) -> Parsed:
    """Parse the mapping of a config."""
    notes, faults = ConfigNotes(), []
    config: ExperimentConfig | None = None
    try:
        check_limits(content)
        given = plain(_with_domains(content))
        try:
            config = ExperimentConfig.model_validate(given, context=notes)
        except ValidationError as error:
            faults = faults_of(error)
        faults += broken_rules(notes.given, {fault.path for fault in faults})
        # The user's own methods are checked once their classes can be imported.
        if config is not None and not faults and not isinstance(config.searcher, CustomSearcher | ClassSearcher):
            build_method(config)
    except FieldError as error:
        faults = [Fault(path, what) for path, what in error.faults]
    first: dict[str, Fault] = {}
    for fault in faults:
        first.setdefault(fault.path, fault)
    return Parsed(config=None if faults else config, faults=list(first.values()), ignored=notes.ignored)


def with_limits(config: ExperimentConfig, changes: Mapping[str, Any]) -> ExperimentConfig:
    """A config with other values of some of ``CHANGEABLE``; of a budget and of prices, those that are given.

    Raises:
        ConfigError: the new values have faults.
    """
    if not changes:
        return config
    now = config.to_dict()
    for name in ("budget", "prices"):
        if isinstance(changes.get(name), Mapping):
            changes = {**changes, name: {**now.get(name, {}), **changes[name]}}
    parsed = parse_config({**now, **changes})
    if parsed.config is None:
        raise ConfigError(parsed.faults, "The extension")
    return config.model_copy(update={name: getattr(parsed.config, name) for name in CHANGEABLE})


def load_storage(section: Mapping[str, Any]) -> Location:
    origin = "core.init(checkpoint_storage=...)"
    # Only the section is checked: the other fields are required in every config.
    alone = {"entrypoint": "python3 program.py", "searcher": {"name": "single", "metric": "any"}}
    try:
        where = load_config({**alone, "checkpoint_storage": section}).checkpoint_storage.location
    except ConfigError as error:
        raise ConfigError(error.faults, origin) from None
    if where is None:
        raise ConfigError([missing_field("checkpoint_storage.type")], origin)
    return where


def _with_domains(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with hyperparameters converted from objects of Optuna or Ray Tune to YAML's form."""
    hyperparameters = source.get("hyperparameters")
    if not isinstance(hyperparameters, Mapping):
        return source
    return {**source, "hyperparameters": from_ray_tune(from_optuna(hyperparameters))}


_LISTS = ("values", "vals", "choices")  # other tools' names for the values of a categorical
_ENDS = (("minval", "maxval"), ("min", "max"), ("low", "high"), ("lower", "upper"))
_LARGER_IS_BETTER = re.compile(
    # A word of the name, as in val_acc, acc@1, BinaryAUROC or f1_macro.
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
    r"(?i:acc|accuracy|auc|auroc|auprc|f1(?:score)?|precision|recall|m?ap|m?iou|dice|bleu|rouge|r2|top[15]|ndcg|mrr|mcc"
    r"|psnr|ssim|reward)(?![a-z])"
)
_SMALLER_IS_BETTER = re.compile(r"loss|err|neg|one_minus|(?<!\w)1-", re.IGNORECASE)
_FAR = 1e12  # no hyperparameter is this large: the exponent must be a value


def doubts(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """The path of each field of a valid config that its author hardly meant, and a warning: constants that look like
    ranges, values in place of exponents, or lengths with one rung. Each names a cure, and a spelling without a warning
    for the case that the config is right."""
    searcher = config.searcher
    compares = not isinstance(searcher, SingleSearcher)
    for name, spec in config.hyperparameters.items():
        yield from _constants(spec, f"hyperparameters.{name}", compares=compares)
    yield from _exponents(config.space.root, "hyperparameters")
    count = searcher.trial_count
    if compares and count is not None and count > 1 and not any(ranges(config.space.root)):
        what = f"none has a range, so all {count} trials train with the same values, and only their seeds differ"
        yield "hyperparameters", f"{what}; a range is, for example, lr: {{type: log, base: 10, minval: -4, maxval: -1}}"
    if isinstance(searcher, AutoSearcher | AdaptiveASHASearcher) and searcher.unit == "epochs" and count != 1:
        length = cast("int", searcher.length)  # the rules require it
        if length < getattr(searcher, "divisor", DIVISOR) and len(set(rungs_of(config))) == 1:
            what = f"with {counted(length, 'epoch')} there is one rung, so every trial trains to the end"
            yield "searcher.max_length", f"{what}; for more rungs, give the length in batches; else write name: random"


def _constants(spec: Any, path: str, *, compares: bool) -> Iterator[tuple[str, str]]:
    """Constants that look like ranges. ``type: const`` marks an intended one."""
    if isinstance(spec, list):
        # A list of integers may be one value, such as the sizes of layers.
        if compares and len(spec) > 1 and any(isinstance(item, float) for item in spec):
            shown = json.dumps(spec)
            what = f"is one constant, the list {shown}; to search over its values, write {{type: categorical, vals: "
            yield path, f"{what}{shown}}}; to keep it, {{type: const, val: {shown}}}"
    elif isinstance(spec, Mapping) and spec.get("type") == "categorical":
        for place, item in enumerate(spec["vals"]):
            if isinstance(item, Mapping) and "type" not in item:  # it may be a space of its own
                for name, each in item.items():
                    yield from _constants(each, f"{path}.vals[{place}].{name}", compares=False)
    elif isinstance(spec, Mapping) and "type" not in spec:
        if meant := _range_meant(spec):
            what = f"has no type, so its fields are constants; to search over it, write {meant}; to keep it, "
            yield path, f"{what}{{type: const, val: {json.dumps(spec)}}}"
            return
        for name, item in spec.items():
            yield from _constants(item, f"{path}.{name}", compares=compares)


def _range_meant(spec: Mapping[str, Any]) -> str:
    """The range that a mapping without a type seems to mean, as YAML; "" for a mapping of hyperparameters."""
    if values := next((spec[name] for name in _LISTS if isinstance(spec.get(name), list)), None):
        return f"{{type: categorical, vals: {json.dumps(values)}}}"
    ends = next((ends for ends in _ENDS if all(isinstance(spec.get(end), int | float) for end in ends)), None)
    if ends is None:
        return ""
    low, high = (spec[end] for end in ends)
    kind = "int" if isinstance(low, int) and isinstance(high, int) else "double"
    return f"{{type: {kind}, minval: {low!r}, maxval: {high!r}}}"


def _exponents(domain: object, path: str) -> Iterator[tuple[str, str]]:
    """Log ranges whose minval and maxval look like values instead of exponents."""
    match domain:
        case Nested(domains=domains):
            for name, each in domains:
                yield from _exponents(each, f"{path}.{name}")
        case Categorical(vals=vals):
            for place, val in enumerate(vals):
                yield from _exponents(val, f"{path}.vals[{place}]")
        case Log(base=base, minval=minval, maxval=maxval):
            low, high = domain.bounds
            is_narrow = low > 0 and high / low < 2
            is_rate = 0 < minval < 1 and (maxval <= 1 or maxval / minval >= 10)
            if minval >= 0 and (is_narrow or is_rate or high > _FAR):
                what = f"ranges from {low:g} to {high:g}, because minval and maxval of a log are exponents"
                yield path, f"{what}; for {minval:g} to {maxval:g} write {_log_range(minval, maxval, base)}"


def _log_range(low: float, high: float, base: float) -> str:
    if low <= 0 or base <= 0 or base == 1:
        return "exponents: {type: log, base: 10, minval: -4, maxval: -1} is 0.0001 to 0.1"
    first, last = sorted(math.log(end, base) for end in (low, high))
    return f"{{type: log, base: {base:g}, minval: {first:.4g}, maxval: {last:.4g}}}"


def direction_doubts(searcher: object) -> Iterator[tuple[str, str]]:
    """For each metric in a raw ``searcher`` section that is minimized by default, although its name suggests that
    larger values are better: its path, and a warning."""
    if not isinstance(searcher, Mapping):
        return
    metrics = searcher.get("metrics")
    several = [each for each in metrics if isinstance(each, Mapping)] if isinstance(metrics, list) else []
    named = [("metric", searcher, searcher.get("metric"))]
    named += [(f"metrics[{place}]", each, each.get("name")) for place, each in enumerate(several)]
    for field, entry, name in named:
        has_direction = any(entry.get(each) is not None for each in ("smaller_is_better", "at_most", "at_least"))
        if has_direction or not isinstance(name, str):
            continue
        if _LARGER_IS_BETTER.search(name) and not _SMALLER_IS_BETTER.search(name):
            yield (
                f"searcher.{field}",
                f"the search minimizes {name!r}, because smaller_is_better is not set, although larger values seem "
                "better: set smaller_is_better: false beside it, or true if it is to be minimized",
            )
