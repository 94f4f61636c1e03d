"""The last lines that a trial printed, for the error of a trial that can't tell what happened."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dray.desk.failure import PRINTED, is_users
from dray.worker.log import writer

_SHOWN_LINES = 20
_SHOWN_BYTES = 20_000
_CRASH = re.compile(r"Fatal Python error: (.+)")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_OF_A_CRASH = re.compile(r"\s*$|\s+File |\s+\.\.\.|Stack |Thread |Current thread |Extension modules: |  <")
"""How lines begin that Python writes about a crash; see `faulthandler`."""


def last_printed(log: Path, since: int = 0) -> str:
    """The last lines of a trial's log; after a crash, those that tell where.

    Args:
        log: need not exist.
        since: the number of bytes at its beginning to leave out.
    """
    lines = _end(log, since)
    return "\n".join(f"    | {line}" for line in lines[_crash(lines) :][:_SHOWN_LINES]) or "    | (nothing)"


def with_last_words(error: str, log: Path) -> str:
    """The error of a process that died, with what it printed last.

    Args:
        error: says that it died.
        log: of its trial and rank.

    Returns:
        If it has crashed, the kind of crash and the innermost line of the user's code come first::

            a process of worker group group-0 died: Segmentation fault
              model_def.py:12, in train_batch

            the end of what it printed (...
    """
    how = "\n".join(_crashed(log))
    return f"{error}{how and ': '}{how}\n\n{PRINTED} ({log}):\n{last_printed(log)}"


def _crashed(log: Path) -> list[str]:
    lines = _end(log)
    if (how := _CRASH.match(lines[_crash(lines)] if lines else "")) is None:
        return []
    frames = [
        frame
        for frame in map(_FRAME.match, lines[_crash(lines) :])
        if frame and is_users(frame[1]) and not _is_ours(Path(frame[1]))
    ]
    return [how[1], *(f"  {Path(frame[1]).name}:{frame[2]}, in {frame[3]}" for frame in frames[:1])]


def _is_ours(file: Path) -> bool:
    """Whether it is a file of dray, which may be elsewhere on the node that it ran on."""
    _, dray, inner = "/".join(file.parts).rpartition("/dray/")
    return bool(dray) and (Path(__file__).parents[2] / inner).exists()


def _end(log: Path, since: int = 0) -> list[str]:
    if not log.exists():
        return []
    size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(max(since, size - _SHOWN_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line[writer.STAMP_LENGTH :] for line in lines]


def _crash(lines: Sequence[str]) -> int:
    """Where a crash begins at the end of these lines; without one, where the last lines to show begin."""
    at = len(lines) - 1
    while at >= 0 and _OF_A_CRASH.match(lines[at]):
        at -= 1
    return at if at >= 0 and _CRASH.match(lines[at]) else max(0, len(lines) - _SHOWN_LINES)
