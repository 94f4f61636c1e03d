"""Experiments by the command, one after another, on the Ray cluster that RAY_ADDRESS names.

``python -m tests.migration.drive ROOT NAME:SLOTS ...``
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
import yaml

from dray.cli import main as dray
from tests.migration.models import MODELS


def experiment_file(root: Path, name: str, slots: int) -> Path:
    """The model's own, or a copy with another number of slots."""
    model = MODELS[name]
    if model.of_slots(slots) == model.read():
        return model.file
    copy = root / f"{name}-{slots}.yaml"
    copy.write_text(yaml.safe_dump(model.of_slots(slots)))
    return copy


def main(root: Path, wanted: list[tuple[str, int]]) -> None:
    """Run each; what goes wrong with one of them is said, and the others are run."""
    ray.init(log_to_driver=False)
    for name, slots in wanted:
        print(f"== {name} on {slots} slots", flush=True)
        file = experiment_file(root, name, slots)
        try:
            path = ["--path", str(root / f"{name}-{slots}")]
            dray(["experiment", "create", str(file), str(MODELS[name].directory), *path])
        except SystemExit as ended:
            print(f"== {name} on {slots} slots: exit code {ended.code or 0}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [(name, int(slots)) for name, _, slots in (each.partition(":") for each in sys.argv[2:])])
