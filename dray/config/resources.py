"""The section ``resources``: the slots that one trial runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema

from dray.config import defaults
from dray.config.section import Section, replace_older_field

MAX_SHARES = 50  # about the number of processes that NVIDIA's MPS serves on one GPU; 1/n is distinct from 1/(n + 1)


#: Ray's names of GPUs, as in the label ray.io/accelerator-type of its nodes.
GpuType: TypeAlias = Literal[
    "A10G", "A100", "A100-40G", "A100-80G", "B200", "B300", "GB200", "GB300", "H20", "H100", "H200", "L4", "L40S",
    "P4", "P100", "RTX-PRO-6000", "T4", "V100",
    "AMD-Instinct-MI100", "AMD-Instinct-MI210", "AMD-Instinct-MI250X", "AMD-Instinct-MI250X-MI250",
    "AMD-Instinct-MI300A", "AMD-Instinct-MI300X-HF", "AMD-Instinct-MI300X-OAM", "AMD-Instinct-MI308X",
    "AMD-Instinct-MI325X-OAM",
    "AMD-Instinct-MI350X-OAM", "AMD-Instinct-MI355X-OAM",
]  # fmt: skip
#: Other names of Ray's, and why no trial can run there.
UNUSABLE = {
    "K80": "torch 2 has no code for it",
    "AMD-Radeon-HD-7900": "ROCm does not support it",
    "AMD-Radeon-R9-200-HD-7900": "ROCm does not support it",
    "Intel-GPU-Max-1100": "dray trains on GPUs by CUDA and ROCm only",
    "Intel-GPU-Max-1550": "dray trains on GPUs by CUDA and ROCm only",
}


def _usable(name: object) -> object:
    if isinstance(name, str) and (why := UNUSABLE.get(name)):
        raise ValueError(f"no trial can run on a GPU of type {name}: {why}; remove it")
    return name


class SlotRange(Section):
    """All free slots within bounds, for experiments that run one trial at a time."""

    place: ClassVar[str] = "resources.slots_per_trial"

    min: int = Field(
        ge=1, le=defaults.MAX_SLOTS, description="minimum number of workers, for which a trial waits", examples=[1]
    )
    max: int = Field(ge=1, le=defaults.MAX_SLOTS, description="maximum number of workers", examples=[4])


def _share(number: float) -> float:
    """Exactly 1/n of a slot, for a number that is close to it: a third for 0.33."""
    trials = 1 / number if 1 / MAX_SHARES <= number < 1 else 0.0
    if round(trials) > 1 and abs(trials - round(trials)) <= 0.05:
        return 1 / round(trials)
    shares = f"1/n of a slot (0.5, 0.33, 0.25, ..., {1 / MAX_SHARES:g})"
    raise ValueError(f"must be a whole number of slots, or {shares}, got {number:g}")


def _slots_form(raw: object) -> str:
    if isinstance(raw, Mapping | SlotRange):
        return "range"
    # "1/3" must be a number, not an integer.
    return "share" if isinstance(raw, str) or (isinstance(raw, float) and not raw.is_integer()) else "number"


SlotsPerTrial: TypeAlias = Annotated[
    Annotated[
        int,
        Field(ge=1, le=defaults.MAX_SLOTS),
        WithJsonSchema({"type": "integer", "minimum": 0, "maximum": defaults.MAX_SLOTS}),
        Tag("number"),
    ]
    | Annotated[
        float,
        AfterValidator(_share),
        WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}),
        Tag("share"),
    ]
    | Annotated[SlotRange, Tag("range")],
    Discriminator(_slots_form),
]


class Resources(Section):
    """The slots that one trial runs on. ``slots_per_trial: 0`` means one slot of ``slot: cpu``."""

    place: ClassVar[str] = "resources"

    slots_per_trial: SlotsPerTrial = Field(
        default=1,
        description="number of workers that train one trial. {min: 1, max: 4}: as many as the cluster has room for, if "
        "one trial runs at a time. 0.25: four trials share a slot",
        examples=[1],
    )
    max_slots: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of slots that all trials use together. By default, all slots of the cluster",
        examples=[8],
    )
    priority: int = Field(
        default=defaults.PRIORITY,
        ge=1,
        le=99,
        description="for experiments that share a server (dray serve). Smaller numbers go first, and take the slots of "
        "others at once",
        examples=[10],
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="for experiments that share a server: their share of slots, relative to others of the same "
        "priority",
        examples=[2.0],
    )
    slot: Literal["gpu", "cpu"] | None = Field(
        default=None,
        description="what a slot is. By default, gpu if the cluster has GPUs. Trials on cpu slots see no GPUs",
        examples=["gpu"],
    )
    slot_type: list[Annotated[GpuType, BeforeValidator(_usable)]] | None = Field(
        default=None,
        min_length=1,
        description="GPU types that trials may run on, by Ray's names, in order of preference. All slots of a trial "
        "have the same type. By default, any type",
        examples=[["A100", "L4"]],
    )
    cpus_per_slot: int = Field(default=1, ge=1, description="number of CPUs of each slot", examples=[1])
    mesh: dict[str, Annotated[int, Field(ge=1)]] | None = Field(
        default=None,
        description="sizes of the dimensions of context.device_mesh, by name. Without dp and dp_shard, dp_shard is "
        "slots_per_trial divided by their product",
        examples=[{"tp": 2}],
    )
    placement_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="where a trial's workers run. PACK: on few nodes if possible; STRICT_PACK: on one node; SPREAD: on "
        "many nodes if possible; STRICT_SPREAD: each on its own node",
        examples=["STRICT_PACK"],
    )
    is_single_node: bool | None = Field(
        default=None, description="as in Determined: true means placement_strategy: STRICT_PACK", examples=[True]
    )
    reuse_workers: bool = Field(
        default=True,
        description="run successive trials in the same processes, because new ones take seconds to start",
        examples=[False],
    )

    @property
    def trials_per_slot(self) -> int:
        """The number of trials that share a slot: 4 for ``slots_per_trial: 0.25``; otherwise 1."""
        asked = self.slots_per_trial
        return round(1 / asked) if isinstance(asked, float) else 1

    @property
    def share(self) -> str:
        """A trial's share of its slot, as text: "1/4 slot"; "" if trials share no slots."""
        return f"1/{self.trials_per_slot} slot" if self.trials_per_slot > 1 else ""

    @classmethod
    def with_current_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        replace_older_field(raw, cls.place, "is_single_node", "placement_strategy", {True: "STRICT_PACK"})
        asked = raw.get("slots_per_trial")
        if asked == 0 and asked is not False and raw.get("slot", "cpu") == "cpu":
            raw |= {"slots_per_trial": 1, "slot": "cpu"}
        return raw


def even_sizes(asked: SlotRange, batch_size: int, most: int | None) -> tuple[int, ...]:
    """The numbers of workers in a range, up to ``most``, among which a batch can be divided evenly."""
    last = min(asked.max, batch_size, asked.max if most is None else most)
    return tuple(size for size in range(asked.min, last + 1) if batch_size % size == 0)
