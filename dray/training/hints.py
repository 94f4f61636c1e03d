"""Warnings about trials that don't train what they should, each logged once, after the first batches that show it."""

from __future__ import annotations

import logging

import torch
from torch.nn.modules.dropout import _DropoutNd

from dray.training.optimisation import bare, parameters_of
from dray.training.trial import Rank

log = logging.getLogger(__name__)


class Hints:
    """Watches a trial between batches, on the chief."""

    def __init__(self, rank: Rank) -> None:
        self._optimisation = rank.optimisation
        self._warns_of_eval = self._warns_of_untrained = self._warns_of_idle = True
        saved = {id(each) for model in rank.optimisation.models for each in model.parameters()}
        attributes = {} if rank.callbacks else getattr(rank.trial, "__dict__", {})  # a callback may save them
        # Modules outside of any wrapped model, which checkpoints do not hold.
        self._unwrapped = {
            name: [each for each in module.parameters() if id(each) not in saved and not each.is_inference()]
            for name, module in attributes.items()
            if isinstance(module, torch.nn.Module)
        }
        self._versions = {name: self._version(name) for name in self._unwrapped}

    def warn(self) -> None:
        """Warn, after the first batches: train_batch() may set a model's mode itself."""
        self._warn_if_untrained()
        self._warn_if_idle()
        if self._warns_of_eval and self._trains_in_eval():
            log.warning(
                "a model that an optimizer trains is in eval mode, or a part of it with dropout is: it trains without "
                "dropout. If that is not meant, call model.train() in the trial's constructor; from_pretrained() of "
                "transformers returns models in eval mode"
            )
        self._warns_of_eval = False
        for name in [name for name, version in self._versions.items() if self._version(name) != version]:
            del self._versions[name]
            log.warning(
                "training changes self.%s, which is not wrapped: checkpoints do not hold it, so a trial that resumes "
                "has it as its constructor makes it. Let it pass through context.wrap_model(), or save it in a "
                "callback's state_dict()",
                name,
            )

    def _warn_if_untrained(self) -> None:
        optimisation, position = self._optimisation, self._optimisation.position
        batches = position.trained - position.initial_batch
        if not self._warns_of_untrained or batches < 4 * optimisation.aggregation_frequency:
            return
        self._warns_of_untrained = False
        if not optimisation.has_trained:
            optimisation.has_trained = True  # later steps need not look for it
            log.warning(
                "the first %d batches have trained no wrapped model: %s",
                batches,
                "no context.step_optimizer(optimizer) was called after context.backward(loss) in train_batch(). "
                "An optimizer.step() of your own is not counted: it ignores the configured clipping, aggregation and "
                "loss scaling"
                if optimisation.steps == 0
                else "the optimizers' parameters are in no wrapped model, or had no gradients. Call "
                "context.backward(loss), and use the model that context.wrap_model() returned, in train_batch() and "
                "for the optimizer: only that one is saved in checkpoints",
            )

    def _warn_if_idle(self) -> None:
        optimisation, position = self._optimisation, self._optimisation.position
        if not self._warns_of_idle or position.trained - position.initial_batch < 100 or not optimisation.stepped:
            return  # if no optimizer has stepped, `_warn_if_untrained` says so
        self._warns_of_idle = False
        for number, optimizer in enumerate(optimisation.optimizers):
            if id(optimizer) not in optimisation.stepped:
                log.warning(
                    "optimizer %d (%s) is wrapped, but train_batch() has not called context.step_optimizer() for it in "
                    "the first 100 batches: its parameters are not trained. Ignore this if it steps only later",
                    number,
                    type(optimizer).__name__,
                )

    def _trains_in_eval(self) -> bool:
        """Whether a trained model, or a trained part of one with dropout, is in eval mode. Frozen parts may be."""
        optimizers = self._optimisation.optimizers
        trained = {id(each) for optimizer in optimizers for each in parameters_of(optimizer) if each.requires_grad}
        models = [bare(model) for model in self._optimisation.models]
        return any(
            any(id(parameter) in trained for parameter in part.parameters())
            and (part in models or any(isinstance(each, _DropoutNd) for each in part.modules()))
            for model in models
            for part in model.modules()
            if not part.training
        )

    def _version(self, name: str) -> int:
        return sum(each._version for each in self._unwrapped[name])
