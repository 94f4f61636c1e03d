"""Data-parallel training by the processes of a trial: DistributedDataParallel in a separate process group.

Gradients and the ranks' messages have different process groups. So a rank that leaves can close the first, and all
ranks can still agree on how to proceed; see `dray.training.parallel.agreement`.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import inspect
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.utils import _replace_by_prefix, _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from dray.training.pretrained import shared_parameters

#: The size of the buffer for broadcasting weights, as in DistributedDataParallel.
BUCKET_BYTES = 250 << 20

_UNUSED = (
    "parameters of a wrapped model had no gradients in the batch before, so the slots wait for them: the loss did not "
    "depend on them, or they were frozen after context.wrap_model(). Freeze parameters before wrapping, or call "
    'context.wrap_model(model, ddp_kwargs={"find_unused_parameters": True})'
)


class DDPModel(DistributedDataParallel):
    """DistributedDataParallel that also reads and sets the attributes of the wrapped model.

    Copying it copies just the wrapped model. Its state dict has no prefix, as if there were no other ranks.
    """

    #: The block in which the chief's buffers arrive.
    while_syncing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __init__(self, module: torch.nn.Module, **kwargs: Any) -> None:
        gradients = gradients_group()
        # Methods and submodules of the wrapped model that were accessed; calling them averages no gradients.
        self.passed_through: set[str] = set()
        super().__init__(module, **{"process_group": gradients.group, **kwargs})
        # Parameters whose gradients are averaged in a backward pass after a call of the model itself.
        self.averaged_ids = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        # Call just the wrapped model, even with gradients enabled: ranks may have different numbers of batches.
        self.runs_alone = False
        self._sync_norms = [
            layer
            for layer in module.modules()
            if isinstance(layer, torch.nn.SyncBatchNorm) and layer.process_group is None
        ]
        self._register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self.connected = True
        gradients.models[self] = DDPModel.release

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(super().__getattr__("module"), name)
            if callable(value):
                self.passed_through.add(name)
            return value

    def __getitem__(self, index: Any) -> Any:
        part = self.module[index]
        self.passed_through.add(f"module[{index!r}]")
        return part

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        # DistributedDataParallel's own refuses a custom group, and would connect the copy to the other ranks.
        return _identity, (self.module,)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.connected and not self.runs_alone:
            # SyncBatchNorm uses the communicator of the gradients, as without dray: GPUs may run collectives of two
            # communicators in different orders, and wait for one another. Reset below, since groups can't be copied.
            for layer in self._sync_norms:
                layer.process_group = self.process_group
            try:
                return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if "Expected to have finished reduction" in str(error):
                    raise RuntimeError(_UNUSED) from error
                raise
            finally:
                for layer in self._sync_norms:
                    layer.process_group = None
        return self.module(*inputs, **kwargs)

    def sync_buffers(self) -> None:
        """Send the chief's buffers (running means) to all ranks, as each forward pass in training does."""
        if self.connected and self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._sync_buffers()

    def _sync_buffers(self) -> None:
        with self.while_syncing():
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Release the connections to the other ranks, and keep only the wrapped model."""
        self.connected = False
        # All of these hold the group, whose sockets close with the last reference.
        for name in ("reducer", "logger", "process_group"):
            setattr(self, name, None)
        self._comm_hooks.clear()


def _identity(module: torch.nn.Module) -> torch.nn.Module:
    return module


def _add_prefix(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give weights the prefix that they have inside a `DDPModel`."""
    _replace_by_prefix(state, prefix, f"{prefix}module.")


def data_parallel(
    model: torch.nn.Module,
    device: torch.device,
    ddp_kwargs: dict[str, Any],
    *,
    compress_gradients: bool,
    model_parallel: int = 1,
) -> torch.nn.Module:
    """Give a model the chief's weights on all ranks and, if it is trained, averaged gradients (in float16 with
    `compress_gradients`). `model_parallel`: see `MeshShape`."""
    shared = shared_parameters(model)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if shared or not trains or model_parallel > 1:
        broadcast_weights(model, leave_out=shared)
    if not trains:
        return model
    device_ids = [device] if device.type == "cuda" else None
    # As views of buckets, gradients are in memory only once.
    options = {"device_ids": device_ids, "init_sync": not shared, "gradient_as_bucket_view": True}
    group = gradients_group().averaging(model_parallel)
    wrapped = DDPModel(model, **{**options, "process_group": group, **ddp_kwargs})
    if compress_gradients:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(wrapped.process_group, fp16_compress_hook)
    return wrapped


