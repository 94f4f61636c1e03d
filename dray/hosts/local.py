"""The host of local runs, in the caller's own process or under torchrun: metrics and checkpoints go to a directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dray.hosts.bottom_line import TerminalLine, bottom_line
from dray.hosts.progress import ProgressDisplay, is_wanted, say
from dray.hosts.signals import StopSignals, print_no_traceback
from dray.hosts.unsaved import UnsavedRows
from dray.masking import hidden_text
from dray.storage import CheckpointStore, Location, StorageError, verify
from dray.storage.manifest import Listed, holds_a_trial
from dray.text import file_name, one_line
from dray.training.errors import ShouldExit
from dray.training.host import Reached, Report
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import on_failure
from dray.training.plan import Plan
from dray.training.units import TrainUnit
from searchers.rows import cut_incomplete

log = logging.getLogger(__name__)


def home() -> Path:
    """The directory of all results: DRAY_HOME, or else ~/dray_results."""
    return Path(os.environ.get("DRAY_HOME") or Path.home() / "dray_results")


class LocalHost:
    """The host of a run without an experiment; see `dray.training.host.Host` for its methods.

    Nothing is written before the first report, unless the run fails. Used as a context manager, it turns SIGTERM into a
    request to save and stop after the current batch. While the run trains, Ctrl-C does the same and then raises
    KeyboardInterrupt.

    Args:
        directory: the run's directory. Default: a new one in `<home>/local`.
        trial_seed: the trial's seed. Default: random.
        code_dir: the directory of source code to copy into checkpoints. Default: the working directory.
        store: the checkpoint store. Default: one in `directory`.
        is_chief: whether this is the rank that records the run's end.
    """

    experiment_id = 0
    trial_id = 0
    latest_checkpoint: str | None = None
    source_checkpoint: str | None = None
    is_changed_fork: bool = False
    max_length: TrainUnit | None = None
    rungs: Sequence[TrainUnit] = ()
    validation_period: TrainUnit | None = None
    checkpoint_period: TrainUnit | None = None
    metrics: Sequence[str] = ()
    behind = None
    best_supported = False
    secrets: Sequence[str] = ()
    lengths: Sequence[float] = ()

    def __init__(
        self,
        directory: Path | None = None,
        *,
        trial_seed: int | None = None,
        code_dir: Path | None = None,
        store: CheckpointStore | None = None,
        is_chief: bool = True,
    ) -> None:
        # Absolute: the program may change the working directory while a checkpoint is written.
        self.directory = (directory or new_directory()).absolute()
        # The global generator would give a seeded program the same seed each time, and shift its own draws.
        self.trial_seed = random.SystemRandom().getrandbits(31) if trial_seed is None else trial_seed
        self.code_dir: Path | None = code_dir or Path.cwd()
        self.tensorboard_path = self.directory / "tensorboard"
        self._store = CheckpointStore(self.directory) if store is None else store
        self.is_remote = self._store.is_remote
        self.outputs = self._store.outputs
        self._unsaved = UnsavedRows()
        self._signals = StopSignals()
        self._announced_stop = False
        self._until_exit = contextlib.ExitStack()  # the handler of SIGTERM
        self._metrics: IO[str] | None = None
        self._progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._display: ProgressDisplay | None = None
        self._shows = is_wanted()  # evaluated now: later, all ranks but the chief log only errors
        self._last: Report | None = None
        self._saved: str | None = None
        self._is_chief = is_chief
        self._has_ended = True  # whether what was reported says how the run ended
        self._failure: BaseException | None = None  # the recorded one

    def __enter__(self) -> LocalHost:
        self._until_exit.enter_context(self._signals.sigterm())
        self._until_exit.enter_context(on_failure(_print))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._until_exit.close()
        if self._is_chief:
            self._record_end(error)  # by a program with its own loop
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._store.close()

    @contextlib.contextmanager
    def training(self, plan: Plan, begin: int, peers: DistributedContext) -> Iterator[None]:
        self._last, self._announced_stop = None, False
        self._progress = lambda: (begin, 0)
        if peers.rank == 0:
            self._check_writable()
        with contextlib.ExitStack() as at_end:
            if peers.rank == 0:
                at_end.push(lambda kind, error, trace: self._record_end(error))
            at_end.enter_context(self._signals.ctrl_c())
            if peers.rank == 0 and is_wanted():
                with ProgressDisplay(plan, begin, line=bottom_line()) as self._display:
                    self._display.started(str(self.directory))
                    try:
                        yield
                    except BaseException as error:
                        self._say_end(self._display, plan, begin, error)
                        raise
                    else:
                        self._say_end(self._display, plan, begin, None)
                    finally:
                        self._display = None
            else:
                # The terminal may also be the chief's, whose bar must not overwrite this rank's output.
                line = bottom_line() if peers.rank and self._shows else None
                with line if isinstance(line, TerminalLine) else contextlib.nullcontext():
                    yield
        if any(peers.allgather(self._signals.interrupted)):
            self._signals.requested_by = ""
            interrupt = KeyboardInterrupt()
            print_no_traceback(interrupt)
            raise interrupt

    def _check_writable(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as probe:
                probe.write(b"dray")
        except OSError as error:
            raise StorageError(
                f"can't write metrics and checkpoints to {self.directory}: {error.strerror}; choose another directory "
                "with the environment variable DRAY_HOME, or with --path"
            ) from error

    def _record_end(self, error: BaseException | None) -> None:
        """Record the state in which the run has ended, unless its last row says so."""
        exited = isinstance(error, SystemExit) and not error.code
        if error is None or exited or isinstance(error, KeyboardInterrupt | ShouldExit):
            if not self._has_ended:
                asked = self._signals.requested_by or isinstance(error, KeyboardInterrupt)
                self._write_end("STOPPED" if asked else "COMPLETED")
        elif error is not self._failure:
            self._failure = error
            text = one_line("".join(traceback.format_exception_only(error)))
            with contextlib.suppress(OSError):  # this may be the error: the directory can't be written to
                self._write_end("ERROR", error=hidden_text(text, self.secrets))

    def _write_end(self, state: str, **why: str) -> None:
        self._write({"batches": self._progress()[0], "ended": state, **why})
        self._has_ended = True

    def _say_end(self, display: ProgressDisplay, plan: Plan, begin: int, error: BaseException | None) -> None:
        batches, last = self._progress()[0], self._last
        if error is not None and batches == begin:
            return  # training never began
        completed = batches >= plan.length or (last is not None and last.final and last.decides)
        is_early = False
        if isinstance(error, KeyboardInterrupt):
            why = "stopped at once by Ctrl-C"
        elif error is not None and not isinstance(error, ShouldExit):
            why = "failed"
        elif completed:
            why = ""
        elif self._signals.requested_by:
            why = f"stopped by {self._signals.requested_by}"
        elif last is not None and last.interrupted:
            why = "stopped"
        else:
            why, is_early = "ended early, as requested,", True  # which is complete, as in an experiment
        display.ended(batches, why)
        if self._saved is None and completed and batches == begin:
            display.say("the checkpoint is already at this length; to train longer, pass a larger max_length")
        elif self._saved is None:
            display.say("no checkpoint was saved")
        else:
            display.say(f"latest checkpoint: {self._saved}")
            if not is_early and (how := self.how_to_resume(self._saved, completed=not why)):
                display.say(how)

    def how_to_resume(self, checkpoint: str, *, completed: bool) -> str:
        """A hint for the user: how to continue from the run's latest checkpoint."""
        if completed:
            return f'train longer with: fit(max_length=..., latest_checkpoint="{checkpoint}")'
        return f'resume with: fit(..., latest_checkpoint="{checkpoint}")'

    def is_best(self, validation: Mapping[str, object]) -> bool:
        return True

    def reached(self, validation: Mapping[str, object]) -> Reached:
        return "nothing"

    def watch(self, progress: Callable[[], tuple[int, int]]) -> None:
        # Only for the display; nobody watches for hangs, since the user is at the terminal.
        self._progress = progress
        if self._display is not None:
            self._display.watch(progress)

    def new_checkpoint(self, batches: int) -> Path:
        staging = self._store.stage(batches)
        self._unsaved.stage(staging)
        return staging

    def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
        rows = [*self._unsaved.take(staging).rows, _row(report)]
        if not (carried := staging / "metrics.jsonl").exists():  # a program may have a file of this name
            carried.write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = self._store.commit(staging, report.batches, known)
        self._unsaved.saved, self._saved = report.batches, path
        log.debug("saved %s", path)
        return self.checkpoint_id(report.batches)

    def checkpoint_id(self, batches: int) -> str:
        path = self._store.id_of(batches)
        return path if self._store.is_remote else f"{self.directory.name}/{Path(path).name}"

    def add_to_checkpoint(self, staging: Path, batches: int, known: Mapping[str, Listed]) -> dict[str, Listed]:
        return self._store.add(staging, batches, known)

    def delete_checkpoint(self, checkpoint: str) -> None:
        for batches, path in self._store.listed():
            if checkpoint in (path, self.checkpoint_id(batches)):
                self._store.delete(batches)
                return
        raise ValueError(f"there is no checkpoint {checkpoint!r} of this run; a run can delete only its own")

    def open_checkpoint(self, checkpoint: str, *, only: Collection[str] = ()) -> Path:
        """Open a checkpoint below `home()` by its id (`<run>/checkpoint_<batches>`), or any by its path or URI."""
        if checkpoint == self.latest_checkpoint or not Location.of(checkpoint).is_local:
            return self._store.open(checkpoint, only=only)
        candidates = (Path(checkpoint), home() / "local" / checkpoint, self.directory.parent / checkpoint)
        for path in candidates:
            if path.is_dir():
                return verify(path, without_manifest=path is candidates[0], only=only)
        raise FileNotFoundError(
            f"there is no checkpoint {checkpoint!r}: it is neither an id that on_checkpoint_upload_end() was given, "
            f"nor a directory; looked for {', '.join(dict.fromkeys(str(path) for path in candidates))}"
        )

    def last_checkpoint(self) -> str | None:
        name = _name_of(self.directory)
        directories = self.directory.parent.iterdir() if self.directory.parent.is_dir() else ()
        runs = [path for path in directories if _name_of(path) == name]
        # The latest start first (the name has it in seconds); then the latest checkpoint.
        for run in sorted(runs, key=lambda path: (path.name[:-4], path.stat().st_mtime_ns), reverse=True):
            opened = CheckpointStore(run).open_latest()
            if opened is not None and holds_a_trial(opened[1]):
                return f"{run.name}/{opened[1].name}"
        log.info('there is no checkpoint of an earlier run named "%s": training begins at batch 0', name)
        return None

    def stop_requested(self) -> bool:
        requested = bool(self._signals.requested_by)
        if requested and self._display is not None and not self._announced_stop:
            self._announced_stop = True
            self._display.say("stopping: saving a checkpoint after this batch; Ctrl-C again ends the run at once")
        return requested

    def opened(self) -> None:
        """No-op: a local program need not report."""

    def interrupted(self) -> None:
        """No-op: the run ends with the program."""

    def best_validation(self) -> float | None:
        return None

    def report(self, report: Report) -> bool:
        return self.publish(report)

    def publish(self, report: Report) -> bool:
        if any(part is not None for part in (report.training, report.validation, report.checkpoint, report.groups)):
            row = _row(report)
            self._write({**row, "system": report.system} if report.system else row)
            self._unsaved.add([row])  # without machine usage, so that two identical runs have identical checkpoints
        self._last, self._has_ended = report, report.final and report.decides
        if self._display is not None:
            self._display.reported(report)
        elif report.validation is not None:
            say(f"validated at batch {report.batches}: {metrics_text(report.validation)}")
        return bool(self._signals.requested_by)

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._metrics is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            cut_incomplete(self.directory / "metrics.jsonl")  # the run may have been killed while it wrote
            # Line-buffered: no row is lost if the process is killed.
            self._metrics = (self.directory / "metrics.jsonl").open("a", buffering=1)
            with contextlib.suppress(OSError):  # another run holds the lock, or the file system has none
                fcntl.flock(self._metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)  # shows that the run is alive
        self._metrics.write(json.dumps({**row, "time": time.time()}) + "\n")


def _print(error: BaseException) -> None:
    """Print a traceback now, instead of at the end of the process."""
    traceback.print_exception(error)
    sys.stderr.flush()
    print_no_traceback(error)


def _row(report: Report) -> dict[str, Any]:
    row = {name: getattr(report, name) for name in Report.__slots__ if name not in ("system", "compared", "length")}
    return {name: value for name, value in row.items() if value is not None and value is not False}


def metrics_text(metrics: Mapping[str, object]) -> str:
    """Metrics as text, for a log."""
    return ", ".join(f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in metrics.items())


def new_directory(name: str | None = None) -> Path:
    """The path of a new directory for a run of this name, by default the program's."""
    return home() / "local" / f"{file_name(name or _program())}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def _name_of(directory: Path) -> str:
    """The run's name in a directory from `new_directory`."""
    return directory.name.rsplit("-", 3)[0]


def _program() -> str:
    if "ipykernel" in sys.modules:
        return "notebook"
    script = Path(sys.argv[0] if sys.argv else "")
    name = script.parent.name if script.stem == "__main__" else script.stem  # a package, run by python -m
    return name if name not in ("", "-c") else "python"
