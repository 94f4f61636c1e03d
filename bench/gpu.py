"""Checks and figures that need a GPU, in eight minutes on one, and thirteen on several. Writes bench/results/gpu.md.

    python bench/gpu.py [--parts nccl shard ...] [--budget 480] [--to FILE] [--commit NAME] [--dry-run]

Each part is a separate process with a time limit, and so are its steps: if one fails, hangs or runs out of time, the
others keep their figures, and the file is rewritten after each part. Parts that need only torch and numpy come first;
the others are left out with a note where their packages (Ray, pytest) are missing.

Without a GPU, or with --dry-run, all parts run with tiny sizes on the CPU, with gloo for NCCL: this shows that the
script works, and says nothing about speed. The results are only printed, unless --to names a file.

For a machine without a network that has Python 3.12, a torch for its driver (2.7 or newer, never one of these wheels),
and numpy, pandas, pyarrow, psutil, requests, PyYAML, tensorboard, typer, rich, pytest, pytest-timeout and hypothesis:
download the other packages into a folder of the tree on a machine with a network. They take 51 MiB; without three
folders that no part needs, Ray's wheel has half its size.

    pip download -qd wheels --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
        --platform manylinux2014_x86_64 ray==2.60.0 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types \
        typing-inspection typing-extensions jsonschema jsonschema-specifications referencing rpds-py tensorboardX \
        optuna alembic mako sqlalchemy greenlet colorlog cmaes pathspec
    zip -qd wheels/ray-*.whl 'ray/jars/*' 'ray/dashboard/client/*' 'ray/rllib/*'

Then run this on the machine without a network, in the tree, as one command of at most ten minutes, with a FILE that is
kept:

    python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site wheels/*.whl;
    PYTHONPATH=/tmp/site python3 bench/gpu.py --to FILE --commit NAME

Without Ray's wheel, everything but the searches and some tests runs; without any wheel, everything but the searches and
all tests.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _measure import (
    BENCH,
    STAMPS,
    Paper,
    Stamp,
    end_on_sigterm,
    machine,
    of_kind,
    read_stamps,
    stamp,
    verdict,
)

PARTS = {
    "nccl": ("NCCL alone", 35),
    "shard": ("FullyShard with one slot", 52),
    "errors": ("Errors of a GPU, and the next trial", 20),
    "failing_search": ("A device-side assert and too little memory, in a search on Ray", 20),
    "gloo": ("Two processes on one GPU, over gloo", 30),
    "stall": ("The stall of a checkpoint of 2 GB, and the last one", 45),
    "tokens": ("A GPT in bf16", 48),
    "tp": ("Tensor parallelism of size 1, with a plan for some of the layers", 18),
    "marked_tests": ("Tests marked `gpu`", 58),
    "loader": ("Images from a loader", 32),
    "rung": ("The stall at a rung, and the next trial, in a search on Ray", 49),
    "quarters": ("Four trials on one GPU, in a search on Ray", 73),
}
"""The title of each module in bench/on_gpu, and the most seconds that it may take, in order of worth. All of them fit
the budget."""
SEVERAL = {
    "parallel": ("DDP and FullyShard on several GPUs, against loops by hand", 120),
    "faults": ("A rank that raises, asserts or is killed, over NCCL", 90),
    "halves": ("Tensor parallelism of size 2, shards, and half of the GPUs", 90),
}
"""The same for two GPUs or more, which come first there, with a budget of their own."""
BUDGET_S = 480
PATIENCE = 4
"""A dry run may take this many times as long: it measures nothing, and may run on a busy machine."""
LOOK_S = 120
"""The most seconds to import torch for the first time on a cold machine, and to query its GPU."""
LEAST_S = 15
"""No part begins with less time left than this."""
END_S = 10
TAIL = 25
"""Lines of output that are kept from a part that fails."""
OURS = ("dray", "searchers", "tests", "examples", "_measure")


# --------------------------------------------------------------------------------------------------- in its own process
def child(module: str, tiny: bool) -> None:
    """Run one part, in its process."""
    # Not to sys.stderr, which pytest captures.
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(os.dup(2), "w"))
    sys.path.insert(0, str(BENCH / "on_gpu"))
    try:
        importlib.import_module(module).main(tiny)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OURS or (BENCH / "on_gpu" / f"{missing}.py").exists():
            raise
        stamp("left_out", why=f"there is no {missing} on this machine")


# ------------------------------------------------------------------------------------------------------------ the parts
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a part.

    Args:
        stamps: of its process, up to its end.
        took_s: seconds.
        code: exit code; None if it was cut off.
        output: the last lines that it printed.
    """

    stamps: list[Stamp]
    took_s: float
    code: int | None
    output: str


