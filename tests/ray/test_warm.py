"""In an experiment, trials find in their process what earlier ones have compiled, and the data that they keep."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import dray
from tests.ray.harness import TRIALS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]

TRIAL_COUNT = 4


def test_a_model_is_compiled_once_and_its_data_and_pretrained_part_are_made_once(tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # it takes a second to import

    record = tmp_path / "record.jsonl"
    config = {
        "name": "warm",
        "entrypoint": "warm:Warm",
        "hyperparameters": {
            "global_batch_size": 8,
            "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
            "record": str(record),
        },
        "searcher": {"name": "random", "metric": "error", "max_length": {"batches": 4}, "max_trials": TRIAL_COUNT},
        "resources": {"slot": "cpu", "max_slots": 1},
    }
    result = dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "experiment").run()
    assert set(result.trials["state"]) == {"COMPLETED"}
    found = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(found) == TRIAL_COUNT
    assert len({each["pid"] for each in found}) == 1
    # One graph to train, and one, without gradients, to validate.
    assert [(each["compiled"], each["makes"]) for each in found] == [(2, 2)] * TRIAL_COUNT
    # On disk, too: in torch's directory of this user on this node, which all processes share.
    assert {each["cache"] for each in found} == {os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()}
