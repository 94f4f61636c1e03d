"""Sharding a model by PyTorch's `fully_shard` (FSDP2), for `context.wrap_model(model, parallel=FullyShard(...))`."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from dray.memory import machine_cores
from dray.training import pretrained
from dray.training.parallel.mesh import averaging_mesh
from dray.training.parallel.mesh_shape import AVERAGED
from dray.training.parallel.sharding import UNSYNCED, broadcast, connect, fsdp_modules, is_dtensor, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

log = logging.getLogger(__name__)

SHARDS_SINCE = "2.11"  # the oldest torch with which models that are sharded over several slots pass our tests

Kind: TypeAlias = type[nn.Module] | str

_REPLACED = "_dray_replaced"  # an attribute of the parameters that a model had before it was sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShard:
    """Shard a model's parameters, gradients and optimizer state over the slots, by PyTorch's `fully_shard` (FSDP2).

    For `context.wrap_model(model, parallel=FullyShard(units=[Block]))`. Units are modules such as the blocks of a
    transformer. A unit's parameters are gathered together when it runs, and freed afterwards. Parameters outside of any
    unit stay gathered as long as the model runs.

    A model built on the meta device gets its weights unit by unit, from `init` or each module's `reset_parameters()`,
    so that no rank ever holds all of them. With a seed, they are the same on any number of slots. Other models begin
    with the chief's weights.

    Args:
        units: module classes or their names; or a function that takes a module, and returns whether it is a unit.
            Default: the whole model is one unit.
        mp_policy: a `torch.distributed.fsdp.MixedPrecisionPolicy`, or a dict of its arguments, in which dtypes may be
            names: `{"param_dtype": "bfloat16", "reduce_dtype": "float32"}`.
        reshard_after_forward: free a unit's gathered parameters after its forward pass, and gather them again for
            backward. An int: reshard over that number of ranks. None: reshard all units except the model itself.
        cpu_offload: keep parameters, gradients and optimizer state in CPU memory. The optimizer uses the rank's share
            of the machine's cores, unless OMP_NUM_THREADS is set to another number than 1.
        sync_each_batch: with `aggregation_frequency`, reduce-scatter gradients in each batch, so that a rank only holds
            its shards of them; with HSDP, replicas are summed in the batch that steps. False: synchronise only in the
            batch that steps, and hold whole gradients until then.
        activation_checkpointing: recompute the activations of each unit in backward instead of keeping them.
            "selective": keep the results of matrix products and attention, which take the longest to recompute.
        compile: `torch.compile` each unit.
        float8: run the matrix products of the units' linear layers in float8, by torchao, and gather their weights in
            float8. Frozen layers, and those whose sizes are not multiples of 16, stay as they are.
        init: a function that sets the values of a module on the meta device, instead of `reset_parameters()`. Called
            with each module that has parameters or buffers of its own.

    Raises:
        TypeError: an argument has the wrong type, or mp_policy contains an unknown argument or dtype.
        ValueError: float8 is combined with cpu_offload.
        ImportError: float8 is set, but torchao is not installed.
    """

    units: Kind | Sequence[Kind] | Callable[[nn.Module], bool] = ()
    mp_policy: MixedPrecisionPolicy | Mapping[str, Any] | None = None
    reshard_after_forward: bool | int | None = None
    cpu_offload: bool = False
    sync_each_batch: bool = True
    activation_checkpointing: bool | Literal["selective"] = False
    compile: bool = False
    float8: bool = False
    init: Callable[[nn.Module], Any] | None = None

    def __post_init__(self) -> None:
        reshard: Any = self.reshard_after_forward
        recompute: Any = self.activation_checkpointing
        bools = ("cpu_offload", "sync_each_batch", "compile", "float8")
        kinds = "classes of modules, names of classes, or a function of a module that returns a bool"
        are_kinds = all(
            isinstance(each, str) or (isinstance(each, type) and issubclass(each, nn.Module)) for each in self._kinds
        )
        for name, allowed, expected in [
            ("units", self._is_function or are_kinds, kinds),
            *((name, isinstance(getattr(self, name), bool), "a bool") for name in bools),
            ("activation_checkpointing", recompute in (False, True, "selective"), "a bool or 'selective'"),
            ("reshard_after_forward", reshard is None or isinstance(reshard, int), "a bool, a number of ranks or None"),
            ("init", self.init is None or callable(self.init), "a function of a module"),
        ]:
            if not allowed:
                raise TypeError(f"FullyShard({name}=...) must be {expected}, got {getattr(self, name)!r}")
        if self.float8 and self.cpu_offload:
            raise ValueError(
                "FullyShard(float8=True) can't be combined with cpu_offload=True; leave out one of the two"
            )
        if self.float8 and find_spec("torchao") is None:
            raise ImportError("FullyShard(float8=True) needs torchao, which is not installed: pip install torchao")
        self._policy()

    @property
    def _is_function(self) -> bool:
        return callable(self.units) and not isinstance(self.units, type)

    @property
    def _kinds(self) -> list[Any]:
        units: Any = self.units
        return [units] if isinstance(units, (str, type)) or not isinstance(units, Sequence) else list(units)

    def _policy(self) -> MixedPrecisionPolicy:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given: Any = {} if self.mp_policy is None else self.mp_policy
        if isinstance(given, MixedPrecisionPolicy):
            return given
        known = [field.name for field in fields(MixedPrecisionPolicy)]
        if not isinstance(given, Mapping) or given.keys() - set(known):
            raise TypeError(
                "FullyShard(mp_policy=...) must be a torch.distributed.fsdp.MixedPrecisionPolicy or a dict of "
                f"{', '.join(known)}, got {given!r}"
            )
        arguments: dict[str, Any] = dict(given)
        arguments.update((name, _dtype(name, value)) for name, value in given.items() if name.endswith("dtype"))
        return MixedPrecisionPolicy(**arguments)

    def _find(self, model: nn.Module) -> list[nn.Module]:
        """The units of a model, outer ones first, without the model itself."""
        modules = list(model.modules())
        if self._is_function:
            chooses: Any = self.units
            if not (units := [module for module in modules if chooses(module)]):
                raise ValueError(
                    f"FullyShard(units={self.units!r}): it returned False for each of the model's {len(modules)} "
                    "modules; choose some, or leave units out to shard the model as one unit"
                )
        else:
            for kind in self._kinds:
                if not any(_is_a(module, kind) for module in modules):
                    classes = sorted({type(module).__name__ for module in modules})
                    raise ValueError(
                        f"FullyShard(units=...): {kind if isinstance(kind, str) else kind.__name__} is the class of no "
                        f"module in the model; it has {', '.join(classes)}"
                    )
            units = [module for module in modules if any(_is_a(module, kind) for kind in self._kinds)]
        return [module for module in units if module is not model]


def _is_a(module: nn.Module, kind: Kind) -> bool:
    return type(module).__name__ == kind if isinstance(kind, str) else isinstance(module, kind)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if (dtype is not None and not isinstance(dtype, torch.dtype)) or (dtype is None and value is not None):
        raise TypeError(f"FullyShard(mp_policy=...): {name} must be a dtype or its name (bfloat16), got {value!r}")
    return dtype


def check_arguments(
    model: nn.Module,
    parallel: FullyShard | None,
    ddp_kwargs: Mapping[str, Any],
    *,
    compress: bool,
    ranks: int,
    averaging: int,
) -> None:
    """Check the arguments of `wrap_model` for a sharded model, with gradients to be averaged over `averaging` ranks."""
    if ranks > 1 and torch.__version__ < SHARDS_SINCE:
        raise RuntimeError(
            f"wrap_model: a model that is sharded over {ranks} slots needs torch {SHARDS_SINCE} or newer, but this is "
            f"torch {torch.__version__}; install a newer one, or train an unsharded model (DDP)"
        )
    if parallel is not None and not isinstance(parallel, FullyShard):
        raise TypeError(f"wrap_model: parallel must be a pytorch.FullyShard, got {parallel!r}")
    if ddp_kwargs:
        raise ValueError(
            "wrap_model: ddp_kwargs are arguments of DistributedDataParallel, which a sharded model is not wrapped "
            f"in; leave out {', '.join(ddp_kwargs)}"
        )
    if compress:
        raise ValueError(
            "wrap_model: optimizations.gradient_compression is for DistributedDataParallel; with a sharded model "
            'set FullyShard(mp_policy={"reduce_dtype": "float16"}), and remove it from the config'
        )
    if parallel is not None and fsdp_modules(model):
        raise ValueError(
            "wrap_model: fully_shard was applied to the model already; pass parallel=FullyShard(...) or call "
            "fully_shard, not both"
        )
    if parallel is None and averaging > 1 and not fsdp_modules(model):
        raise ValueError(
            f"wrap_model: the model has DTensors, and its {averaging} copies would never average their gradients; pass "
            "parallel=FullyShard(...) too, or a mesh with all slots in dimensions that your code handles (resources."
            'mesh, pytorch.init(mesh={"tp": n}))'
        )


def fully_sharded(model: nn.Module, parallel: FullyShard, mesh: DeviceMesh, device: torch.device) -> None:
    """Shard a model in place, over the ranks of a mesh that average gradients. All ranks call this together."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    units = parallel._find(model)
    owned = {unit: list(_own(unit, set(units))) for unit in [*reversed(units), model]}
    _check(model, owned, parallel)
    # The order is torchtitan's: the compiler sees the recomputation, and the hooks of fully_shard stay outside of both.
    for unit in units or [model]:
        if parallel.activation_checkpointing:
            _recompute(unit, selective=parallel.activation_checkpointing == "selective")
        if parallel.compile:
            unit.compile()
    over = averaging_mesh(mesh)
    # For a model on the CPU there is nothing to pin memory for.
    if parallel.cpu_offload and device.type != "cpu":
        torch.set_num_threads(max(torch.get_num_threads(), threads_for_offload(os.environ, machine_cores())))
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if parallel.cpu_offload else OffloadPolicy()
    new: dict[nn.Parameter, nn.Parameter] = {}
    before = list(model.parameters())
    with pretrained.sharding(model):
        for unit, modules in owned.items():
            _materialise(modules, parallel.init, device, new)
            _broadcast_chief_values(modules, mesh, device)
            if parallel.float8 and (unit is not model or not units):
                _to_float8(unit, set(modules), device)
            fully_shard(
                unit,
                mesh=over,
                mp_policy=parallel._policy(),
                offload_policy=offload,
                reshard_after_forward=parallel.reshard_after_forward,
            )
            if not parallel.sync_each_batch:
                setattr(unit, UNSYNCED, True)
    if parallel.float8:
        if not any(type(module).__name__ == "Float8Linear" for module in model.modules()):
            log.warning(
                "FullyShard(float8=True) has no effect: no linear layer of the units is trained and has sizes that are "
                "multiples of 16"
            )
        eager: Any = torch.compiler.disable
        model.register_forward_pre_hook(eager(_set_scales), prepend=True)
    for parameter in before:
        setattr(parameter, _REPLACED, True)
    connect(model)


