"""Make the checkpoints of tests/golden/determined-0.38.1 anew, with the real determined: make.py PYTHON [CASE...].

PYTHON is one of an environment with determined 0.38.1 and torch: `pip install determined==0.38.1 torch==2.13.0`.
Each case is one uninterrupted run, in one process or two under torchrun, whose losses are kept with its checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "determined-0.38.1"
LENGTH = 15  # batches of each process
# The class of model_def.py, processes, batches of the checkpoints: in the middle of an epoch, and at its end.
CASES = {
    "plain": ("Plain", 1, [8]),
    "plain-2": ("Plain", 2, [5]),
    "own": ("Own", 1, [8]),
    "two": ("Two", 1, [8]),
    "two-2": ("Two", 2, [5]),
    "scaled": ("Scaled", 1, [8]),
    "still": ("Still", 1, [8]),
    "still-2": ("Still", 2, [4]),
}


def run(
    model_dir: Path, out: Path, *command: str, processes: int = 1, environment: Mapping[str, str] | None = None
) -> str:
    """Run a Python command, `python script.py ...`, in a directory of its own; what it said.

    Raises:
        RuntimeError: with that, if it failed.
    """
    # Where determined keeps the checkpoints of local runs.
    (out / "data" / "determined").mkdir(parents=True, exist_ok=True)
    python, *arguments = command
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    variables = {**os.environ, "XDG_DATA_HOME": str(out / "data"), "OMP_NUM_THREADS": "1", **(environment or {})}
    if processes > 1:
        variables["USE_TORCH_DISTRIBUTED"] = "true"
    done = subprocess.run([python, *launcher, *arguments], cwd=model_dir, env=variables, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{said}")
    return said


def models(directory: Path) -> Path:
    """A copy of the model directory."""
    directory.mkdir(parents=True)
    for name in ("model_def.py", "train.py"):
        shutil.copy(HERE / name, directory)
    return directory


def main(python: str, *names: str) -> None:
    versions = "import determined, torch, numpy; print(determined.__version__, torch.__version__, numpy.__version__)"
    made_with = subprocess.run([python, "-c", versions], capture_output=True, text=True, check=True).stdout.split()
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = models(Path(scratch) / "models")
        for name in names or CASES:
            trial, processes, cuts = CASES[name]
            shutil.rmtree(GOLDEN / name, ignore_errors=True)
            out = Path(scratch) / name
            command = [python, "train.py", trial, str(LENGTH), str(out), "--save", *map(str, cuts)]
            run(model_dir, out, *command, processes=processes)
            ids = json.loads((out / "checkpoints.json").read_text())
            for batches in cuts:
                found = out / "data" / "determined" / ids[str(batches)]
                # Without code/, which Determined copies from the working directory: that is `HERE`, for all of them.
                shutil.copytree(found, GOLDEN / name / f"at-{batches}", ignore=shutil.ignore_patterns("code"))
            ranks = [json.loads((out / f"losses_{rank}.json").read_text()) for rank in range(processes)]
            about = {"trial": trial, "processes": processes, "made_with": made_with, "ranks": ranks}
            (GOLDEN / name / "run.json").write_text(json.dumps(about, indent=1) + "\n")
            print(name, ranks[0]["losses"][-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
