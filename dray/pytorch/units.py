"""Batches and epochs, as periods, schedules and lengths."""

from __future__ import annotations

import enum

from dray.training.units import Batch, Epoch, TrainUnit

__all__ = ["Batch", "Epoch", "TrainUnit", "_TrainBoundaryType"]


class _TrainBoundaryType(enum.Enum):
    """What may be due at a boundary of training."""

    TRAIN = "TRAIN"
    VALIDATE = "VALIDATE"
    CHECKPOINT = "CHECKPOINT"
    REPORT = "REPORT"
