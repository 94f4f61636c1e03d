"""Runs the tests marked ``gpu``, in this process, and stamps each result as it comes."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from _measure import BENCH, stamp
from part import doing, figure, note

ROOT = BENCH.parent
TEST_LIMIT_S = 60
LINES = 40
"""Lines that are kept from the end of a failure."""
OURS = ("dray", "searchers", "tests", "examples")


def main(tiny: bool) -> None:
    """Run them; without a GPU, they are all skipped."""
    os.chdir(ROOT)
    files = [str(file) for file in _loadable(marked_files())]
    seen = Seen()
    # Not the options of pyproject.toml: they are strict about the plugins that are installed where dray is developed.
    options = ["-m", "gpu", "-o", "addopts=--import-mode=importlib", "-o", f"timeout={TEST_LIMIT_S}"]
    options += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    code = pytest.main([*options, *files], plugins=[seen])
    seen.say()
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest ended with {code!r}")


def marked_files() -> list[Path]:
    """The files with tests for GPUs: collecting all files would take longer than running these."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file.relative_to(ROOT) for file in tests if "pytest.mark.gpu" in file.read_text()]


def _loadable(files: list[Path]) -> list[Path]:
    """Without those in tests/ray, if Ray can't be imported: the conftest.py there does so, and pytest would give up."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        for file in files:
            if file.is_relative_to("tests/ray"):
                note(f"Left out: {file} ({error}).")
        return [file for file in files if not file.is_relative_to("tests/ray")]
    return files


class Seen:
    """A pytest plugin: counts, and stamps after each test, so that a run that is cut off loses nothing."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.why: Counter[str] = Counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that can't be imported: left out if a package is missing here, else a failure."""
        if report.failed:
            missing = re.search(r"No module named '([^'.]+)", str(report.longrepr))
            if missing and missing[1] not in OURS:
                note(f"Left out: {report.nodeid}, which needs {missing[1]}.")
            else:
                self._failed(report.nodeid, str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        doing(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed(report.nodeid, report.longreprtext)
        elif report.skipped:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.why[why.removeprefix("Skipped: ")] += 1
            self._count("skipped")
        elif report.when == "call":
            self._count("passed")

    def say(self) -> None:
        for why, count in self.why.items():
            note(f"Skipped: {count}, {why}.")

    def _failed(self, nodeid: str, text: str) -> None:
        stamp("failure", what=nodeid, text="\n".join(text.splitlines()[-LINES:]))
        self._count("failed")

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1
        passed, failed, skipped = (self.outcomes[name] for name in ("passed", "failed", "skipped"))
        value = f"{passed} passed, {failed} failed, {skipped} skipped"
        figure("tests", value, goal="none fails", reached=passed > 0 and not failed)