def threads_for_offload(variables: Mapping[str, str], cores: int) -> int:
    """The threads for an optimizer on the CPU: its rank's share of the machine's cores, unless the user has chosen a
    number. Ray and torchrun set OMP_NUM_THREADS=1 where nobody has."""
    if (chosen := variables.get("OMP_NUM_THREADS", "1")) != "1":
        return int(chosen) if chosen.isdigit() else 1
    return max(1, cores // int(variables.get("LOCAL_WORLD_SIZE", "1")))


def is_replaced(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, _REPLACED)


def whole(model: nn.Module, parallel: FullyShard, device: torch.device) -> None:
    """Move a model to the device as one piece, for a process that does not train it."""
    _check(model, {model: list(model.modules())}, parallel)
    _materialise(list(model.modules()), parallel.init, device, {})
    model.to(device)


def _own(unit: nn.Module, units: set[nn.Module]) -> Iterator[nn.Module]:
    yield unit
    for child in unit.children():
        if child not in units:
            yield from _own(child, units)


def _check(model: nn.Module, owned: Mapping[nn.Module, list[nn.Module]], parallel: FullyShard) -> None:
    names = {module: name or "the model itself" for name, module in model.named_modules()}
    owners: dict[torch.Tensor, nn.Module] = {}
    for unit, modules in owned.items():
        for module in modules:
            if parallel.float8 and any(map(is_dtensor, module.parameters(recurse=False))):
                raise ValueError(
                    f"FullyShard(float8=True) can't be combined with tensor parallelism, by which {names[module]} is "
                    "divided; leave out one of the two"
                )
            for name, parameter in module.named_parameters(recurse=False):
                if owners.setdefault(parameter, unit) is not unit:
                    raise ValueError(
                        f"FullyShard: the parameter {name} of {names[module]} also belongs to another unit "
                        f"({names[owners[parameter]]}), and each would get its own; choose units such that modules "
                        "that share a parameter are in the same"
                    )
            if _on_meta(module) and parallel.init is None and not callable(getattr(module, "reset_parameters", None)):
                raise ValueError(
                    f"FullyShard: {names[module]} ({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters() to set its values; pass FullyShard(init=...), a function that does so for each "
                    "module"
                )


def _on_meta(module: nn.Module) -> bool:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return any(tensor.is_meta for _, tensor in own)


_KEPT = [
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"),
    "max",  # computes the scales of float8
    *(f"_scaled_dot_product_{kind}" for kind in ("flash_attention", "efficient_attention", "cudnn_attention")),
    "_scaled_dot_product_flash_attention_for_cpu",
]
"""The aten operators whose results selective activation checkpointing keeps, much as in torchtitan."""


def _recompute(unit: nn.Module, *, selective: bool) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {}
    if selective:
        ops: Any = torch.ops
        kept = [getattr(ops.aten, name).default for name in _KEPT]
        # A collective costs more than its result's memory; and attention that is compiled is one operator.
        kept += [ops._c10d_functional.reduce_scatter_tensor.default, ops.higher_order.flex_attention]
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
    # Replace `forward`, because a wrapper module would change the parameters' names.
    unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, **options)


