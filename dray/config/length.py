"""Lengths of training: a number of batches, epochs or records, as in Determined's configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from dray.errors import did_you_mean
from dray.training.units import Batch, Epoch, Records, TrainUnit

LengthUnit: TypeAlias = Literal["batches", "epochs", "records"]
UNITS: tuple[LengthUnit, ...] = get_args(LengthUnit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """``value`` units of training, from the start of the trial.

    Attributes:
        unit: ``batches`` (of the global batch size), ``epochs`` (passes over the training data) or ``records``.
        value: How many; never negative.
    """

    unit: LengthUnit
    value: int

    def __str__(self) -> str:
        return f"{self.value} {self.unit}"

    def to_dict(self) -> dict[str, int]:
        """As in a config: ``{"epochs": 16}``."""
        return {self.unit: self.value}

    def to_unit(self) -> TrainUnit:
        """As the training loop takes it: ``Epoch(16)``."""
        kinds: dict[LengthUnit, type[TrainUnit]] = {"batches": Batch, "epochs": Epoch, "records": Records}
        return kinds[self.unit](self.value)


def parse_length(raw: object, *, minimum: int) -> Length:
    """``{"epochs": 16}`` or a plain number, which counts batches.

    A plain number is Determined's legacy form; in PyTorch trials it counts batches.

    Args:
        raw: The config's value.
        minimum: The least valid value: 1 for a length, 0 for a period.

    Raises:
        ValueError: it is neither; the message says what was given.

    >>> parse_length({"epochs": 16}, minimum=1)
    Length(unit='epochs', value=16)
    """
    if isinstance(raw, Length):
        return raw
    unit: LengthUnit = "batches"
    value: object = raw
    if isinstance(raw, Mapping):
        if len(raw) != 1 or next(iter(raw)) not in UNITS:
            hint = did_you_mean(next(iter(raw), ""), UNITS if len(raw) == 1 else (), "; write {epochs: 16}")
            raise ValueError(f"must have exactly one of {', '.join(UNITS)}, got {dict(raw)!r}{hint}")
        [(unit, value)] = raw.items()
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"must be a whole number of batches, epochs or records, got {value!r}; write {{epochs: 16}}")
    if value < minimum:
        raise ValueError(f"must be at least {minimum}, got {value} {unit}")
    return Length(unit=unit, value=value)


def length_schema(minimum: int, *, is_period: bool = False) -> dict[str, Any]:
    """The JSON Schema of what ``parse_length`` takes; a period must have a unit."""
    number = {"type": "integer", "minimum": minimum}
    units = {unit: dict(number) for unit in UNITS}
    length = {"type": "object", "properties": units, "additionalProperties": False}
    length |= {"minProperties": 1, "maxProperties": 1}
    return length if is_period else {"anyOf": [length, {**number, "description": "in batches"}]}
