"""The last lines of a trial's log, for the error of a process that died without an exception."""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Sequence
from pathlib import Path

from dray.leases.failure import LOG_TAIL, is_users_file
from dray.worker.log import writer

AWAITED_S = 1.0
_LINES = 20
_BYTES = 20_000  # bytes at the end of the file to search for these lines
_ABORT_BYTES = 200_000  # NCCL's watchdog and Python's `faulthandler` print the stacks of all threads
_CRASH = re.compile(r"Fatal Python error: (.+)")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_CRASH_LINE = re.compile(r"\s*$|\s+File |\s+\.\.\.|Stack |Thread |Current thread |Extension modules: |  <")
"""The beginnings of Python's lines about a crash; see `faulthandler`."""


def log_tail(log: Path, start: int = 0) -> str:
    """The last lines of a trial's log, indented; after a crash, the first lines about it. The log need not exist.
    `start`: the number of bytes to skip at the file's beginning."""
    return _shown(_read(log, start)[0])


def with_log_tail(error: str, log: Path) -> str:
    """The error of a process that died, with the last lines of its log.

    Returns:
        The exit code or signal comes first, unless the error has a cause; after a crash, the kind of crash and the
        innermost line of the user's code::

            a process of worker group group-0 died: Segmentation fault
              model_def.py:12, in train_batch

            the last lines of its log (...
    """
    _await_writer(log)
    lines, ending = _read(log)
    how = "\n".join(_described_crash(lines)) or ("" if ": " in error else ending)
    return f"{error}{how and ': '}{how}\n\n{LOG_TAIL} ({log}):\n{_shown(lines)}"


def last_output(log: Path) -> list[str]:
    """What the last process of a trial's log printed at its end, in enough lines for the traces of an abort."""
    _await_writer(log)
    lines, _ = _read(log, last=_ABORT_BYTES)
    begins = max((n for n, line in enumerate(lines) if line.startswith(writer.ENDING)), default=-1)
    return lines[begins + 1 :]


def _shown(lines: Sequence[str]) -> str:
    return "\n".join(f"    | {line}" for line in lines[_crash(lines) :][:_LINES]) or "    | (nothing)"


def _await_writer(log: Path) -> None:
    """Wait until the output of a dead process is in its log, for `AWAITED_S` at most, as a child may live on."""
    until = time.monotonic() + AWAITED_S
    with log.open("rb") as file:
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # a filesystem without locks
                return
            else:
                return


def _described_crash(lines: Sequence[str]) -> list[str]:
    crash = lines[_crash(lines) :]
    if not crash or (kind := _CRASH.match(crash[0])) is None:
        return []
    frames = [
        frame
        for frame in map(_FRAME.match, crash)
        if frame and is_users_file(frame[1]) and not _is_ours(Path(frame[1]))
    ]
    return [kind[1], *(f"  {Path(frame[1]).name}:{frame[2]}, in {frame[3]}" for frame in frames[:1])]


def _is_ours(file: Path) -> bool:
    """Whether this is a file of dray, which may be installed elsewhere on the node of the process."""
    _, dray, inner = "/".join(file.parts).rpartition("/dray/")
    return bool(dray) and (Path(__file__).parents[2] / inner).exists()


def _read(log: Path, start: int = 0, last: int = _BYTES) -> tuple[list[str], str]:
    """The last output of the trial's processes, and how the last one ended, if `dray.worker.log.writer` knows."""
    if not log.exists():
        return [], ""
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(max(start, size - last))
        lines = [line[writer.STAMP_LENGTH :] for line in file.read().decode(errors="replace").splitlines()]
    if lines and lines[-1].startswith(writer.ENDING):
        return lines[:-1], lines[-1].removeprefix(writer.ENDING)
    return lines, ""


def _crash(lines: Sequence[str]) -> int:
    """The index of the first line about a crash, if the log ends with one; otherwise of the first line to show."""
    index = len(lines) - 1
    while index >= 0 and _CRASH_LINE.match(lines[index]):
        index -= 1
    return index if index >= 0 and _CRASH.match(lines[index]) else max(0, len(lines) - _LINES)
