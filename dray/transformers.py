"""Hugging Face's `transformers.Trainer` as the loop of a trial: a callback that connects it to `dray.core`.

.. code-block:: python

    with core.init() as core_context:
        trainer = transformers.Trainer(model=model, args=args, ...)
        trainer.add_callback(DetCallback(core_context, args))
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import transformers

from dray import core

log = logging.getLogger(__name__)

__all__ = ["DetCallback"]

_SPEEDS = ("_runtime", "_per_second", "_compilation_time")


class DetCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Connects a `transformers.Trainer` to a trial: reports its logs, turns its checkpoints into the trial's, and stops
    it when the search decides to or its machine is taken away.

    A restarted trial finds its latest checkpoint in `args.resume_from_checkpoint`, which the program passes to
    `trainer.train()`. In an experiment each trial gets a subdirectory of `args.output_dir`, since all trials on a
    machine have the same working directory.

    Training ends with a checkpoint, and with an evaluation if the trainer evaluates at all.

    Args:
        core_context: the context from `core.init()`.
        args: the trainer's `transformers.TrainingArguments`.
        filter_metrics: report only metrics with one of these strings in their name, and those that the search needs.
            Default: all but speeds.
        user_data: JSON-serialisable data to save in each checkpoint, as `my_data.json`.
    """

    def __init__(
        self,
        core_context: core.Context,
        args: Any,
        filter_metrics: Sequence[str] | None = None,
        user_data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.core_context = core_context
        self.filter_metrics = list(filter_metrics or ())
        self.user_data = user_data
        self._reported: dict[str, int] = {}
        self._saved = -1
        self._stop_requested = False
        info = core_context.info
        if info is None:
            return
        if self.filter_metrics:
            searcher = info.trial.config.get("searcher", {})
            self.filter_metrics += [name for key in ("metric", "time_metric") if (name := searcher.get(key))]
        args.output_dir = os.path.join(args.output_dir, f"trial_{info.trial.trial_id}")
        if info.latest_checkpoint is not None:
            if getattr(args, "overwrite_output_dir", False):
                log.info("training starts over, because overwrite_output_dir is set")
                return
            core_context.checkpoint.download(info.latest_checkpoint, args.output_dir)
            steps = core_context.checkpoint.get_metadata(info.latest_checkpoint)["steps_completed"]
            # Named by its step, because a killed attempt may have left later ones there.
            args.resume_from_checkpoint = os.path.join(args.output_dir, f"checkpoint-{steps}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Report the logs once per step: the summary at the end of training repeats a step."""
        names = list(logs or {})
        if not logs or any(name.startswith("test_") for name in names):
            return
        group = "validation" if any(name.startswith("eval_") for name in names) else "training"
        if self._reported.get(group) == state.global_step:
            return
        self._reported[group] = state.global_step
        if state.is_world_process_zero:
            kept = {name: value for name, value in logs.items() if self._is_kept(name)}
            metrics = {"batches": state.global_step, "epochs": state.epoch, **kept}
            self.core_context.train.report_metrics(group, state.global_step, metrics)

    def _is_kept(self, name: str) -> bool:
        if name == "epoch" or name.endswith(_SPEEDS):  # the trainer's epoch is rounded
            return False
        return not self.filter_metrics or any(part in name for part in self.filter_metrics)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check whether to stop."""
        if state.is_world_process_zero:
            self.core_context.train.report_progress(min(1.0, state.global_step / max(1, state.max_steps)))
        self._check_stop(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate and save at the end of training, even if it ends early."""
        if not control.should_training_stop and state.global_step < state.max_steps:
            return
        evaluates = getattr(args, "eval_strategy", None) or args.evaluation_strategy  # the name until 4.41
        if evaluates != "no" and not self._stop_requested and self._reported.get("validation") != state.global_step:
            control.should_evaluate = True
        if self._saved != state.global_step:
            control.should_save = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check whether to stop: the search may have decided on this report."""
        self._check_stop(state, control)

    def _check_stop(self, state: Any, control: Any) -> None:
        if state.global_step >= state.max_steps:
            return  # it ends anyway; if it acknowledged a request to stop, it would be resumed later
        # All ranks call this together, as should_preempt() requires.
        self._stop_requested = self._stop_requested or self.core_context.preempt.should_preempt()
        control.should_training_stop = control.should_training_stop or self._stop_requested

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make a checkpoint of the trial from the trainer's."""
        self._saved = state.global_step
        name = f"checkpoint-{state.global_step}"
        if self.user_data is not None and state.is_world_process_zero:
            with open(os.path.join(args.output_dir, name, "my_data.json"), "w") as file:
                json.dump(dict(self.user_data), file)
        self.core_context.checkpoint.upload(
            args.output_dir,
            {"steps_completed": state.global_step},
            shard=self.core_context.distributed.size > 1,
            selector=lambda path: path.startswith(f"{name}/"),
        )
