"""Parses ``entrypoint``: the name of a trial class, or a program that trains a model."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import TypeAlias

from dray.script import Script

CLASS_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
_CLASS = re.compile(CLASS_PATTERN.strip("^$"))
_PYTHON = re.compile(r"(.*/)?python(\d+(\.\d+)*)?")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# Launchers that start one process per slot; a worker group already has these processes.
_LAUNCHERS = re.compile(r"(determined|dray)\.launch\.(torch_distributed|(auto_?)?(deepspeed|horovod))")
# Determined's module that runs a trial class, named in its oldest configs.
_HARNESS = "determined.exec.harness"
# Options of the interpreter that have no effect here.
_IDLE_OPTIONS = ("-u", "-B", "-q")
_OPERATORS = "();<>|&"
# Shell syntax outside of single quotes: a second line, or an expansion.
_FOR_A_SHELL = re.compile(r"\n|\$[\w{(]+|`")

EXAMPLES = "for example model_def:DigitsTrial or python3 train.py --epochs 1"
#: Programs and modules that can't run inside a worker, and what to do instead.
_REFUSED = tuple(
    (re.compile(kind, re.DOTALL), cure)
    for kind, cure in {
        r"(.*/)?(torchrun|horovodrun|mpirun|deepspeed|accelerate)"
        r"|torch\.distributed\.(run|launch)|accelerate\.commands\.launch": "dray starts a trial's processes itself, "
        "one per slot (resources.slots_per_trial); give only the script: python3 train.py",
        r"(.*/)?(ba|z|da|k)?sh": "dray runs the program itself, in its workers; give the program that the script runs, "
        f"{EXAMPLES}, and put the commands before it into startup-hook.sh, in the model directory",
        r"[A-Za-z_]\w*=.*": "it runs in a worker, where Python is running already; write environment: "
        "{{environment_variables: [{program}]}}, and here only the program",
        rf"determined\.(?!{_HARNESS.partition('.')[2]}$).*": "dray has no counterpart to this part of Determined; "
        + EXAMPLES,
    }.items()
)


@dataclass(frozen=True, slots=True)
class ClassName:
    """The name of a trial class: ``module:Class``; both parts may contain dots."""

    module: str
    name: str
    written: str | tuple[str, ...] = ""  # the user's text, if it was a launcher's command

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


Entrypoint: TypeAlias = ClassName | Script


def as_written(entrypoint: Entrypoint | None) -> str | list[str] | None:
    if entrypoint is None:
        return None
    text = entrypoint.command if isinstance(entrypoint, Script) else str(entrypoint)
    return list(entrypoint.written) if isinstance(entrypoint.written, tuple) else entrypoint.written or text


def is_class(text: object) -> bool:
    """Whether the text names a class: ``module:Class``.

    >>> is_class("model_def:DigitsTrial"), is_class("asha")
    (True, False)
    """
    return isinstance(text, str) and _CLASS.fullmatch(text) is not None


def parse_entrypoint(entrypoint: object) -> Entrypoint:
    """Parse ``module:Class``, or the command of a program.

    Determined's launchers (``python3 -m determined.launch.torch_distributed [options --] ...``) and their options are
    dropped, because a trial's processes exist already. Its harness (``python3 -m determined.exec.harness``) runs a
    class.

    >>> str(parse_entrypoint("model_def:DigitsTrial"))
    'model_def:DigitsTrial'
    >>> parse_entrypoint("python3 -m determined.launch.torch_distributed python3 train.py --epochs 1").arguments
    ('--epochs', '1')
    """
    if isinstance(entrypoint, ClassName | Script):
        return entrypoint
    found = _parsed(entrypoint)
    written = tuple(entrypoint) if isinstance(entrypoint, list | tuple) else str(entrypoint)
    return found if written == as_written(found) else replace(found, written=written)


def _parsed(entrypoint: object) -> Entrypoint:
    words = _words(entrypoint)
    if len(words) == 1 and is_class(words[0]):
        return _class(words[0])
    command = entrypoint if isinstance(entrypoint, str) else shlex.join(words)
    if isinstance(entrypoint, str):  # a list involves no shell
        _check_needs_no_shell(entrypoint, words)
    while words:
        program, *words = words
        _check_program(program, command)
        if program.endswith(".py"):  # an executable script, as in Determined's tutorials
            return Script(command=command, file=program, arguments=tuple(words))
        if not _PYTHON.fullmatch(program):
            break
        while words and words[0] in _IDLE_OPTIONS:
            words = words[1:]
        if not words:
            raise ValueError(f"must have a script after python, got {command!r}; {EXAMPLES}")
        first, *rest = words
        if first.startswith("-") and first != "-m":
            raise ValueError(
                f"can't give Python the option {first}, got {command!r}: the script runs in a worker, where Python is "
                "running already; remove the option"
            )
        if first != "-m":
            return Script(command=command, file=first, arguments=tuple(rest))
        if not rest or not _MODULE.fullmatch(rest[0]):
            raise ValueError(f"must have a module after -m, got {command!r}; for example python3 -m package.train")
        module, *rest = rest
        _check_program(module, command)
        if module == _HARNESS:
            return _class_after(module, rest, command)
        if not _LAUNCHERS.fullmatch(module):
            return Script(command=command, module=module, arguments=tuple(rest))
        words = _without_options(rest, command)
        if words[0] == "--trial":
            return _class_after("--trial", words[1:], command)
        if len(words) == 1 and is_class(words[0]):  # the argument of the old launchers
            return _class(words[0])
    raise ValueError(
        f"must be module:Class, or a Python program, got {command!r}; dray runs it inside its workers, so it can't be "
        f"another program; {EXAMPLES}"
    )


def _check_program(program: str, command: str) -> None:
    """Reject programs that can't run inside a worker, each with its cure."""
    for kind, cure in _REFUSED:
        if kind.fullmatch(program) and not _LAUNCHERS.fullmatch(program):
            raise ValueError(f"can't run {program}, got {command!r}: {cure.format(program=program)}")


