"""How far training has come: the one source of truth for skipping, epochs, schedules and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A point in a training run.

    `batches` are counted per slot, which is also the number of global batches. `validated` and `saved` are the batches
    at the last validation and the last checkpoint, None before the first.
    """

    batches: int = 0
    validated: int | None = None
    saved: int | None = None

    def trained(self, batches: int) -> Progress:
        """After training to `batches` in total."""
        assert batches >= self.batches, (batches, self)
        return replace(self, batches=batches)

    def just_validated(self) -> Progress:
        return replace(self, validated=self.batches)

    def just_saved(self) -> Progress:
        return replace(self, saved=self.batches)

    @property
    def is_saved(self) -> bool:
        """Whether nothing would be lost by leaving now; true if nothing was trained."""
        return self.saved == self.batches or self.batches == 0

    def as_dict(self) -> dict[str, int | None]:
        return {"batches": self.batches, "validated": self.validated, "saved": self.saved}

    @classmethod
    def from_dict(cls, data: Mapping[str, int | None]) -> Progress:
        return cls(batches=data["batches"] or 0, validated=data.get("validated"), saved=data.get("saved"))
