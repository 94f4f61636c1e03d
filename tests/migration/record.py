"""Record what Determined reports of the trials that the searches begin: ``python -m tests.migration.record [NAME]``."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.migration.models import MODELS, Model
from tests.migration.real import planned, run
from tests.migration.told import KINDS


def record(model: Model) -> None:
    """Write the model's golden file anew."""
    golden: dict[str, Any] = {"versions": {}, "slots": {}}
    for slots in (1, 2):
        golden["slots"][slots] = {}
        for trial, (hparams, seed) in sorted(planned(model).items()):
            with tempfile.TemporaryDirectory() as scratch:
                told = run(model, hparams, seed, slots, Path(scratch))
            golden["versions"] = told.pop("versions")
            golden["slots"][slots][trial] = {"hparams": hparams, "seed": seed, **told}
            print(f"{model.name}, trial {trial} on {slots} slots: {len(told['batches'])} batches", flush=True)
    model.golden.parent.mkdir(exist_ok=True)
    model.golden.write_text(_text(golden) + "\n")


def _text(golden: dict[str, Any]) -> str:
    """A line for each batch; losses in as few digits as tell them in single precision."""

    def short(numbers: Any) -> Any:
        return {name: float(str(np.float32(value))) for name, value in numbers.items()}

    def lines(value: Any, indent: str) -> str:
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            body = ",\n".join(f'{indent} "{name}": {lines(inner, indent + " ")}' for name, inner in value.items())
            return "{\n" + body + f"\n{indent}}}"
        return json.dumps(value)

    for of_trials in golden["slots"].values():
        for told in of_trials.values():
            told["hparams"] = json.dumps(told["hparams"])
            for kind in KINDS:
                told[kind] = {step: short(numbers) for step, numbers in told[kind].items()}
    return lines(golden, "")


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        record(MODELS[each])
