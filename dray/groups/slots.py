"""The slots of worker groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from dray.rpc.wire import wire


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of a group: their number, and the resources of each."""

    per_trial: int  # workers of a group, one per slot
    gpu: bool
    cpus_per_slot: float
    runtime_env: Mapping[str, Any]
    placement_strategy: str = "PACK"  # Ray's strategy for spreading the workers over nodes
    shared_by: int = 1  # number of one-worker groups that share a slot
    gpu_types: tuple[str, ...] = ()
    """GPU types in order of preference; a group's GPUs have the same type. (): any type."""
    labels: Mapping[str, str] = field(default_factory=dict)  # the label selector for a group's nodes

    def __str__(self) -> str:
        """The resources of a group, as text."""
        types = f"{' or '.join(self.gpu_types)} " if self.gpu_types else ""
        gpu = f"{Fraction(1, self.shared_by)} {types}GPU and " if self.gpu else ""
        return f"{self.per_trial} x ({gpu}{self._cpus})"

    @property
    def env_for_ray(self) -> dict[str, Any]:
        """The runtime environment for Ray, which needs lists: messages turn them into tuples."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.runtime_env.items()}

    @property
    def taken(self) -> float:
        """The number of slots that a group takes: a whole number, or 1/n."""
        return self.per_trial if self.shared_by == 1 else 1 / self.shared_by

    @property
    def unit(self) -> float:
        """A slot's GPUs, or its CPUs if it has no GPU."""
        return 1.0 if self.gpu else self.cpus_per_slot

    @property
    def share(self) -> str:
        """A group's share of a slot as text, such as "1/4 GPU"; "" if groups don't share slots."""
        if self.shared_by == 1:
            return ""
        return f"{Fraction(1, self.shared_by)} GPU" if self.gpu else self._cpus

    @property
    def _cpus(self) -> str:
        cpus = Fraction(self.cpus_per_slot) / self.shared_by
        return f"{cpus} CPU{'s' * (cpus > 1)}"

    @property
    def kind(self) -> str:
        """ "gpu" or "cpu"."""
        return "gpu" if self.gpu else "cpu"

    @property
    def resources(self) -> dict[str, float]:
        """The resources of each worker, for Ray."""
        has = {"CPU": float(self.cpus_per_slot), **({"GPU": 1.0} if self.gpu else {})}
        # Rounded down to Ray's precision, so that n shares never exceed the whole.
        return {name: math.floor(amount * 10_000 / self.shared_by) / 10_000 for name, amount in has.items()}