def check_same_parameters(model: torch.nn.Module, allgather: Callable[[str], list[str]]) -> None:
    """Check that all ranks, which call this together, have built a model with the same parameters."""
    shapes = [
        (name, None if isinstance(each, UninitializedParameter) else tuple(each.shape))
        for name, each in model.named_parameters()
    ]
    digests = allgather(hashlib.sha256(repr(shapes).encode()).hexdigest())
    if others := [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise ValueError(
            f"wrap_model: on rank {', '.join(others)} the model's parameters have other names or shapes than on rank "
            "0, whose would be saved; build the same model on all ranks, and if each has a part of it, such as its "
            "own experts or layers, make the parts DTensors on context.device_mesh"
        )


def broadcast_weights(model: torch.nn.Module, leave_out: Collection[str] = ()) -> None:
    """Send the chief's weights to all ranks, except those named in `leave_out`, which all ranks have."""
    assert dist.group.WORLD is not None
    _sync_module_states(model, dist.group.WORLD, BUCKET_BYTES, src=0, params_and_buffers_to_ignore=leave_out)


def checked_ddp_kwargs(ddp_kwargs: dict[str, Any] | None) -> dict[str, Any]:
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


class _Group:
    """The process group of gradients, and its models, including earlier trials' that are still in memory."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.timeout = timeout()
        self.group: Any = dist.new_group(timeout=self.timeout)
        connect(self.group)
        #: Each model, with the function that releases its connections.
        self.models: weakref.WeakKeyDictionary[torch.nn.Module, Callable[[Any], None]] = weakref.WeakKeyDictionary()
        #: Meshes of sharded models by shape, which hold process groups too: see `dray.training.parallel.mesh`.
        self.meshes: dict[Any, Any] = {}
        self.subgroups: list[Any] = []
        self._made: dict[tuple[int, ...], Any] = {}

    def has(self, group: Any) -> bool:
        return any(group is own for own in (self.group, *self.subgroups))

    def averaging(self, model_parallel: int) -> Any:
        """The group in which this rank's gradients are averaged. All ranks call this together."""
        rows = [range(first, dist.get_world_size(), model_parallel) for first in range(model_parallel)]
        return [self.make(tuple(row)) for row in rows][dist.get_rank() % model_parallel]

    def make(self, ranks: tuple[int, ...]) -> Any:
        """The subgroup of these ranks, which all ranks of the trial together make at its first use."""
        if len(ranks) == dist.get_world_size():
            return self.group
        if ranks not in self._made:
            alone = len(ranks) == 1
            self._made[ranks] = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=alone)
            if dist.get_rank() in ranks:
                self.subgroups.append(self._made[ranks])
                connect(self._made[ranks])
        return self._made[ranks]


_gradients: _Group | None = None
_aborted: Any = None  # the default process group, once this process has aborted it


# Also called at exit: a gloo group that is freed with the interpreter may abort it ("terminate called without ...").
@atexit.register
def _forget_group() -> list[Any]:
    """Release the group's models, and return the group with its subgroups; [] if there is none."""
    global _gradients
    gradients, _gradients = _gradients, None  # first, because two threads may call this at the same time
    if gradients is None:
        return []
    for model, release in list(gradients.models.items()):
        release(model)
    for mesh in gradients.meshes.values():
        getattr(mesh, "_pg_registry", {}).clear()  # not in older versions of torch
    return [*gradients.subgroups, gradients.group]


def gradients_group() -> _Group:
    """The group of gradients. All ranks together make it at its first use, which takes a second with NCCL; it is kept
    for later trials."""
    global _gradients
    if _gradients is None or _gradients.world is not dist.group.WORLD:
        _gradients = _Group(dist.group.WORLD)
    return _gradients


