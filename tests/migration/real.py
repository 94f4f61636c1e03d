"""A model directory with the real Determined, in an environment of its own that `make test-determined` makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dray.config.load import load_config
from dray.config.search import build_search
from searchers.events import Create, Exited, Started
from searchers.journal import Journal
from tests.migration.models import HERE, Model

PYTHON = Path(os.environ.get("DETERMINED_PYTHON", HERE.parents[1] / "build" / "determined" / "bin" / "python"))
TAKES_AT_MOST_S = 200


def trials(path: Path) -> dict[int, tuple[dict[str, Any], int]]:
    """Hyperparameters and seed of each trial that an experiment of dray's began."""
    records = list(Journal.read(path / "journal.jsonl"))
    search = build_search(load_config(path / "experiment.yaml"), print)
    begun = [record for record in records if record["event"] == "started"]
    return {record["trial"]: (record["hparams"], search.seed_of(record["trial"])) for record in begun}


def planned(model: Model) -> dict[int, tuple[dict[str, Any], int]]:
    """The same of each trial that the model's search will begin, whatever they report."""
    search = build_search(load_config(model.file), lambda record: None)
    actions, found = search.start(), {}
    while created := [action.trial for action in actions if isinstance(action, Create)]:
        actions = []
        for trial in created:
            actions += search.on(Started(trial=trial))
            found[trial] = (search.params(trial), search.seed_of(trial))
            actions += search.on(Exited(trial=trial, reason="completed"))
    return found


def run(model: Model, hparams: Mapping[str, Any], seed: int, slots: int, scratch: Path) -> dict[str, Any]:
    """Train one trial in Determined's local mode, with as many processes as slots; what `reference.py` wrote down.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    code = scratch / "code"
    shutil.copytree(model.directory, code, ignore=shutil.ignore_patterns("__pycache__"))
    config = model.of_slots(slots)
    spec = {
        "config": config,
        "hparams": hparams,
        "seed": seed,
        "class": None if model.command else config["entrypoint"].split()[-1],
        "shuffled": model.shuffled,
        "command": [*model.command, "--hparams", json.dumps(hparams)],
    }
    (scratch / "spec.json").write_text(json.dumps(spec))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={slots}"]
    done = subprocess.run(
        [
            str(PYTHON),
            *(launcher if slots > 1 or model.launched else []),
            str(HERE / "reference.py"),
            str(scratch / "spec.json"),
            str(scratch / "told.json"),
        ],
        cwd=code,
        env=_environment(config, slots, scratch),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TAKES_AT_MOST_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{model.name} with Determined on {slots} slots:\n{done.stdout[-3000:]}")
    told: dict[str, Any] = json.loads((scratch / "told.json").read_text())
    return told


def _environment(config: Mapping[str, Any], slots: int, scratch: Path) -> dict[str, str]:
    variables = config.get("environment", {}).get("environment_variables", [])
    return {
        # Not this process's PYTHONPATH: the environment is Determined's own.
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
        **dict(each.split("=", 1) for each in variables),
        "HOME": str(scratch),
        "XDG_DATA_HOME": str(scratch / "data"),
        "OMP_NUM_THREADS": "1",
        **({"USE_TORCH_DISTRIBUTED": "true"} if slots > 1 else {}),
    }
