"""The field ``searcher.metrics``: several objectives and constraints, in place of ``searcher.metric``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from dray.config.section import Section
from dray.errors import did_you_mean
from searchers.errors import FieldError
from searchers.objectives import Metric, Objectives

_FIELDS = ("name", "smaller_is_better", "at_most", "at_least")
_EXAMPLE = "{name: memory_mb, at_most: 8000}"


class MetricChoice(Section):
    """A metric of several: an objective, or with a limit a constraint."""

    place: ClassVar[str] = "searcher.metrics[]"

    name: str = Field(min_length=1, description="a validation metric", examples=["validation_loss"])
    smaller_is_better: bool | None = Field(
        default=None, description="minimize the metric (the default), else maximize it", examples=[True]
    )
    at_most: float | None = Field(default=None, description="the greatest value allowed: a constraint", examples=[8000])
    at_least: float | None = Field(default=None, description="the least value allowed: a constraint", examples=[0.5])

    def as_metric(self) -> Metric:
        """As the search takes it."""
        return Metric(
            name=self.name,
            smaller_is_better=self.smaller_is_better is not False,
            at_most=self.at_most,
            at_least=self.at_least,
        )


def objectives_of(metrics: list[MetricChoice]) -> Objectives:
    """As the search takes them.

    Raises:
        FieldError: there is no objective, or a metric is there twice.
    """
    return Objectives(tuple(each.as_metric() for each in metrics))


def _checked(raw: object) -> object:
    """Each entry without null fields.

    Raises:
        FieldError: fields of entries are wrong; with whole paths, such as ``searcher.metrics[1].at_most``.
    """
    if not isinstance(raw, list):
        return raw
    faults: list[tuple[str, str]] = []
    kept = []
    for number, entry in enumerate(raw):
        path = f"searcher.metrics[{number}]"
        if not isinstance(entry, Mapping):
            faults.append((path, f"must be a mapping, got {entry!r:.60}; for example {_EXAMPLE}"))
            continue
        fields = {name: value for name, value in entry.items() if value is not None}
        faults += [(f"{path}.{name}" if name in _FIELDS else path, what) for name, what in _faults_of(fields).items()]
        # The default is stored, too: what an experiment's own copy says was not left open.
        kept.append(fields if "at_most" in fields or "at_least" in fields else {"smaller_is_better": True, **fields})
    if faults:
        raise FieldError(faults)
    return kept


def _faults_of(fields: Mapping[object, object]) -> dict[object, str]:
    """What is wrong with an entry's fields, by name."""
    faults: dict[object, str] = {}
    for field, value in fields.items():
        if field not in _FIELDS:
            hint = did_you_mean(field, _FIELDS, f"; known fields are {', '.join(_FIELDS)}")
            faults[field] = f"unknown field {field}{hint}"
        elif field == "name" and (not isinstance(value, str) or not value):
            faults[field] = f"must be the name of a validation metric, got {value!r:.60}"
        elif field == "smaller_is_better" and not isinstance(value, bool):
            faults[field] = f"must be true or false, got {value!r:.60}"
        elif field in ("at_most", "at_least") and not _is_number(value):
            faults[field] = f"must be a finite number, got {value!r:.60}; for example {_EXAMPLE}"
    if "name" not in fields and not faults:
        faults["name"] = f"missing required field; a validation metric, for example {_EXAMPLE}"
    if "smaller_is_better" in fields and ("at_most" in fields or "at_least" in fields):
        faults["smaller_is_better"] = (
            "a constraint is not optimized; remove it, or the limit, or give an objective and a constraint of this name"
        )
    return faults


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _have_objective(metrics: list[MetricChoice]) -> list[MetricChoice]:
    objectives_of(metrics)
    return metrics


Metrics: TypeAlias = Annotated[
    list[MetricChoice],
    BeforeValidator(_checked, json_schema_input_type=list[MetricChoice]),
    AfterValidator(_have_objective),
]
