"""Hooks of a process that runs several trials, called before each of them trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

#: Called with the trial's models, in its thread.
before_training: list[Callable[[Sequence[torch.nn.Module]], None]] = []
