"""Detects gradients that are not averaged over the ranks, so that each rank would train a different model.

DistributedDataParallel averages gradients only in a backward pass after a call of the wrapped model itself, and only
those of parameters that were trainable when the model was wrapped. Averaged gradients are equal on all ranks. So the
norms of an optimizer's gradients are taken, without waiting for the device, at no more than two steps between two
exchanges. The exchange compares them.

Along dimensions of the mesh over which dray does not average, they must be equal as well: of a plain parameter, and of
each part of a DTensor, since checkpoints hold those of one rank. Each rank computes them, so they may differ by
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from dray.training.parallel.ddp import DDPModel
from dray.training.parallel.mesh_shape import AVERAGED, MeshShape
from dray.training.parallel.sharding import local, part_of

#: For each optimizer, in the order of first steps: the batch, and for each parameter which part of it the rank has, and
#: the norm of that part's gradient (0 for none).
Norms: TypeAlias = list[tuple[int, list[tuple[int, float]]]]

TOLERANCE = 1e-3  # the relative difference between ranks that is allowed in a gradient's norm


@dataclass(frozen=True, slots=True)
class _Step:
    batch_idx: int
    parameters: list[torch.Tensor]
    with_norm: list[int]
    norms: torch.Tensor | None


class GradientCheck:
    """Compares the gradients of wrapped models between ranks."""

    def __init__(self, models: Sequence[torch.nn.Module], mesh: MeshShape) -> None:
        self._models, self._mesh = models, mesh
        self._steps: dict[int, _Step] = {}
        self._last = 0

    def begin(self, until: int) -> None:
        self._steps.clear()
        self._last = until - 1

    def before_step(self, optimizer: torch.optim.Optimizer, batch_idx: int | None) -> None:
        """Take the norms if this is the optimizer's first step since `begin`, or a step in the last batch."""
        if batch_idx is None or (id(optimizer) in self._steps and batch_idx != self._last):
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = {
            index: local(gradient.detach())
            for index, parameter in enumerate(parameters)
            if (gradient := parameter.grad) is not None
            and gradient.layout is torch.strided
            and gradient.is_floating_point()
            # Else it is a DTensor whose ranks hold parts of a sum.
            and getattr(gradient, "placements", None) == getattr(parameter, "placements", None)
        }
        norms = None
        if gradients:
            each = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float64)
            norms = torch.stack([norm.to(each[0].device) for norm in each])
        self._steps[id(optimizer)] = _Step(batch_idx, parameters, list(gradients), norms)

    def norms(self) -> Norms:
        """The norms taken since `begin`. Waits for the device."""
        taken = []
        for step in self._steps.values():
            known = {} if step.norms is None else dict(zip(step.with_norm, step.norms.tolist(), strict=True))
            parts = enumerate(map(part_of, step.parameters))
            taken.append((step.batch_idx, [(part, known.get(index, 0.0)) for index, part in parts]))
        return taken

    def compare(self, ranks: Sequence[Norms]) -> None:
        """Raise a RuntimeError if an optimizer has stepped with gradients that are not averaged."""
        for step, *rows in zip(self._steps.values(), *ranks, strict=False):
            if len({(batch_idx, len(norms)) for batch_idx, norms in rows}) > 1:
                continue  # the ranks run different code
            count = self._mesh.model_parallel
            for first in range(count):
                if different := self._different(step, [norms for _, norms in rows[first::count]]):
                    raise RuntimeError(self._message(different, self._cause(different[0])))
            if count > 1 and (different := self._different(step, [norms for _, norms in rows], TOLERANCE)):
                raise RuntimeError(self._message(different, self._cause_in_mesh()))

    def _different(
        self, step: _Step, rows: Sequence[Sequence[tuple[int, float]]], rounding: float = 0.0
    ) -> list[torch.Tensor]:
        """The parameters whose gradients differ between ranks that have the same part, by more than `rounding` times
        the largest norm."""
        floor = rounding * max((norm for row in rows for _, norm in row if math.isfinite(norm)), default=0.0)

        def differs(ranks: Sequence[tuple[int, float]]) -> bool:
            firsts = dict(reversed(ranks))
            return any(
                not math.isclose(firsts[part], norm, rel_tol=TOLERANCE, abs_tol=floor)
                and not (math.isnan(firsts[part]) and math.isnan(norm))
                for part, norm in ranks
            )

        return [
            parameter
            for parameter, *ranks in zip(step.parameters, *rows, strict=True)
            if differs(ranks) and not self._is_exempt(parameter)
        ]

    def _is_exempt(self, parameter: torch.Tensor) -> bool:
        """Whether the trial has configured DistributedDataParallel not to average a parameter's gradients."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        return any(
            any(parameter is own for own in model.module.parameters())
            and (
                any(hook is not fp16_compress_hook for hook, _ in model._comm_hooks)
                or any(parameter is own for name, own in _named(model) if name in model.parameters_to_ignore)
            )
            for model in self._models
            if isinstance(model, DDPModel)
        )

    def _cause(self, first: torch.Tensor) -> str:
        owner = next((model for model in self._models if any(first is own for own in model.parameters())), None)
        if owner is None:
            return "They belong to no wrapped model: pass the module that has them to context.wrap_model()."
        if not (isinstance(owner, DDPModel) and id(first) in owner.averaged_ids):
            return (
                "They were frozen, or did not exist, when the model was wrapped. Have them trainable in "
                'context.wrap_model(model, ddp_kwargs={"find_unused_parameters": True}), and freeze them after it.'
            )
        passed = " and ".join(f"model.{name}" for name in sorted(owner.passed_through)) or "model.module"
        return (
            "Gradients are averaged only if the wrapped model itself is called, as model(...), before backward; "
            f"the trial has used {passed}. Move that computation into the model's forward()."
        )

    def _cause_in_mesh(self) -> str:
        names = [name for name, size in self._mesh.dims if size > 1 and name not in AVERAGED]
        return (
            f"dray does not average over {' and '.join(names)}: the trial's code must sum or average what its ranks "
            "compute there. If each rank has a parameter of its own, make the parameters parts of one DTensor on "
            "context.device_mesh, or checkpoints would have one rank's."
        )

    def _message(self, parameters: list[torch.Tensor], cause: str) -> str:
        names = {id(own): name for model in self._models for name, own in _named(model)}
        shown = [repr(names.get(id(each), "a parameter")) for each in parameters[:3]]
        more = [f"{len(parameters) - 3} more"] if len(parameters) > 3 else []
        return (
            "the slots train different models: the gradients of these parameters are not the same on all slots: "
            f"{', '.join([*shown, *more])}. {cause}"
        )


def _named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    inner = model.module if isinstance(model, DDPModel) else model
    return list(inner.named_parameters())
