"""The kind and location of a trial's failure, which decide on restarts and on the reuse of processes."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, cast

from dray.imports import is_installed
from dray.rpc.wire import wire

FailureKind = Literal["error", "oom", "host_oom", "device", "collective", "died", "node", "hung"]
"""error: an exception. oom: out of a GPU's memory. host_oom: out of the machine's memory, perhaps because of other
processes. device: a GPU error, after which the process can't use the GPU any more. collective: an error in a
collective, perhaps because another rank exited. died: a process died without an exception. node: it died with its node.
hung: no progress for ``hang_timeout_s``."""

_OUT_OF_MEMORY = ("out of memory", "status_alloc_failed", "failed to cuda calloc")  # the last by NCCL
_OUT_OF_HOST_MEMORY = ("can't allocate memory", "cannot allocate memory", "is killed by signal: killed")
_DEVICE_ERRORS = ("cuda error", "hip error", "cudnn", "cublas", "cuda driver error")
_ERRORS_OF_PROGRAMS = (
    "device-side assert", "illegal memory access", "misaligned address", "illegal instruction", "invalid",
    "no kernel image", "supported", "not permitted", "too many resources", "captur", "cublas", "cudnn",
)  # fmt: skip
"""GPU errors that a program can cause on any GPU, for example with an index out of range."""
_COLLECTIVE_ERRORS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
LOW_MEMORY = "running low on memory"  # Ray's words for a node on which it killed a process to save the others
LOST_NODE = "Ray has lost the node"  # marks a death in an error that the trial has not caused
LOG_TAIL = "the last lines of its log"  # heads the output in an error without a traceback

# A frame of a traceback as text, or the place of a SyntaxError; in an exception group to the right of bars.
_FRAME = re.compile(r'(?P<indent>[ |]*)File "(?P<file>.+)", line (?P<line>\d+)(, in (?P<name>.+))?')
_TRACEBACK = re.compile(r"[ |+]*(Original |Exception Group )?Traceback \(most recent call last\):")
_LINKS = (
    "\nThe above exception was the direct cause of the following exception:\n\n",
    "\nDuring handling of the above exception, another exception occurred:\n\n",
)
_LINK = re.compile(f"({'|'.join(map(re.escape, _LINKS))})")
_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/")  # also those of another node
_PACKAGES = tuple(f"{Path(__file__).parents[2] / name}{os.sep}" for name in ("dray", "searchers"))


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a trial failed."""

    kind: FailureKind  # see ``FailureKind``
    where: str = ""  # the exception's type, and the innermost line of the user's code; "" without an exception
    # Batches trained before the failure, or before the last checkpoint if its node was lost; -1 if unknown
    batches: int = -1
    # Ray's id of the node if its GPU may be broken, else ""
    node: str = field(default="", compare=False)


def failure_of(error: BaseException, batches: int) -> Failure:
    """Classify an exception that a trial raised after this many batches, including its causes."""
    kinds = [_kind(each) for each in _chain(error)]
    kind = next((each for each in ("oom", "host_oom", "device", "collective") if each in kinds), "error")
    return Failure(kind=cast(FailureKind, kind), where=_where(error), batches=batches)


def may_be_gpus_fault(error: BaseException) -> bool:
    """Whether a GPU or its driver may have caused an exception, rather than the trial's code."""
    # Every CUDA error mentions device-side assertions on a separate line.
    lines = [line for each in _chain(error) if _kind(each) == "device" for line in str(each).lower().splitlines()]
    lines = [line for line in lines if any(words in line for words in _DEVICE_ERRORS)] or lines[:1]
    programs = any(words in line for line in lines for words in _ERRORS_OF_PROGRAMS if "nvlink" not in line)
    return bool(lines) and not programs


_ABORT = re.compile(
    r"(?:terminated with exception:|what\(\):).*?((?:CUDA|HIP|cuDNN|cuBLAS)[ _](?:driver )?\w*error: .*)", re.I
)


def failure_printed(lines: Iterable[str], node: str, batches: int = -1) -> Failure | None:
    """The failure of a process that a GPU's error ended without a Python exception, as far as its output tells; None
    if it does not. NCCL's watchdog aborts a process as soon as it sees such an error, often before Python does.

    Args:
        lines: what the process printed last.
        node: Ray's id of its node.
    """
    for line in lines:
        if (found := _ABORT.search(line)) is not None:
            error = RuntimeError(found[1].strip())
            suspect = node if may_be_gpus_fault(error) else ""
            return Failure(kind=_kind(error), where=str(error), batches=batches, node=suspect)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or each.__context__


def _kind(error: BaseException) -> FailureKind:
    # By name, because torch has renamed these classes, and not every version has all of them.
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    if "OutOfMemoryError" in names or (
        isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)
    ):
        return "oom"
    if "MemoryError" in names or (
        isinstance(error, RuntimeError | OSError) and any(words in text for words in _OUT_OF_HOST_MEMORY)
    ):
        return "host_oom"
    if names & {"DistError", "PeerFailed"} or (
        isinstance(error, RuntimeError) and any(words in text for words in _COLLECTIVE_ERRORS)
    ):
        return "collective"
    if "AcceleratorError" in names or (
        isinstance(error, RuntimeError) and any(words in text for words in _DEVICE_ERRORS)
    ):
        return "device"
    return "error"


