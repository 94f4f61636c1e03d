"""A trial with several metrics, each known in closed form from its hyperparameters and its length."""

from __future__ import annotations

from typing import Any

from recorded import Recorded


class Several(Recorded):
    """``loss`` falls with ``size`` and with the batches trained; ``memory`` is twice ``size``."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.size, self.luck, self.trained = context.get_hparam("size"), context.get_hparam("luck"), 0

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.trained = batch_idx + 1
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.luck + (1 - self.size) ** 2 + 1 / self.trained
        return {"loss": loss, "size": self.size, "memory": 2 * self.size}