def _words(entrypoint: object) -> list[str]:
    if isinstance(entrypoint, str):
        try:
            # Like shlex.split(), but a shell's operators are words of their own, and \\ continues a line.
            lexer = shlex.shlex(entrypoint.replace("\\\n", ""), posix=True, punctuation_chars=_OPERATORS)
            lexer.whitespace_split, lexer.commenters = True, ""
            words = list(lexer)
        except ValueError as error:
            raise ValueError(f"can't be split into words ({error}), got {entrypoint!r}; {EXAMPLES}") from None
    elif isinstance(entrypoint, list | tuple):
        for place, word in enumerate(entrypoint, 1):
            if not isinstance(word, str):
                raise ValueError(f"must be a list of strings, got {word!r} as word {place}; quote it: '{word}'")
        words = list(entrypoint)
    else:
        raise ValueError(f"must be a string or a list of strings, got {entrypoint!r}; {EXAMPLES}")
    if not words:
        raise ValueError(f"must not be empty; {EXAMPLES}")
    return words


def _without_options(words: list[str], command: str) -> list[str]:
    """The words after a launcher's own options, which end with -- or --trial."""
    if words and words[0].startswith("-"):
        end = next((word for word in ("--", "--trial") if word in words), None)
        if end is None:
            raise ValueError(f"needs -- between the launcher's options and the command, got {command!r}")
        words = words[words.index(end) + (end == "--") :]
    if not words:
        raise ValueError(f"must have a command for the launcher to run, got {command!r}; {EXAMPLES}")
    return words


def _class(text: str) -> ClassName:
    return ClassName(*text.split(":"))


def _class_after(what: str, words: list[str], command: str) -> ClassName:
    if len(words) != 1 or not is_class(words[0]):
        raise ValueError(
            f"must have module:Class after {what}, and nothing else, got {command!r}; for example model_def:DigitsTrial"
        )
    return _class(words[0])


def _check_needs_no_shell(command: str, words: list[str]) -> None:
    """Check that the command needs no shell: it is a single command without expansions."""
    operator = next((word for word in words if word and set(word) <= set(_OPERATORS)), None)
    found = _FOR_A_SHELL.search(re.sub(r"\\.|'[^']*'", "", command.strip().replace("\\\n", "")))
    if operator is not None or found is not None:
        what = operator or str(found and found[0]).replace("\n", "a second line")
        raise ValueError(
            f"can't use {what}, got {command!r}: it runs without a shell; read variables in the program (os.environ), "
            "and put commands to run before the training into startup-hook.sh, in the model directory"
        )
