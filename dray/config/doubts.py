"""Valid configs that their authors hardly meant: constants that look like ranges, values in place of exponents, or a
missing direction.

Each warning names a cure, and a spelling without a warning for the case that the config is right.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dray.config.schema import ExperimentConfig
from dray.config.searcher import SingleSearcher
from searchers.domains import Categorical, Nested, ranges
from searchers.numeric import Log

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
    """The path of each doubtful field, and a warning."""
    searcher = config.searcher
    compares = not isinstance(searcher, SingleSearcher)
    for name, spec in config.hyperparameters.items():
        yield from _constants(spec, f"hyperparameters.{name}", compares=compares)
    yield from _exponents(config.space.root, "hyperparameters")
    count = searcher.trial_count
    if compares and count is not None and count > 1 and not any(ranges(config.space.root)):
        what = f"none has a range, so all {count} trials train with the same values, and only their seeds differ"
        yield "hyperparameters", f"{what}; a range is, for example, lr: {{type: log, base: 10, minval: -4, maxval: -1}}"


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