def _to_float8(unit: nn.Module, own: set[nn.Module], device: torch.device) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        weight: Any = module.weight
        return bool(name and module in own and weight.requires_grad and all(size % 16 == 0 for size in weight.shape))

    # A CPU can't multiply in float8, and multiplies the same rounded values in float32.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
    convert_to_float8_training(unit, module_filter_fn=fits, config=config)


def _set_scales(model: nn.Module, _: Any) -> None:
    """Compute the scales of all float8 weights with a single all-reduce."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _materialise(modules: list[nn.Module], init: Any, device: torch.device, new: dict[Any, nn.Parameter]) -> None:
    """Give modules on the meta device their values. `new` maps old parameters to new ones, which modules may share."""
    touched = [module for module in modules if _on_meta(module)]
    divided: list[tuple[nn.Module, str, Any]] = []
    for module in touched:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            if parameter not in new:
                # Tensor-parallel parameters are made whole, so that values don't depend on the number of ranks.
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                new[parameter] = nn.Parameter(data, parameter.requires_grad)
            if is_dtensor(parameter):
                divided.append((module, name, parameter))
            setattr(module, name, new[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))
    for module in touched:
        if init is not None:
            init(module)
        else:
            module.reset_parameters()  # type: ignore[operator]
    for module, name, like in divided:
        from torch.distributed.tensor import distribute_tensor

        whole = getattr(module, name)
        part = distribute_tensor(whole.detach(), like.device_mesh, like.placements)
        setattr(module, name, nn.Parameter(part, like.requires_grad))


def _broadcast_chief_values(modules: list[nn.Module], mesh: DeviceMesh, device: torch.device) -> None:
    """Move modules to the device, with the chief's values on all ranks. A part of a tensor that is already divided
    comes from the first rank with the same part."""
    for module in modules:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in tensors:
            if is_dtensor(tensor):
                for dim in (name for name in mesh.mesh_dim_names or () if name in AVERAGED):
                    broadcast([local(tensor.detach())], mesh.get_group(dim))
            else:
                tensor.data = tensor.data.to(device)
                if not hasattr(tensor, pretrained.MARK):
                    broadcast([tensor.detach()])
