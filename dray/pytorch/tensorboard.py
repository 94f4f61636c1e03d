"""The writer that trials of old made for themselves."""

from __future__ import annotations

import warnings
from typing import Any

from dray.training.tensorboard import TensorBoard, latest

__all__ = ["TensorBoard", "TorchWriter"]


class TorchWriter:
    """A `SummaryWriter` at the place of the trial, as trials of old made it in their constructor.

    Deprecated: use `context.get_tensorboard_writer()`, which is the same writer.

    Attributes:
        writer: a `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        RuntimeError: made outside of `pytorch.init()`.
    """

    def __init__(self) -> None:
        warnings.warn("TorchWriter is deprecated: use context.get_tensorboard_writer()", FutureWarning, stacklevel=2)
        board = latest()
        if board is None:
            raise RuntimeError(
                "TorchWriter() knows no trial to write for: make it within pytorch.init(), such as in the trial's "
                "constructor"
            )
        self.writer: Any = board.writer()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write a number.

        Args:
            name: under which TensorBoard shows it.
            step: mostly batches trained.
        """
        self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Have all that was written so far in the file."""
        self.writer.flush()

    def reset(self) -> None:
        """End the file; what comes later goes to another one."""
        self.writer.close()