def run_part(module: str, limit_s: float, directory: Path, *, tiny: bool, on_cpu: bool) -> Outcome:
    """Run a part in a separate process and directory, and end it when its time is up."""
    directory.mkdir(parents=True)
    stamps, output = directory / "stamps.jsonl", directory / "output.txt"
    stamps.touch()
    paths = [str(BENCH / "on_gpu"), str(BENCH), str(BENCH.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        STAMPS: str(stamps),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "DRAY_HOME": str(directory / "home"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if tiny:
        environment["OMP_NUM_THREADS"] = "1"  # several fight for the cores of a busy machine
    command = [sys.executable, str(BENCH / "gpu.py"), "--child", module, *(["--tiny"] if tiny else [])]
    began = time.monotonic()
    with output.open("wb") as log:
        process = subprocess.Popen(
            # The directory holds no code: a local run would copy it into each of its checkpoints.
            command, env=environment, cwd=directory, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it prints where it is
            time.sleep(0.5)
            code = None
        finally:
            _end(process)
    tail = "\n".join(output.read_text(errors="replace").splitlines()[-TAIL:])
    return Outcome(stamps=read_stamps(stamps), took_s=time.monotonic() - began, code=code, output=tail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, if it still runs, and its descendants. On SIGTERM it ends its Ray itself."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(paper: Paper, title: str, limit_s: float, outcome: Outcome, *, tiny: bool) -> tuple[list[bool], bool]:
    """Print a part; return whether each goal was reached, and whether it ran to its end without a failed test."""
    paper.say(f"\n## {title}")
    paper.say()
    figures: dict[str, dict[str, Any]] = {}
    for found in of_kind(outcome.stamps, "figure"):
        figures[found.fields["what"]] = dict(found.fields)
    judged = [fields for fields in figures.values() if fields["reached"] is not None]
    if figures:
        rows = [
            [fields["what"], fields["value"], fields["goal"], _verdict(fields["reached"], tiny=tiny)]
            for fields in figures.values()
        ]
        paper.table(["what", "measured", "goal", ""], rows)
        paper.say()
    for found in of_kind(outcome.stamps, "note"):
        paper.say(found.fields["text"])
    for found in of_kind(outcome.stamps, "left_out"):
        paper.say(f"Left out: {found.fields['why']}.")
    failures = of_kind(outcome.stamps, "failure")
    for found in failures:
        paper.say(f"\nFAILED {found.fields['what']}\n\n```\n{found.fields['text']}\n```")
    last = ([found.fields["what"] for found in of_kind(outcome.stamps, "doing")] or ["starting"])[-1]
    if outcome.code is None:
        paper.say(f"CUT OFF after {limit_s:.0f} s, at: {last}. What it printed last:\n\n```\n{outcome.output}\n```")
    elif outcome.code != 0:
        paper.say(f"FAILED with code {outcome.code}, at: {last}. What it printed last:\n\n```\n{outcome.output}\n```")
    paper.say(f"{outcome.took_s:.0f} s.")
    return [fields["reached"] for fields in judged], outcome.code == 0 and not failures


def _verdict(reached: bool | None, *, tiny: bool) -> str:
    return "" if reached is None or tiny else verdict(reached)


# ------------------------------------------------------------------------------------------------------------- the file
def commit(given: str | None) -> str:
    """The commit of this tree, as given, or else from git."""
    if given is not None:
        return given
    git = ["git", "-C", str(BENCH)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no history here, and no --commit)"
    return name.strip() + (", with changes" if changed else "")


def measure(options: argparse.Namespace, directory: Path) -> bool:
    """Run the parts and write the file; return whether all of them ran, without a failed test."""
    began = time.monotonic()
    look = run_part("machine", LOOK_S, directory / "machine", tiny=False, on_cpu=options.dry_run)
    if look.code != 0:
        raise SystemExit(f"can't look at the GPU with torch of {sys.executable}:\n{look.output}")
    if not (found := of_kind(look.stamps, "machine")):
        raise SystemExit(f"{sys.executable}: {of_kind(look.stamps, 'left_out')[0].fields['why']}")
    seen = found[0].fields
    tiny = not seen["gpus"]
    title = "Dry run on a CPU: says nothing about a GPU" if tiny else "On a GPU"
    file = options.to or (None if tiny else BENCH / "results" / "gpu.md")
    paper = Paper()
    paper.say(machine())
    if not tiny:
        paper.say(
            f"GPU: {', '.join(seen['gpus'])}; driver {seen['driver']}; torch {seen['torch']}, CUDA {seen['cuda']}."
        )
    paper.say(f"`bench/gpu.py`, commit {commit(options.commit)}.")
    patience = PATIENCE if tiny else 1
    more = SEVERAL if tiny or len(seen["gpus"]) > 1 else {}
    budget = options.budget or (BUDGET_S + sum(most_s for _, most_s in more.values())) * patience
    goals: list[bool] = []
    sound = True
    waiting = options.parts or [*more, *PARTS]
    while waiting:
        _write(file, paper, title, f"\nUnfinished: {', '.join(waiting)}.")
        name = waiting.pop(0)
        heading, most_s = (PARTS | SEVERAL)[name]
        limit_s = min(most_s * patience, budget - (time.monotonic() - began) - END_S)
        if limit_s < LEAST_S:
            paper.say(f"\n## {heading}\n\nLeft out: too little is left of {budget:.0f} s.")
            sound = False
            continue
        outcome = run_part(name, limit_s, directory / name, tiny=tiny, on_cpu=options.dry_run)
        reached, whole = report(paper, heading, limit_s, outcome, tiny=tiny)
        goals += reached
        sound = sound and whole
        if options.keep is None:
            shutil.rmtree(directory / name)  # checkpoints of several GB
    if not tiny:
        paper.say(f"\nGoals: {goals.count(True)} reached, {goals.count(False)} MISSED.")
    paper.say(f"\n{time.monotonic() - began:.0f} s in all.")
    _write(file, paper, title)
    return sound


def _write(file: Path | None, paper: Paper, title: str, more: str = "") -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(paper.text(title) + more)


def main(arguments: Sequence[str]) -> int:
    """Read the command line and measure."""
    if arguments[:1] == ["--child"]:
        child(arguments[1], "--tiny" in arguments)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[*SEVERAL, *PARTS], help="default: all, in this order")
    parser.add_argument("--budget", type=float, help=f"the most seconds for all of it (default {BUDGET_S})")
    parser.add_argument("--to", type=Path, help="the file to write (default bench/results/gpu.md; none for a dry run)")
    parser.add_argument("--commit", help="the commit of the tree, if it is a copy without its history")
    parser.add_argument("--keep", type=Path, help="keep what the parts write in this directory")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the CPU")
    options = parser.parse_args(arguments)
    end_on_sigterm()
    with tempfile.TemporaryDirectory() as unkept:
        directory = (options.keep or Path(unkept)).resolve()
        return 0 if measure(options, directory) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
