"""The TensorBoard event files of a trial."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.training.metrics import event_file
from dray.training.metrics.event_file import EventFile
from dray.training.metrics.values import as_number, to_numpy

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

log = logging.getLogger(__name__)

#: For `TorchWriter`, which is made without a context.
_latest: weakref.ref[TensorBoard] | None = None


class TensorBoard:
    """The event files of one process of a trial, made at the first write.

    If `enabled`, the trainer writes hyperparameters and metrics, to a file of its own until the trial asks for a
    `SummaryWriter`. After that everything goes to the writer's file, since TensorBoard follows only one file of a
    directory at a time.
    """

    def __init__(self, directory: Path, enabled: bool = True, hparams: Mapping[str, Any] | None = None) -> None:
        global _latest
        self.directory = directory
        self.enabled = enabled
        self._hparams = dict(_flat(hparams or {}))
        self._file: EventFile | None = None
        self._writer: SummaryWriter | None = None
        _latest = weakref.ref(self)

    def writer(self) -> SummaryWriter:
        """The writer for the trial's own use."""
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._close_file()
            self._writer = SummaryWriter(log_dir=str(self.directory))
        return self._writer

    def restart(self, step: int) -> None:
        """Make TensorBoard drop an earlier run's events from this step on."""
        self._write([event_file.restart(time.time(), step)])

    def write(self, rows: Iterable[tuple[float, int, Mapping[str, float]]]) -> None:
        """Write rows of (seconds since the epoch, step, numbers by tag) if enabled. Errors are only logged."""
        if self.enabled:
            hparams, self._hparams = self._hparams, {}
            first = [event_file.hparams(time.time(), hparams)] if hparams else []
            self._write(itertools.chain(first, (event_file.scalars(*row) for row in rows)))

    def write_batches(self, first: int, times: Iterable[float], rows: Iterable[Mapping[str, float]]) -> None:
        """Write the trainer's metrics of consecutive batches, beginning with batch number `first`."""
        self.write(
            (at, step, _tagged(row)) for step, (at, row) in enumerate(zip(times, rows, strict=False), first) if row
        )

    def write_metrics(self, batches: int, metrics: Mapping[str, Any], *, validation: bool = False) -> None:
        """Write the metrics at this number of batches; values other than numbers are left out. Names of validation
        metrics get the prefix "val_", unless they begin with "val"."""
        if not self.enabled:
            return
        prefix = "val_" if validation else ""
        numbers = {
            name if name.startswith("val") else prefix + name: as_number(to_numpy(value))
            for name, value in metrics.items()
        }
        if row := {name: number for name, number in numbers.items() if number is not None}:
            self.write([(time.time(), batches, _tagged(row))])

    def write_system(self, batches: int, figures: Mapping[str, float]) -> None:
        """Write figures of `dray.training.usage` at this number of batches."""
        if figures:
            self.write([(time.time(), batches, {f"system/{name}": value for name, value in figures.items()})])

    def _write(self, events: Iterable[bytes]) -> None:
        try:
            if self._writer is not None:
                _write_by(self._writer, events)
                return
            if self._file is None:
                self._file = EventFile(self.directory)
            self._file.write(events)
        except OSError as error:
            log.warning("no more metrics are written for TensorBoard; training continues: %s", error)
            self.enabled = False

    def close(self) -> None:
        global _latest
        if _latest is not None and _latest() is self:
            _latest = None
        self._close_file()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def latest() -> TensorBoard | None:
    """The `TensorBoard` that was made last, if it is still open."""
    return None if _latest is None else _latest()


def _write_by(writer: Any, events: Iterable[bytes]) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    # If the trial has closed its writer, this opens another file.
    files = writer.file_writer or writer._get_file_writer()
    for encoded in events:
        event = Event.FromString(encoded)
        files.add_event(event, event.step, event.wall_time)
    writer.flush()


def _tagged(row: Mapping[str, float]) -> dict[str, float]:
    return {f"Determined/{name}": value for name, value in row.items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Hyperparameters by dotted name, in types that TensorBoard takes: numbers, bools, and anything else as text."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            is_number = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) <= 2**53)
            yield f"{prefix}{name}", value if is_number else str(value)