def with_users_line(error: BaseException, trace: str, code: Path | None) -> str:
    """A traceback, preceded by the error and the line of the user's own code that led to it.

    Without such a line, the traceback alone. Otherwise it follows an empty line after::

        KeyError: 'lrr'
          model_def.py:12, in __init__
            lr = hparams["lrr"]

    Args:
        trace: the error's traceback, as text.
        code: the directory of the user's code, which file names omit.
    """
    for each in _chain(error):
        if lines := users_line(each, code):
            message = str(each).strip().partition("\n")[0]
            kind = type(each).__qualname__
            return "\n".join([f"{kind}: {message}" if message else kind, *lines, "", trace])
    return trace


def users_line(error: BaseException, code: Path | None) -> list[str]:
    """The innermost line of the user's code that led to an error, below its location; [] if there is none."""
    return _formatted(_users_frames(error), code)


def running_users_line(frame: FrameType, code: Path | None) -> list[str]:
    """The innermost line of the user's code that a thread is running, given its innermost frame; as `users_line`."""
    return _formatted(_users(traceback.extract_stack(frame)), code)


def users_traceback(trace: str, code: Path | None = None) -> str:
    """A traceback as text, without the frames of installed files and of dray, as a user reads it.

    Of chained exceptions, those that never passed through the user's code are left out, except the last. The text may
    come from another process, and a message may quote a traceback, as that of a DataLoader's worker does.

    Args:
        code: the directory of the user's code, which file names omit.

    >>> print(users_traceback('''Traceback (most recent call last):
    ...   File "/usr/lib/python3.11/runpy.py", line 88, in _run_code
    ...     exec(code, run_globals)
    ...   File "model_def.py", line 12, in __init__
    ...     lr = hparams["lrr"]
    ... ValueError: lr must be > 0'''))
    Traceback (most recent call last):
      File "model_def.py", line 12, in __init__
        lr = hparams["lrr"]
    ValueError: lr must be > 0
    <BLANKLINE>
    """
    *earlier, last = _LINK.split(trace)
    kept = []
    for section, link in zip(earlier[::2], earlier[1::2], strict=True):
        if has_users_frames(section):
            kept += [_without_libraries(section, code), link.rstrip("\n") + "\n\n"]
    return "".join([*kept, _without_libraries(last, code)])


def has_users_frames(trace: str) -> bool:
    """Whether a traceback as text has a frame of the user's code."""
    return any(is_users_file(match["file"]) for match in map(_FRAME.fullmatch, trace.splitlines()) if match)


def _without_libraries(trace: str, code: Path | None) -> str:
    lines: list[str] = []
    heading: list[str] = []  # of a traceback whose first frame of the user's is yet to come
    inside, is_kept, indent = False, True, 0  # of the frame that the line belongs to, if any
    for line in trace.splitlines():
        if frame := _FRAME.fullmatch(line):
            inside, indent, is_kept = True, len(frame["indent"]), not frame["name"] or is_users_file(frame["file"])
            line = line if code is None else line.replace(f'File "{code}{os.sep}', 'File "', 1)
        elif _TRACEBACK.fullmatch(line):
            heading, inside = [line], False
            continue
        elif inside and len(line) - len(line.lstrip(" |")) < indent:
            inside, heading = False, []
        if is_kept or not inside:
            lines += [*heading, line]
            heading = []
    return "".join(f"{line}\n" for line in lines)


def _formatted(frames: Sequence[traceback.FrameSummary], code: Path | None) -> list[str]:
    if not frames:
        return []
    frame, file = frames[-1], Path(frames[-1].filename)
    if code is not None and file.resolve().is_relative_to(code.resolve()):
        file = file.resolve().relative_to(code.resolve())
    return [f"  {file}:{frame.lineno}, in {frame.name}", *([f"    {frame.line}"] if frame.line else [])]


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames: list[traceback.FrameSummary] = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # The code never ran, so no frame has its line.
        line = (error.text or "").strip()
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>", line=line))
    # A DataLoader's worker sends its traceback as the message of the error that is raised here.
    return _users(frames) or _users(_quoted_frames(str(error)))


def _quoted_frames(message: str) -> Iterator[traceback.FrameSummary]:
    lines = message.splitlines()
    for line, code in zip(lines, [*lines[1:], ""], strict=True):
        if frame := _FRAME.fullmatch(line):
            yield traceback.FrameSummary(
                frame["file"], int(frame["line"]), frame["name"] or "<module>", line=code.strip()
            )


def _users(frames: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if is_users_file(frame.filename)]


def is_drays_file(file: str) -> bool:
    return file.startswith(_PACKAGES)


def is_users_file(file: str) -> bool:
    """Whether a source file is the user's own: neither installed nor part of dray."""
    if file.startswith("<") or is_drays_file(file) or file.endswith((".pyx", ".pxi")):
        return False
    return not _LIBRARIES.search(file) and not is_installed(file)


def _where(error: BaseException) -> str:
    frames = _users_frames(error)
    kind = type(error).__qualname__
    if not frames:
        # Only the message distinguishes it from others, such as an exit code.
        return f"{kind}: {error}"
    # Only the file's name: the code may be elsewhere on another node.
    return f"{kind} at {Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}"
