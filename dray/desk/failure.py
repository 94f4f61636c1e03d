"""The kind and place of a trial's failure, by which restarts and the reuse of processes are decided."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, cast

from dray.imports import is_installed

Kind = Literal["error", "oom", "device", "collective", "died", "hung"]
"""An exception; out of memory, of the machine or of a GPU; a GPU error, after which this process can't use the GPU any
more; an error in a collective, which another rank's end may have caused; a process that died without an error; no
progress for ``hang_timeout_s``."""

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "is killed by signal: killed")
_OF_DEVICES = ("cuda error", "cudnn", "cublas", "cuda driver error")
_OF_COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
LOW_MEMORY = "running low on memory"
"""What Ray says about a process that it has killed to save the others on its node."""

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a trial failed.

    Attributes:
        kind: see ``Kind``.
        where: the exception's type, and the innermost line of the user's code; "" without an exception.
        batches: trained when it failed; -1 if unknown.
    """

    kind: Kind
    where: str = ""
    batches: int = -1


def failure_of(error: BaseException, batches: int) -> Failure:
    """The failure that this exception of a trial is."""
    kinds = [_kind(each) for each in _chain(error)]
    # An exception's causes count too; "error" is none of the other kinds.
    kind = next((each for each in ("oom", "device", "collective") if each in kinds), "error")
    return Failure(kind=cast(Kind, kind), where=_where(error), batches=batches)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or each.__context__


def _kind(error: BaseException) -> Kind:
    # By name: torch has renamed these classes, and not every version has all of them.
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
"""Heads the output in an error that has no traceback."""


def told_first(error: BaseException, trace: str, code: Path | None) -> str:
    """A traceback, preceded by what a user looks for: the error, and the line of their own code that it came from.

    Args:
        error: of a trial.
        trace: its traceback, as text.
        code: the directory of the user's code, which is left out of file names.

    Returns:
        The traceback alone, if no line of the user's code led to it. Otherwise, above it and an empty line::

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
    """The innermost line of the user's own code that led to an error, below its place; [] if there is none.

    Args:
        error, code: as in ``told_first``.
    """
    return _shown(_users_frames(error), code)


def users_line_now(frame: FrameType, code: Path | None) -> list[str]:
    """The same for what a thread is doing now.

    Args:
        frame: the thread's innermost frame.
        code: as in ``told_first``.
    """
    return _shown(_users(traceback.extract_stack(frame)), code)


def _shown(users: Sequence[traceback.FrameSummary], code: Path | None) -> list[str]:
    if not users:
        return []
    frame, file = users[-1], Path(users[-1].filename)
    if code is not None and file.resolve().is_relative_to(code.resolve()):
        file = file.resolve().relative_to(code.resolve())
    return [f"  {file}:{frame.lineno}, in {frame.name}", *([f"    {frame.line}"] if frame.line else [])]


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames: list[traceback.FrameSummary] = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # No frame has its line: the code never ran.
        line = (error.text or "").strip()
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>", line=line))
    return _users(frames)


def _users(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [one for one in frames if is_users(one.filename)]


def is_users(file: str) -> bool:
    """Whether a code file is the user's own."""
    return not file.startswith(("<", _PACKAGE)) and not is_installed(file)


def _where(error: BaseException) -> str:
    users = _users_frames(error)
    kind = type(error).__qualname__
    if not users:
        # Such as an exit code: only the message tells it from others.
        return f"{kind}: {error}"
    # Not the whole path: the code may be elsewhere on another node.
    return f"{kind} at {Path(users[-1].filename).name}:{users[-1].lineno} in {users[-1].name}"
