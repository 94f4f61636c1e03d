"""How a run divides its data among its processes, which determines its global batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dray.training.units import is_int


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the data were divided when the trial started; saved in every checkpoint, so that a resumed run has the same
    global batches.

    Args:
        replicas: number of processes.
        batch_size: records per batch of each; None with the user's batch sampler.
    """

    replicas: int
    batch_size: int | None

    def same_global_batch(self, other: Division) -> bool:
        """Whether both are known to have the same number of records in a global batch."""
        if self.batch_size is None or other.batch_size is None:
            return False
        return self.replicas * self.batch_size == other.replicas * other.batch_size

    def __str__(self) -> str:
        size = "a batch sampler" if self.batch_size is None else f"batches of {self.batch_size}"
        return f"{self.replicas} process(es) and {size} in each"

    def as_dict(self) -> dict[str, int | None]:
        return {"replicas": self.replicas, "batch_size": self.batch_size}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Division:
        return cls(replicas=data["replicas"], batch_size=data["batch_size"])


def global_batch_size(hparams: dict[str, Any] | None, size: int) -> int | None:
    """hparams["global_batch_size"], checked, and rounded down to a multiple of `size`; None if there is none."""
    if hparams is None or "global_batch_size" not in hparams:
        return None
    value = hparams["global_batch_size"]
    if not is_int(value):
        raise ValueError(f"hparams['global_batch_size'] must be an int, got {value!r} of type {type(value).__name__}")
    if value < size:
        raise ValueError(
            f"hparams['global_batch_size'] is {value}, less than the trial's {size} slot(s); each slot needs at least "
            "one record"
        )
    return int(value) // size * size
