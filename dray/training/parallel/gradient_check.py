"""Detects gradients that are not averaged over the ranks, so that each rank would train a different model.

DistributedDataParallel averages gradients only in a backward pass after a call of the wrapped model itself, and only
those of parameters that were trainable when the model was wrapped. Averaged gradients are equal on all ranks. So the
norms of an optimizer's gradients are taken, without waiting for the device, at no more than two steps between two
exchanges. The exchange compares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from dray.training.parallel.ddp import DDPModel

#: For each optimizer, in the order of first steps: the batch, and the norm of each parameter's gradient (0 for none).
Norms: TypeAlias = list[tuple[int, list[float]]]

TOLERANCE = 1e-3  # the relative difference between ranks that is allowed in a gradient's norm


@dataclass(frozen=True, slots=True)
class _Step:
    batch_idx: int
    parameters: list[torch.Tensor]
    with_norm: list[int]
    norms: torch.Tensor | None


class GradientCheck:
    """Compares the gradients of wrapped models, none of them sharded, between ranks."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models = models
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
            index: gradient.detach()
            for index, parameter in enumerate(parameters)
            if (gradient := parameter.grad) is not None
            and gradient.layout is torch.strided
            and gradient.is_floating_point()
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
            taken.append((step.batch_idx, [known.get(index, 0.0) for index in range(len(step.parameters))]))
        return taken

    def compare(self, ranks: Sequence[Norms]) -> None:
        """Raise a RuntimeError if an optimizer has stepped with gradients that are not averaged."""
        for step, *rows in zip(self._steps.values(), *ranks, strict=False):
            if len({(batch_idx, len(norms)) for batch_idx, norms in rows}) > 1:
                continue  # the ranks run different code
            different = [
                parameter
                for parameter, *norms in zip(step.parameters, *(norms for _, norms in rows), strict=True)
                if not all(math.isclose(norms[0], norm, rel_tol=TOLERANCE) for norm in norms)
                and not all(map(math.isnan, norms))
                and not self._is_exempt(parameter)
            ]
            if different:
                raise RuntimeError(self._message(different))

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

    def _message(self, parameters: list[torch.Tensor]) -> str:
        first, names = parameters[0], {id(own): name for model in self._models for name, own in _named(model)}
        owner = next((model for model in self._models if any(first is own for own in model.parameters())), None)
        if owner is None:
            cause = "They belong to no wrapped model: pass the module that has them to context.wrap_model()."
        elif not (isinstance(owner, DDPModel) and id(first) in owner.averaged_ids):
            cause = (
                "They were frozen, or did not exist, when the model was wrapped. Have them trainable in "
                'context.wrap_model(model, ddp_kwargs={"find_unused_parameters": True}), and freeze them after it.'
            )
        else:
            passed = " and ".join(f"model.{name}" for name in sorted(owner.passed_through)) or "model.module"
            cause = (
                "Gradients are averaged only if the wrapped model itself is called, as model(...), before backward; "
                f"the trial has used {passed}. Move that computation into the model's forward()."
            )
        shown = [repr(names.get(id(each), "a parameter")) for each in parameters[:3]]
        more = [f"{len(parameters) - 3} more"] if len(parameters) > 3 else []
        return (
            "the slots train different models: the gradients of these parameters are not averaged over the slots: "
            f"{', '.join([*shown, *more])}. {cause}"
        )


def _named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    inner = model.module if isinstance(model, DDPModel) else model
    return list(inner.named_parameters())
