"""What kind of end a trial's failure is, and where: what restarts, and the reuse of processes, are decided by."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from dray.imports import is_installed

Kind = Literal["error", "oom", "device", "collective", "died", "hung"]
"""An exception; no memory left, of the machine or of a GPU; an error of a GPU, after which it works no more in this
process; one of a collective, which another rank's end can be the cause of; a process that ended without a word; no
progress for ``hang_timeout_s``."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "is killed by signal: killed")
_OF_DEVICES = ("cuda error", "cudnn", "cublas", "cuda driver error")
_OF_COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
LOW_MEMORY = "running low on memory"
"""What Ray says of a process that it has ended to save the others of its node."""

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a trial failed.

    Attributes:
        kind: see ``Kind``.
        where: the exception's type, and the innermost line of the user's code; "" where there was no exception.
        batches: trained when it failed; -1 where nobody could tell.
    """

    kind: Kind
    where: str = ""
    batches: int = -1


def failure_of(error: BaseException, batches: int) -> Failure:
    """What this exception of a trial is."""
    kinds = [_kind(each) for each in _chain(error)]
    # What led to an error counts; "error" is what all the others are not.
    kind = next((each for each in ("oom", "device", "collective") if each in kinds), "error")
    return Failure(kind=cast(Kind, kind), where=_where(error), batches=batches)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, and those that led to it."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or each.__context__


def _kind(error: BaseException) -> Kind:
    # By name: torch has renamed them, and not every torch has all of them.
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    if names & {"MemoryError", "OutOfMemoryError"}:
        return "oom"
    if isinstance(error, (RuntimeError, OSError)) and any(words in text for words in _OUT_OF_MEMORY):
        return "oom"
    if names & {"DistError", "PeerFailed"} or (
        isinstance(error, RuntimeError) and any(words in text for words in _OF_COLLECTIVES)
    ):
        return "collective"
    if "AcceleratorError" in names or (isinstance(error, RuntimeError) and any(words in text for words in _OF_DEVICES)):
        return "device"
    return "error"


PRINTED = "the end of what it printed"
"""How an error goes on that has no traceback."""


def told_first(error: BaseException, trace: str, code: Path | None) -> str:
    """A traceback with what a user looks for above it: the error, and the line of their own code that it came from.

    Args:
        error: of a trial.
        trace: its traceback, as text.
        code: the directory of the user's code, which is left out of its files' names.

    Returns:
        The traceback alone, where no line of the user's led to it. Else, before it and an empty line::

            KeyError: 'lrr'
              model_def.py:12, in __init__
                lr = hparams["lrr"]
    """
    for each in _chain(error):
        if lines := users_line(each, code):
            said = str(each).strip().partition("\n")[0]
            kind = type(each).__qualname__
            return "\n".join([f"{kind}: {said}" if said else kind, *lines, "", trace])
    return trace


def users_line(error: BaseException, code: Path | None) -> list[str]:
    """The innermost line of the user's own code that an error came from, with its place above it; [] if there is none.

    Args:
        error, code: as in ``told_first``.
    """
    users = _users_frames(error)
    if not users:
        return []
    frame, file = users[-1], Path(users[-1].filename)
    if code is not None and file.resolve().is_relative_to(code.resolve()):
        file = file.resolve().relative_to(code.resolve())
    return [f"  {file}:{frame.lineno}, in {frame.name}", *([f"    {frame.line}"] if frame.line else [])]


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames: list[traceback.FrameSummary] = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # No frame has its line, for none came to run.
        line = (error.text or "").strip()
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>", line=line))
    return [one for one in frames if not one.filename.startswith(("<", _PACKAGE)) and not is_installed(one.filename)]


def _where(error: BaseException) -> str:
    users = _users_frames(error)
    kind = type(error).__qualname__
    if not users:
        # An exit code, say: its message is all that tells it from others.
        return f"{kind}: {error}"
    # Not the whole path: the code may lie elsewhere on another node.
    return f"{kind} at {Path(users[-1].filename).name}:{users[-1].lineno} in {users[-1].name}"
