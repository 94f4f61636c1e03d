"""Reads the shell scripts of a model directory: ``startup-hook.sh``, and those that call Determined's command."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from dray.migrate.finding import Finding
from dray.migrate.places import Mounts, of_container

COMMANDS: Mapping[str, str] = {
    "experiment create": "dray experiment create",
    "experiment list": "dray experiment list",
    "experiment describe": "dray experiment describe",
    "experiment logs": "dray trial logs",
    "experiment list-trials": "dray trial list",
    "experiment list-checkpoints": "dray checkpoint list",
    "experiment pause": "dray experiment stop",
    "experiment activate": "dray experiment resume",
    "experiment continue": "dray experiment extend",
    "experiment cancel": "dray experiment stop",
    "experiment kill": "dray experiment stop, twice",
    "experiment delete": "dray experiment delete",
    "experiment download": "dray experiment download",
    "experiment download-model-def": "code/ in the experiment's directory",
    "experiment config": "experiment.yaml in the experiment's directory",
    "experiment wait": "dray experiment create, which ends with the experiment",
    "trial describe": "dray trial describe",
    "trial logs": "dray trial logs",
    "trial download": "dray checkpoint download",
    "checkpoint download": "dray checkpoint download",
    "checkpoint describe": "dray checkpoint list",
    "preview-search": "dray preview",
    "tensorboard": "dray ui",
    "agent list": "dray cluster status",
    "slot list": "dray cluster status",
    "deploy": "dray cluster validate, and ray up",
}
"""Determined's commands, and what to use instead."""

_SHORT = {
    "a": "agent", "c": "checkpoint", "cmd": "command", "d": "deploy", "e": "experiment", "s": "slot", "t": "trial",
}  # fmt: skip
_SHORT_ACTIONS = {"ls": "list", "lc": "list-checkpoints", "lt": "list-trials", "unpause": "activate"}
_COMMAND = re.compile(r"(?:^|[;&|(`]|\bthen|\bdo)\s*(?:\w+=\S*\s+)*(det\s+[a-z][^;&|)`]*)")
_INSTALLS = re.compile(r"\bpip3?\s+install\b.*\s(determined(?:\[[\w,]*\])?(?:[=<>~!][^\s;&|]*)?)(?=\s|$)")
_PIP = re.compile(r"\bpip3?\s+install\s+([^;&|]*)")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?\s*([=<>~!]=?=?.*)")
_PATH = re.compile(r"/[\w./-]+")
ROOT_ALONE = re.compile(r"(?:^|[;&|]|\bsudo)\s*(apt|apt-get|yum|dnf|apk)\s")


def of_command(words: Sequence[str]) -> str | None:
    """What to write instead of a Determined command; None for any other command."""
    name, instead = counterpart(words) or ("", "")
    if not name:
        return None
    return f"{name}: use {instead}" if instead else f"{name}: dray has no such command; remove it"


def counterpart(words: Sequence[str]) -> tuple[str, str] | None:
    """A Determined command, and what to use instead, "" if dray has no such command; None for any other command.

    >>> counterpart(["det", "e", "ls"])
    ('det experiment list', 'dray experiment list')
    """
    said = [
        word
        for before, word in itertools.pairwise(words)
        if not word.startswith("-") and before not in ("-m", "--master", "-u", "--user")
    ]
    if words[:1] != ["det"] or not said:
        return None
    group = _SHORT.get(said[0], said[0])
    action = _SHORT_ACTIONS.get(said[1], said[1]) if len(said) > 1 and group not in COMMANDS else ""
    return f"det {group} {action}".strip(), COMMANDS.get(f"{group} {action}") or COMMANDS.get(group, "")


def read_shell(file: str, text: str, mounts: Mounts, *, is_hook: bool) -> Iterator[Finding]:
    """The findings in a shell script.

    Args:
        file: its path relative to the directory.
        text: its content.
        mounts: the experiment files' bind mounts.
        is_hook: whether it is ``startup-hook.sh``, which dray runs.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        code = line.partition(" #")[0]
        if code.lstrip().startswith("#"):
            continue
        for match in _COMMAND.finditer(code):
            told = of_command(_words(match[1]))
            if told is not None:
                found.append(Finding(file, number, "change", told))
        if (installs := _INSTALLS.search(code)) is not None:
            found.append(Finding(file, number, "change", f"{installs[1]}: {REAL_ONE}"))
        for installed in _PIP.findall(code):
            for told in filter(None, map(replaces_ours, _words(installed))):
                found.append(Finding(file, number, "look", told))
        for path in _PATH.findall(code):
            of_path = of_container(path, mounts)
            if of_path is not None:
                found.append(Finding(file, number, *of_path))
        if is_hook and (needs_root := ROOT_ALONE.search(code)) is not None:
            what = f"{needs_root[1]} needs root, which the Ray workers that run this, once per node, may not have"
            found.append(Finding(file, number, "look", what))
    yield from found
    if is_hook and not any(each.verdict == "change" for each in found):
        yield Finding(file, 0, "runs", "once on each node, before the model's code")


REAL_ONE = (
    "if the real package is installed, `import determined` does not import dray; remove it (pip uninstall determined)"
)
"""Why Determined's package must not be installed."""


def replaces_ours(requirement: str) -> str | None:
    """The finding for ``ray==2.9``, which may replace the version of a package that dray needs; else None."""
    asked = _REQUIREMENT.fullmatch(requirement.partition(";")[0].strip())
    name = _canonical(asked[1]) if asked else ""
    if asked is None or name not in _needed():
        return None
    version = importlib.metadata.version(name)
    if asked[2].replace(" ", "") == f"=={version}":
        return None
    return (
        f"{asked[0].strip()}: dray itself uses {name} {version}, in the same environment; remove it, if the code works "
        "with that version"
    )


@functools.cache
def _needed() -> set[str]:
    """The packages that dray requires, if it is installed as a package."""
    try:
        lines = importlib.metadata.requires("dray") or []
    except importlib.metadata.PackageNotFoundError:
        return set()
    return {_canonical(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines if "extra ==" not in line}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()
