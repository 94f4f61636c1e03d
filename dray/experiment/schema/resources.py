"""The section ``resources``: what one trial runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from dray.experiment.schema.section import Section

#: More than any cluster has.
MAX_SLOTS = 1_000_000


class SlotRange(Section):
    """As many slots as are available, within bounds; only if one trial runs at a time."""

    min: int = Field(ge=1, le=MAX_SLOTS, description="minimum number of workers, which a trial waits for", examples=[1])
    max: int = Field(ge=1, le=MAX_SLOTS, description="maximum number of workers", examples=[4])


def _slots_form(raw: object) -> str:
    return SLOT_FORMS[isinstance(raw, Mapping | SlotRange)]


#: The two forms of the number of slots, by their names in pydantic's error locations.
SLOT_FORMS = ("as a number", "as a range")
SlotsPerTrial: TypeAlias = Annotated[
    Annotated[int, Field(ge=1, le=MAX_SLOTS), Tag(SLOT_FORMS[0])] | Annotated[SlotRange, Tag(SLOT_FORMS[1])],
    Discriminator(_slots_form),
]


class Resources(Section):
    """The slots that one trial runs on. ``slots_per_trial: 0`` means one slot of ``slot: cpu``."""

    slots_per_trial: SlotsPerTrial = Field(
        default=1,
        description="number of workers that train one trial; {min: 1, max: 4}: as many of these as the cluster has "
        "room for, if one trial runs at a time",
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
    cpus_per_slot: int = Field(default=1, ge=1, description="number of CPUs of each worker", examples=[1])
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

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, raw: object) -> object:
        if not isinstance(raw, dict):
            return raw
        raw = dict(raw)
        if isinstance(raw.get("is_single_node"), bool) and raw.pop("is_single_node"):
            raw["placement_strategy"] = "STRICT_PACK"
        if raw.get("slots_per_trial") == 0 and not isinstance(raw["slots_per_trial"], bool):
            raw |= {"slots_per_trial": 1, "slot": "cpu"}
        return raw


def even_sizes(asked: SlotRange, batch_size: int, most: int | None) -> tuple[int, ...]:
    """The numbers of workers in a range, up to ``most``, among which a batch can be divided evenly."""
    last = min(asked.max, batch_size, asked.max if most is None else most)
    return tuple(size for size in range(asked.min, last + 1) if batch_size % size == 0)
