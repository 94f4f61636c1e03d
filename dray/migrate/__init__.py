"""Checks line by line whether a model directory that was made for Determined runs here.

It only reads: no file of the directory is imported or run.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dray.code.ignore import code_of
from dray.code.startup_hook import HOOK
from dray.migrate.configs import ExperimentFile
from dray.migrate.finding import Finding, Verdict, told_once
from dray.migrate.notebooks import read_notebook
from dray.migrate.places import mounts_of
from dray.migrate.python import Sources
from dray.migrate.scopes import DETERMINED
from dray.migrate.shell import REAL_ONE, read_shell, replaces_ours

__all__ = ["Checked", "Finding", "Verdict", "check"]

_REQUIRED = re.compile(r"determined\b(?![\w-])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A directory that was checked.

    Attributes:
        directory: as it was given.
        findings: sorted by file and line.
        experiments: the experiment files in it, relative to the directory.
    """

    directory: Path
    findings: tuple[Finding, ...]
    experiments: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """Whether nothing must be changed."""
        return not self.of("change")

    def of(self, verdict: Verdict) -> list[Finding]:
        """The findings with this verdict."""
        return [finding for finding in self.findings if finding.verdict == verdict]

    @property
    def summary(self) -> str:
        """All findings in one line."""
        change, look, ignored = (len(self.of(verdict)) for verdict in ("change", "look", "ignored"))
        counts = f"{change} to change, {look} to look at, {ignored} ignored"
        return f"{counts}; the rest runs unchanged" if change or look else f"{counts}: runs unchanged"

    def lines(self) -> list[str]:
        """The findings as text; what several of them say is said once, with the places."""
        return list(told_once(self.findings))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "directory": str(self.directory),
            "runs": self.runs,
            "experiments": list(self.experiments),
            "findings": [asdict(finding) for finding in self.findings],
        }


def check(directory: Path) -> Checked:
    """Check a model directory.

    Args:
        directory: the directory that ``dray experiment create`` would get as the model's code; it may have
            experiment files anywhere.

    Raises:
        ConfigError: there is no such directory, it can't be read, or it is too large to be code.
    """
    code = code_of(directory)
    names = sorted({*code.files, *(path.name for path in directory.iterdir() if path.is_file())})
    experiments = [
        file
        for name in names
        if name.endswith((".yaml", ".yml"))
        if (file := ExperimentFile(name, directory / name)).is_one
    ]
    mounts = {there: here for file in experiments for there, here in mounts_of(file.raw).items()}
    python = {name: (directory / name).read_bytes() for name in code.files if name.endswith(".py")}
    notebooks = {
        name: read_notebook((directory / name).read_text(encoding="utf-8", errors="replace"))
        for name in code.files
        if name.endswith(".ipynb")
    }
    python |= {name: "\n".join(notebook.python).encode() for name, notebook in notebooks.items()}
    sources = Sources(python, mounts)
    findings = [*sources.findings(), *_environment()]
    for name, notebook in notebooks.items():
        findings += read_shell(name, "\n".join(notebook.shell), mounts, is_hook=False)
    to_change = {finding.file for finding in findings if finding.verdict == "change"}
    for file in experiments:
        findings += file.findings(directory, sources, to_change)
    for name in code.files:
        text = (directory / name).read_text(encoding="utf-8", errors="replace") if _is_read(name) else ""
        if name.endswith(".sh"):
            findings += read_shell(name, text, mounts, is_hook=name == HOOK)
        elif text:
            findings += _requirements(name, text)
    return Checked(
        directory=directory,
        findings=tuple(
            notebooks[each.file].placed(each) if each.file in notebooks else each
            for each in sorted(findings, key=_as_read)
        ),
        experiments=tuple(file.name for file in experiments),
    )


def _as_read(finding: Finding) -> tuple[str, int, bool]:
    # Findings about a whole file come after those about its lines.
    return finding.file, finding.line or 2**31, finding.verdict == "runs"


def _is_read(name: str) -> bool:
    return name.endswith(".sh") or re.fullmatch(r"(.*/)?requirements[\w.-]*\.txt", name) is not None


def _requirements(name: str, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if _REQUIRED.match(line.strip()):
            yield Finding(name, number, "change", f"{line.strip()}: {REAL_ONE}")
        elif (told := replaces_ours(line.partition(" #")[0])) is not None:
            yield Finding(name, number, "look", told)


def _environment() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version(DETERMINED)
    except importlib.metadata.PackageNotFoundError:
        return
    yield Finding("", 0, "change", f"determined {version} is installed: {REAL_ONE}")
