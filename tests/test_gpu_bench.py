"""bench/gpu.py without a GPU: its dry run, what it leaves out, and what it keeps of a part that is cut off or fails."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the benchmark; no other test finds it, or those that it imports."""
    for directory in (BENCH, BENCH / "on_gpu"):
        monkeypatch.syspath_prepend(str(directory))
    yield importlib.import_module
    for name in ("gpu", "_measure", "marked_tests", "part"):
        sys.modules.pop(name, None)


@pytest.fixture
def gpu(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("gpu")


def dry_run(directory: Path, *parts: str, **environment: str) -> tuple[int, str]:
    """Its exit code, and the file that it wrote."""
    command = [sys.executable, str(BENCH / "gpu.py"), "--dry-run", "--to", str(directory / "gpu.md"), "--parts", *parts]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=directory, capture_output=True, text=True, timeout=590
    )
    assert (directory / "gpu.md").exists(), done.stdout + done.stderr
    return done.returncode, (directory / "gpu.md").read_text()


def row(text: str, what: str) -> str:
    """What a table says was measured."""
    [found] = [line for line in text.splitlines() if line.startswith(f"| {what} ")]
    return found.split(" | ")[1].strip()


def test_every_part_has_a_module(gpu: ModuleType) -> None:
    for _, module, _ in gpu.PARTS.values():
        assert (BENCH / "on_gpu" / f"{module}.py").exists()


@pytest.mark.slow
@pytest.mark.long
def test_dry_run_of_what_needs_no_ray_and_is_soon_over(tmp_path: Path) -> None:
    code, text = dry_run(tmp_path, "nccl", "tp", "errors")
    assert code == 0, text
    assert text.startswith("# Dry run on a CPU: says nothing about a GPU\n")
    assert "Unfinished" not in text
    assert row(text, "a peer that has gone, rank 0: kind") == "collective"
    assert row(text, "AdamW, tp, FullyShard: weights of the plain model") == "True"
    assert row(text, "memory: the user's line") == "failing.py, in train_batch"


@pytest.mark.slow
@pytest.mark.long
def test_dry_run_of_the_rest_that_needs_no_ray(tmp_path: Path) -> None:
    code, text = dry_run(tmp_path, "shard", "loader", "stall", "tokens", "gloo")
    assert code == 0, text
    assert row(text, "their losses are those without a stop") == "True"
    assert row(text, "they are those of one process") == "True"
    assert row(text, "dray, no workers")
    assert row(text, "the last checkpoint, at the end")
    # In batches of both sizes, both loops have trained the same.
    assert text.count("the weights of both differ by 0.0e+00 of their norm") == 2
    # A dry run judges no speed.
    assert "MISSED" not in text
    assert "reached" not in text


NO_RAY = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
@pytest.mark.long
def test_without_ray_it_says_what_it_left_out_and_runs_the_rest(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_RAY)
    code, text = dry_run(tmp_path, "tests", "rung", PYTHONPATH=str(tmp_path))
    assert code == 0, text
    assert "Left out: tests/ray/test_gpu.py (No module named 'ray')." in text
    assert "Left out: tests/training/test_device.py, which needs ray." in text
    assert row(text, "tests").startswith("0 passed, 0 failed, ")
    assert "## The stall at a rung, in a search on Ray\n\nLeft out: there is no ray on this machine.\n" in text


@pytest.mark.slow
def test_a_part_that_hangs_is_cut_off_and_keeps_its_figures(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text(
        textwrap.dedent("""
            import threading
            from _measure import stamp

            def main(tiny):
                stamp("figure", what="rounds", value="3", goal="", reached=None)
                stamp("doing", what="round 4")
                threading.Event().wait()
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = gpu.run_part("hangs", 15.0, tmp_path / "part", tiny=True, on_cpu=True)
    paper = gpu.Paper()
    assert gpu.report(paper, "Hangs", 15.0, outcome, tiny=False) == ([], False)
    text = paper.text("")
    assert row(text, "rounds") == "3"
    assert "CUT OFF after 15 s, at: round 4." in text
    assert 'hangs.py", line 8 in main' in text, "where it hung"


def test_a_part_that_fails_says_where_and_keeps_its_figures(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text(
        textwrap.dedent("""
            from _measure import stamp

            def main(tiny):
                stamp("figure", what="speed", value="0.5", goal=">= 1", reached=False)
                stamp("figure", what="speed", value="1.5", goal=">= 1", reached=True)
                stamp("figure", what="memory", value="9", goal="0", reached=False)
                stamp("failure", what="test_x", text="assert 1 == 2")
                raise RuntimeError("CUDA error: out of luck")
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = gpu.run_part("fails", 60.0, tmp_path / "part", tiny=False, on_cpu=True)
    paper = gpu.Paper()
    assert gpu.report(paper, "Fails", 60.0, outcome, tiny=False) == ([True, False], False)
    text = paper.text("")
    assert "| speed  | 1.5      | >= 1 | reached |\n| memory | 9        | 0    | MISSED  |" in text
    assert "FAILED test_x\n\n```\nassert 1 == 2\n```" in text
    assert "FAILED with code 1, at: starting." in text
    assert "RuntimeError: CUDA error: out of luck" in text


def test_all_files_with_tests_for_gpus_are_found(load: Callable[[str], ModuleType]) -> None:
    found = load("marked_tests").marked_files()
    assert {Path("tests/pytorch/test_gpu_loop.py"), Path("tests/ray/test_gpu.py")} <= set(found)
    assert Path(__file__).relative_to(BENCH.parent) not in found
