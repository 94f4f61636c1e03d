"""A model trained data-parallel by the processes of a trial: DistributedDataParallel, in a process group of its own.

A rank that leaves between two exchanges (an exception, ShouldExit, InvalidHP) leaves the others in backward, waiting
for its gradients until the process group's timeout: half an hour. So gradients have a process group of their own, apart
from that of the ranks' other messages. A rank that leaves destroys it; the others' backward fails at once, and all
ranks can agree on what to do, over the group that remains.
"""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

BUCKET_BYTES = 250 << 20
"""How many bytes of weights are sent together, which takes as much memory again; as in DistributedDataParallel."""


class SpreadModel(DistributedDataParallel):
    """DistributedDataParallel that also reads and sets the attributes of the wrapped model.

    Without gradients (in a validation) it only calls the wrapped model: ranks may have different numbers of batches.
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

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        # Until `connected` is set, these are DistributedDataParallel's own attributes.
        if "connected" not in own or name in own or hasattr(type(self), name) or not hasattr(self.module, name):
            super().__setattr__(name, value)
            return
        if isinstance(value, (torch.nn.Module, torch.nn.Parameter)):
            known = {id(parameter) for parameter in self.module.parameters()}
            new = value.parameters() if isinstance(value, torch.nn.Module) else [value]
            if any(parameter.requires_grad and id(parameter) not in known for parameter in new):
                raise RuntimeError(
                    f"can't set {name!r} of a wrapped model to a {type(value).__name__} with new parameters: their "
                    "gradients would not be averaged over the slots; set it before context.wrap_model()"
                )
        setattr(self.module, name, value)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.connected:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        return self.module(*inputs, **kwargs)

    def share_buffers(self) -> None:
        """Give all ranks the chief's buffers (running means), as each forward pass in training does."""
        if self.connected and self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]

    def let_go(self) -> None:
        """Give up the connections to the other ranks. Only the wrapped model remains."""
        self.connected = False
        # The reducer and its logger hold the group too; its sockets close with the last reference.
        for name in ("reducer", "logger", "process_group"):
            setattr(self, name, None)


def share_weights(model: torch.nn.Module) -> None:
    """Give all ranks the chief's weights of a model that is not trained, as DistributedDataParallel does of others."""
    assert dist.group.WORLD is not None
    _sync_module_states(model, dist.group.WORLD, BUCKET_BYTES, src=0, params_and_buffers_to_ignore=())


def checked_ddp_kwargs(ddp_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Checked with a single process too, so that a mistake does not show only in the first distributed run."""
    if ddp_kwargs is None:
        return {}
    if not isinstance(ddp_kwargs, dict):
        raise TypeError(f"wrap_model: ddp_kwargs must be a dict, got {ddp_kwargs!r}")
    known = inspect.signature(DistributedDataParallel).parameters.keys() - {"module"}
    if unknown := ddp_kwargs.keys() - known:
        raise TypeError(
            f"wrap_model: DistributedDataParallel takes no {', '.join(sorted(map(repr, unknown)))}; "
            f"ddp_kwargs may hold {', '.join(sorted(known))}"
        )
    return ddp_kwargs


class _Line:
    """The process group of gradients, and its models: also those of earlier trials that still exist."""

    def __init__(self, world: Any) -> None:
        self.world = world
        # With the timeout of the default group, which its backend has among its options.
        options = getattr(world._get_backend(world._device_types[0]), "options", None)
        self.group: Any = dist.new_group(timeout=getattr(options, "_timeout", None))
        self.models: weakref.WeakSet[SpreadModel] = weakref.WeakSet()


_line: _Line | None = None


@atexit.register
def _forget() -> None:
    """Free the group first: a gloo group freed with the interpreter may abort it ("terminate called without ...")."""
    global _line
    if _line is not None:
        for model in list(_line.models):
            model.let_go()
        _line = None


def _shared_line() -> _Line:
    """Made at first use, by all ranks together, and kept for later trials: with NCCL it takes a second."""
    global _line
    if _line is None or _line.world is not dist.group.WORLD:
        _line = _Line(dist.group.WORLD)
    return _line


def hang_up(models: Iterable[torch.nn.Module]) -> None:
    """Destroy the process group of these models' gradients, so that no rank waits in vain."""
    global _line
    if _line is not None and any(model in _line.models for model in models if isinstance(model, SpreadModel)):
        for model in _line.models:
            model.let_go()
        group, _line = _line.group, None
        dist.destroy_process_group(group)


def is_hung_up(error: BaseException) -> bool:
    """Whether this is what a rank sees when another one has hung up."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