def gather_numbers(number: int, rank: int, size: int, device: torch.device) -> list[int]:
    """Each rank's number. In the group of gradients, so that no rank waits for one that has left."""
    numbers = torch.zeros(size, dtype=torch.int64, device=device)
    numbers[rank] = number
    dist.all_reduce(numbers, group=gradients_group().group)
    return numbers.tolist()


def is_kept(group: Any) -> bool:
    return _gradients is not None and _gradients.has(group)


def is_connected(model: torch.nn.Module) -> bool:
    """Whether a model of the group can still reach the other ranks."""
    return _gradients is not None and _gradients.world is dist.group.WORLD and model in _gradients.models


def queues_collectives(device: torch.device) -> bool:
    """Whether collectives on a device only queue work, as NCCL's do; gloo's are complete when they return."""
    return dist.is_initialized() and backends(dist.group.WORLD).get(device.type) != "gloo"


def connect(group: Any) -> None:
    """Connect the ranks of a group by a first collective, on the current device.

    NCCL does so in the first collective anyway, but there a rank blocks the host until all have come, and can't be
    aborted: if one failed before, the others would hang.
    """
    if dist.get_world_size(group) > 1:
        for kind in (kind for kind, backend in backends(group).items() if backend != "gloo"):
            dist.all_reduce(torch.zeros(1, device=kind), group=group)


def disconnect(device: torch.device) -> None:
    """Close this process's connections for gradients on a device, so that with gloo a collective in which another rank
    waits fails at once. Later models get new connections."""
    groups = _forget_group()
    while groups:  # no variable may keep a group, because its sockets close with the last reference
        # A program may have ended the default group, and with it this one.
        if groups[0] in c10d._world.pg_map:
            end_group(device, groups[0])
        del groups[0]


def end_group(device: torch.device, group: Any = None) -> None:
    """End a process group for collectives on a device. The default group takes all others with it."""
    if queues_collectives(device):
        if group is None:
            abort()  # all groups in parallel, unlike torch
        # Destroying the group would wait for queued work, which may wait for a rank that has left.
        c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def abort() -> None:
    """Abort all collectives of this process except gloo's, including queued ones. In any thread.

    Collectives on other ranks wait until those abort too. All results from now on are garbage, and the default process
    group can't be used again.
    """
    global _aborted
    _aborted = dist.group.WORLD
    groups = [group for group in c10d._world.pg_map if set(backends(group).values()) != {"gloo"}]
    # Each group in a thread: NCCL frees a communicator once the device is idle, which another group's collectives
    # prevent until they are aborted too (PyTorch's issue 119797). Torch's `_group_start()` does not help: NCCL groups
    # the calls of one thread, and torch 2.13 starts a new thread for each abort.
    with ThreadPoolExecutor(max(1, len(groups))) as threads:
        threads.map(lambda group: group.abort(), groups)


def backends(group: Any) -> dict[str, str]:
    return dict(each.split(":") for each in dist.get_backend_config(group).split(","))


def timeout() -> timedelta | None:
    """The timeout of the default process group; None without a group, or if torch wraps it for debugging."""
    world = dist.group.WORLD
    backend = None if world is None else world._get_backend(world._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


def set_timeout(timeout: timedelta) -> None:
    # Public since torch 2.15, which warns of the other.
    (getattr(dist, "set_timeout", None) or c10d._set_pg_timeout)(timeout)


def number_groups(start: int) -> None:
    """Number new groups from `start` on. Ranks find each other by a group's number, and a rank that left the last trial
    early has made fewer groups than others."""
    c10d._world.group_count = start


def is_aborted() -> bool:
    """Whether this process has aborted its collectives, so that it must not train another trial."""
    return _aborted is not None and _aborted is dist.group.WORLD


def is_disconnected(error: BaseException) -> bool:
    """Whether an error means that another rank has disconnected, or that this rank's collectives were aborted.

    A timeout does not: the other rank may be stuck.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, dist.DistError) or ("gloo/transport" in text and "Timed out" not in text)
