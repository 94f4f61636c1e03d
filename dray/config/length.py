"""Lengths of training in batches, epochs or records, as in Determined's configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from dray.training.units import Batch, Epoch, Records, TrainUnit
from searchers.errors import did_you_mean

LengthUnit: TypeAlias = Literal["batches", "epochs", "records"]
UNITS: tuple[LengthUnit, ...] = get_args(LengthUnit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """``value`` units of training, from the start of the trial."""

    unit: LengthUnit
    value: int

    def __str__(self) -> str:
        return f"{self.value} {self.unit}"

    def to_dict(self) -> dict[str, int]:
        """The form in a config: ``{"epochs": 16}``."""
        return {self.unit: self.value}

    def to_unit(self) -> TrainUnit:
        """The training loop's form: ``Epoch(16)``."""
        kinds: dict[LengthUnit, type[TrainUnit]] = {"batches": Batch, "epochs": Epoch, "records": Records}
        return kinds[self.unit](self.value)


def _length(raw: object) -> Length:
    """A length; a number counts batches, as in Determined's older files."""
    return raw if isinstance(raw, Length) else _parsed(raw if isinstance(raw, Mapping) else {"batches": raw}, 1)


def _period(raw: object) -> Length | None:
    """A period with its unit; None for ``{batches: 0}``, Determined's form of "no period"."""
    if raw is None or isinstance(raw, Length):
        return raw
    if not isinstance(raw, Mapping):
        raise ValueError(
            f"must have a unit, got {raw!r}; write {{batches: 100}} or {{epochs: 1}}; in Determined's oldest files the "
            "unit is a step, of 100 batches by default"
        )
    period = _parsed(raw, 0)
    return period if period.value > 0 else None


def _parsed(raw: Mapping[object, object], minimum: int) -> Length:
    if len(raw) != 1 or next(iter(raw)) not in UNITS:
        hint = did_you_mean(next(iter(raw), ""), UNITS if len(raw) == 1 else (), "; write {epochs: 16}")
        raise ValueError(f"must have exactly one of {', '.join(UNITS)}, got {dict(raw)!r}{hint}")
    [(unit, value)] = raw.items()
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number of batches, epochs or records, got {value!r}; write {{epochs: 16}}")
    if value < minimum:
        raise ValueError(f"must be at least {minimum}, got {value} {unit}")
    return Length(unit=unit, value=value)  # type: ignore[arg-type]


def _schema(minimum: int) -> dict[str, Any]:
    units = {unit: {"type": "integer", "minimum": minimum} for unit in UNITS}
    length = {"type": "object", "properties": units, "additionalProperties": False}
    return length | {"minProperties": 1, "maxProperties": 1}


_BATCHES = {"type": "integer", "minimum": 1, "description": "in batches"}
_as_written = PlainSerializer(lambda length: None if length is None else length.to_dict())
#: The length of a trial.
MaxLength: TypeAlias = Annotated[
    Length, BeforeValidator(_length), _as_written, WithJsonSchema({"anyOf": [_schema(1), _BATCHES]})
]
#: The period of an event; None: never.
Period: TypeAlias = Annotated[Length | None, BeforeValidator(_period), _as_written, WithJsonSchema(_schema(0))]
