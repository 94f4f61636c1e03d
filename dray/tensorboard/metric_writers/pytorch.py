"""`TorchWriter`, Determined's old way to write to TensorBoard."""

from __future__ import annotations

import warnings
from typing import Any

from dray.training.metrics.tensorboard import latest

__all__ = ["TorchWriter"]


class TorchWriter:
    """A `SummaryWriter` in the trial's TensorBoard directory, made in a trial's constructor.

    Deprecated: use `context.get_tensorboard_writer()`, which returns the same writer.

    Attributes:
        writer: a `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        RuntimeError: made outside `pytorch.init()`.
    """

    def __init__(self) -> None:
        warnings.warn("TorchWriter is deprecated: use context.get_tensorboard_writer()", FutureWarning, stacklevel=2)
        board = latest()
        if board is None:
            raise RuntimeError(
                "TorchWriter() found no trial to write for; create it within pytorch.init(), for example in the "
                "trial's constructor"
            )
        self.writer: Any = board.writer()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write a scalar.

        Args:
            name: the tag in TensorBoard.
            value: the scalar.
            step: usually the number of batches trained.
        """
        self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write everything so far to the file."""
        self.writer.flush()

    def reset(self) -> None:
        """Close the file; later scalars go to another one."""
        self.writer.close()
