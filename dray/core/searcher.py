"""Operations: the lengths at which the search compares trials, one after another, for a program to train to."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from dray.core.train import Program
from dray.training.errors import SearcherMetricError
from dray.training.host import Report
from dray.training.metrics.values import as_number, to_numpy

log = logging.getLogger(__name__)

LOCAL_LENGTH = 1.0  # the length of the only operation in a run without a search
_NO_MORE = 0.0  # broadcast in place of a length after the last operation


class Unit(enum.Enum):
    """The unit of a length."""

    EPOCHS = "EPOCHS"
    RECORDS = "RECORDS"
    BATCHES = "BATCHES"


class SearcherMode(enum.Enum):
    """Selects the ranks that call `SearcherContext.operations()`.

    Attributes:
        WorkersAskChief: all ranks together.
        ChiefOnly: only the chief.
    """

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"


class SearcherOperation:
    """A length to train to, in the search's unit, counted from the beginning of the trial."""

    def __init__(self, length: float, program: Program, *, metric: str | None, unit: Unit | None) -> None:
        self._length, self._program, self._metric, self._unit = length, program, metric, unit
        self._completed = False

    @property
    def length(self) -> Any:
        """The trial's total length after this operation, usually an int."""
        return int(self._length) if float(self._length).is_integer() else self._length

    def report_progress(self, length: float) -> None:
        """Log the trial's current length, in the unit of `self.length`. On the chief only.

        Raises:
            RuntimeError: called on another rank, or after `report_completed()`.
        """
        self._program.check_chief("op.report_progress")
        if self._completed and length != self.length:
            raise RuntimeError("op.report_progress() was called after op.report_completed(), which ends the operation")
        self._program.pulse()
        log.debug("progress: %s", length)

    def report_completed(self, searcher_metric: Any) -> None:
        """Report that training has reached `length`. On the chief only.

        Args:
            searcher_metric: the metric that the search compares: a number, or a tensor or array with one element.

        Raises:
            RuntimeError: called on another rank, or twice.
            SearcherMetricError: the metric is not a number, or the search has several metrics.
        """
        self._program.check_chief("op.report_completed")
        if self._metric is None:
            raise SearcherMetricError(
                "searcher.metrics: op.report_completed() takes one metric, and the search has several; report "
                "them with core_context.train.report_validation_metrics(), and call "
                "core_context.preempt.should_preempt() instead of using searcher.operations()"
            )
        if self._completed:
            raise RuntimeError("op.report_completed() was called twice; call it once per operation")
        self._completed = True
        value = as_number(to_numpy(searcher_metric))
        if value is None:
            raise SearcherMetricError(f"searcher.metric: op.report_completed() needs a number, got {searcher_metric!r}")
        steps = self._program.steps_completed or 0
        self._program.publish(
            Report(
                # Without reported steps, a length is taken as batches, though its unit may be another.
                batches=max(steps, int(self._length)) if self._unit is Unit.BATCHES or not steps else steps,
                epochs=self._length if self._unit is Unit.EPOCHS else None,
                validation={self._metric: value},
                length=self._length,
            )
        )


class SearcherContext:
    """Yields the lengths to train to.

    The alternative, as in Determined since 0.38: the program decides how long to train, reports validations, and calls
    `preempt.should_preempt()`.
    """

    def __init__(self, program: Program, config: Mapping[str, Any] | None) -> None:
        self._program = program
        self._searcher: Mapping[str, Any] | None = None if config is None else config.get("searcher") or {}

    def operations(
        self, searcher_mode: SearcherMode = SearcherMode.WorkersAskChief, auto_ack: bool = True
    ) -> Iterator[SearcherOperation]:
        """Yield an operation for each length at which the search decides, until it stops the trial.

        Lengths are counted from the start of the trial. After a restart, lengths that were already reported are left
        out. A run without a search has one operation, of length 1. `auto_ack` has no effect.

        Raises:
            ValueError: the search sets no length.
            RuntimeError: an operation ended without `report_completed()`; or a rank other than the chief called this
                with `SearcherMode.ChiefOnly`.
        """
        program, shared = self._program, SearcherMode(searcher_mode) is SearcherMode.WorkersAskChief
        if not shared:
            program.check_chief("searcher.operations", "with SearcherMode.ChiefOnly, ")
        self._check_length()
        if not program.is_chief:
            while (length := program.peers.broadcast(_NO_MORE)) != _NO_MORE:
                yield self._operation(length)
            return
        program.uses_operations = True
        for length in program.host.lengths if self._searcher is not None else [LOCAL_LENGTH]:
            if program.stop_requested:
                break
            if shared:
                program.peers.broadcast(length)
            operation = self._operation(length)
            yield operation
            if not operation._completed:
                raise RuntimeError(
                    f"the operation of length {operation.length} ended without op.report_completed(); call it with "
                    "the searcher's metric, or leave the loop when preempt.should_preempt() is true"
                )
        if shared:
            program.peers.broadcast(_NO_MORE)

    def _operation(self, length: float) -> SearcherOperation:
        search = self._searcher or {}
        return SearcherOperation(
            length,
            self._program,
            metric=None if search.get("metrics") else str(search.get("metric") or "searcher_metric"),
            unit=self.get_configured_units() if self._searcher is not None else None,
        )

    def acknowledge_out_of_ops(self) -> None:
        """Has no effect."""

    def get_configured_units(self) -> Unit | None:
        """Return the unit of the search's lengths, None if another metric measures them (`searcher.time_metric`)."""
        self._check_length()
        if self._searcher is None:
            return Unit.EPOCHS
        length = self._searcher.get("max_length")
        unit = next(iter(length)) if isinstance(length, Mapping) else self._searcher.get("time_metric")
        return next((each for each in Unit if each.value.lower() == unit), None)

    def _check_length(self) -> None:
        if self._searcher is not None and not (self._searcher.get("max_length") or self._searcher.get("max_time")):
            raise ValueError(
                "searcher.max_length: the search sets no length, so there are no operations; set searcher.max_length, "
                "for example {epochs: 10}, or train as long as you like and report validation metrics"
            )
