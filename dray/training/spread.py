"""A model over the processes of a trial: DistributedDataParallel, on connections of its own that can be cut.

A rank that leaves in the middle of a stretch (an exception, ShouldExit, InvalidHP) leaves the others within backward,
waiting for its gradients for as long as the process group's timeout: half an hour. So gradients travel in a group of
their own, apart from the words that ranks exchange. Whoever leaves cuts it; the others' backward fails at once, and all
ranks can agree on what to do, over the group that is still whole.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class SpreadModel(DistributedDataParallel):
    """DistributedDataParallel that lets through to the attributes of the model within.

    Without gradients (in a validation) it is the model within: ranks may then have different numbers of batches.
    """

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        line = _shared_line()
        super().__init__(module, **{"process_group": line.group, **kwargs})
        self.connected = True
        line.models.add(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.connected:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        return self.module(*inputs, **kwargs)

    def share_buffers(self) -> None:
        """Give all ranks the chief's buffers (running means), as each forward in training does."""
        if self.connected and self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            chief = dist.get_global_rank(self.process_group, 0)
            for buffer in self.modules_buffers:
                dist.broadcast(buffer, chief, group=self.process_group)

    def let_go(self) -> None:
        """Give up the connections to the other ranks. What is left is the model within."""
        self.connected = False
        # The reducer and its logger hold the group too; a socket is closed with the last reference to it.
        for name in ("reducer", "logger", "process_group"):
            setattr(self, name, None)


class _Line:
    """The gradients' own process group, and the models on it: also those of earlier trials that are not yet gone."""

    def __init__(self, world: Any) -> None:
        self.world = world
        # With the patience of the program's own group, whose backend has it among its options.
        options = getattr(world._get_backend(world._device_types[0]), "options", None)
        self.group: Any = dist.new_group(timeout=getattr(options, "_timeout", None))
        self.models: weakref.WeakSet[SpreadModel] = weakref.WeakSet()


_line: _Line | None = None


@atexit.register
def _forget() -> None:
    """A gloo group that goes with the interpreter aborts it now and then ("terminate called without ..."): go first."""
    global _line
    if _line is not None:
        for model in list(_line.models):
            model.let_go()
        _line = None


def _shared_line() -> _Line:
    """Made at first use, by all ranks together, and kept for the trials that follow: over NCCL it takes a second."""
    global _line
    if _line is None or _line.world is not dist.group.WORLD:
        _line = _Line(dist.group.WORLD)
    return _line


def hang_up(models: Iterable[torch.nn.Module]) -> None:
    """Cut the connections over which these models' gradients travel, so that no rank waits in vain."""
    global _line
    if _line is not None and any(model in _line.models for model in models if isinstance(model, SpreadModel)):
        for model in _line.models:
            model.let_go()
        group, _line = _line.group, None
        dist.destroy_process_group(group)


def is_hung_up(error: BaseException) -> bool:
    """Whether this is what a rank sees when another one has hung up."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
