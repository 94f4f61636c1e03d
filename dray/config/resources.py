"""The section ``resources``: what one trial runs on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo, WithJsonSchema, field_validator

from dray.config.section import Section

#: More than any cluster has.
MAX_SLOTS = 1_000_000
#: About as many processes as NVIDIA's MPS serves on one GPU; and 1/n is far enough from 1/(n + 1).
MAX_SHARES = 50


class SlotRange(Section):
    """As many slots as are available, within bounds; only if one trial runs at a time."""

    place: ClassVar[str] = "resources.slots_per_trial"

    min: int = Field(ge=1, le=MAX_SLOTS, description="minimum number of workers, which a trial waits for", examples=[1])
    max: int = Field(ge=1, le=MAX_SLOTS, description="maximum number of workers", examples=[4])


def _share(number: float) -> float:
    """Exactly 1/n of a slot; of the digits of a third, two are enough: 0.33."""
    trials = 1 / number if 1 / MAX_SHARES <= number < 1 else 0.0
    if round(trials) > 1 and abs(trials - round(trials)) <= 0.05:
        return 1 / round(trials)
    near: tuple[float, float] = (1 / MAX_SHARES, 1)
    if trials:
        near = 1 / math.ceil(trials), 1 / math.floor(trials)
    elif number > 1:
        near = math.floor(number), math.ceil(number)
    raise ValueError(
        f"must be a whole number of slots, or 1/n of a slot (0.5, 0.33, 0.25, ..., {1 / MAX_SHARES:g}), "
        f"got {number:g}; write {near[0]:.4g} or {near[1]:.4g}"
    )


def _slots_form(raw: object) -> str:
    if isinstance(raw, Mapping | SlotRange):
        return SLOT_FORMS[2]
    # "1/3" must be a number, not an integer.
    return SLOT_FORMS[isinstance(raw, str) or (isinstance(raw, float) and not raw.is_integer())]


#: The forms of the number of slots, by their names in pydantic's error locations.
SLOT_FORMS = ("as a number", "as a share", "as a range")
SlotsPerTrial: TypeAlias = Annotated[
    Annotated[
        int,
        Field(ge=1, le=MAX_SLOTS),
        WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_SLOTS}),
        Tag(SLOT_FORMS[0]),
    ]
    | Annotated[
        float,
        AfterValidator(_share),
        WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
        Tag(SLOT_FORMS[1]),
    ]
    | Annotated[SlotRange, Tag(SLOT_FORMS[2])],
    Discriminator(_slots_form),
]


_IN_A_RANGE = "with a range of slots (resources.slots_per_trial); give one number of slots, or remove this field"


class Resources(Section):
    """The slots that one trial runs on. ``slots_per_trial: 0`` means one slot of ``slot: cpu``."""

    place: ClassVar[str] = "resources"

    slots_per_trial: SlotsPerTrial = Field(
        default=1,
        description="number of workers that train one trial; {min: 1, max: 4}: as many of these as the cluster has "
        "room for, if one trial runs at a time; 0.25: four trials share a slot",
        examples=[1],
    )
    max_slots: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of slots that all trials use together; by default, all of the cluster's",
        examples=[8],
    )
    slot: Literal["gpu", "cpu"] | None = Field(
        default=None,
        description="what a slot is; by default, found from what the cluster has; trials on cpu slots see no GPUs",
        examples=["gpu"],
    )
    cpus_per_slot: int = Field(default=1, ge=1, description="number of CPUs of each slot", examples=[1])
    placement_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="where a trial's workers run: PACK: on few nodes if possible; STRICT_PACK: on one node; SPREAD: on "
        "many nodes if possible; STRICT_SPREAD: each on its own node",
        examples=["STRICT_PACK"],
    )
    is_single_node: bool | None = Field(
        default=None, description="as in Determined: true means placement_strategy: STRICT_PACK", examples=["true"]
    )
    reuse_workers: bool = Field(
        default=True,
        description="run successive trials in the same processes, as new ones take seconds to start",
        examples=["false"],
    )

    @property
    def trials_per_slot(self) -> int:
        """How many trials share a slot: 4 if a trial has 0.25 of one; otherwise 1."""
        asked = self.slots_per_trial
        return round(1 / asked) if isinstance(asked, float) else 1

    @property
    def share(self) -> str:
        """What a trial has of a slot that it shares, as text: 1/4 slot; "" if trials share none."""
        return f"1/{self.trials_per_slot} slot" if self.trials_per_slot > 1 else ""

    @classmethod
    def respelled(cls, raw: dict[str, Any]) -> dict[str, Any]:
        asked, placed = raw.get("slots_per_trial", 1), raw.get("placement_strategy", "STRICT_PACK")
        if raw.get("is_single_node") is True and placed == "STRICT_PACK" and not isinstance(asked, Mapping):
            del raw["is_single_node"]
            raw["placement_strategy"] = "STRICT_PACK"
        if asked == 0 and not isinstance(asked, bool) and raw.get("slot", "cpu") == "cpu":
            raw |= {"slots_per_trial": 1, "slot": "cpu"}
        return raw

    @field_validator("slots_per_trial", mode="before")
    @classmethod
    def _not_zero(cls, asked: object) -> object:
        # With slot: cpu it has become 1.
        if asked == 0 and not isinstance(asked, bool):
            raise ValueError("0 means one slot of slot: cpu, but slot is not cpu; write slots_per_trial: 1")
        return asked

    @field_validator("placement_strategy")
    @classmethod
    def _not_strict_in_a_range(cls, placed: str, info: ValidationInfo) -> str:
        if placed.startswith("STRICT_") and isinstance(info.data.get("slots_per_trial"), SlotRange):
            raise ValueError(f"can't be {placed} {_IN_A_RANGE}")
        return placed

    @field_validator("is_single_node")
    @classmethod
    def _contradicted(cls, is_single: bool, info: ValidationInfo) -> None:
        # One that agrees with the other fields has become placement_strategy.
        if is_single and isinstance(info.data.get("slots_per_trial"), SlotRange):
            raise ValueError(f"can't be true {_IN_A_RANGE}")
        if is_single and "placement_strategy" in info.data:
            placed = info.data["placement_strategy"]
            raise ValueError(
                f"true means placement_strategy: STRICT_PACK, but placement_strategy is {placed}; remove one"
            )


def even_sizes(asked: SlotRange, batch_size: int, most: int | None) -> tuple[int, ...]:
    """The numbers of workers in a range, up to ``most``, among which a batch can be divided evenly."""
    last = min(asked.max, batch_size, asked.max if most is None else most)
    return tuple(size for size in range(asked.min, last + 1) if batch_size % size == 0)
