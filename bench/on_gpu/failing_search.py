"""A search on Ray in which some trials fail by a device-side assert or out of memory, between others that do not."""

from __future__ import annotations

from pathlib import Path

import ray  # noqa: F401 - missing, this part is left out
from _measure import end_on_sigterm
from failing import BATCHES
from part import ON_GPU, check, doing, figure, mib, stamps

import dray

FAULTS = ["none", "assert", "none again", "memory", "none at last"]


def main(tiny: bool) -> None:
    """Run them one after another, on one GPU."""
    end_on_sigterm()
    doing("the search")
    config = {
        "name": "failing",
        "entrypoint": "failing:Failing",
        "hyperparameters": {"fault": {"type": "categorical", "vals": FAULTS}},
        "searcher": {
            "name": "random",
            "metric": "validation_loss",
            "max_length": {"batches": BATCHES},
            "points": [{"fault": fault} for fault in FAULTS],
            "max_trials": len(FAULTS),
            "max_concurrent_trials": 1,
        },
        "resources": {"slots_per_trial": 1, "max_slots": 1, "slot": "gpu" if ON_GPU else "cpu"},
        "max_restarts": 0,
    }
    path = Path.cwd() / "experiment"
    result = dray.Experiment(config, model_dir=Path(__file__).parent, path=path).run()
    # On a GPU, another trial replaces the one that runs out of memory, and is not looked at.
    made = {stamp.fields["fault"]: stamp for stamp in stamps("made")[: len(FAULTS)]}
    trials = {row["hparams.fault"]: row for row in result.trials.to_dict("records")[: len(FAULTS)]}
    states = ["COMPLETED", "ERRORED", "COMPLETED", "OUT_OF_MEMORY" if ON_GPU else "ERRORED", "COMPLETED"]
    check("states", [trials[fault]["state"] for fault in FAULTS], states)
    kinds = {record["trial"]: record.get("kind") for record in result.reader.failures}
    for fault, kind in (
        ("assert", "device" if ON_GPU else "error"),
        ("memory", "oom" if ON_GPU else "host_oom"),
    ):
        number = trials[fault]["trial_id"]
        check(f"{fault}: kind", kinds.get(number), kind)
        log = (path / f"trial_{number}" / "logs" / "rank_0.log").read_text(errors="replace")
        check(f"{fault}: the user's line is in the log", "failing.py" in log and "in train_batch" in log, True)
    processes = [made[fault].pid for fault in FAULTS]
    check("a new process after the assert", processes[2] not in processes[:2], ON_GPU)
    check("a new process after the lack of memory", processes[4] not in processes[2:4], True)
    before, *later = (made[fault].fields["used"] for fault in FAULTS)
    figure("GPU memory of all processes when the first trial begins", mib(before))
    more = [later[at] - before for at in (1, 3)]
    # Less than a context: the memory of the dead process is free.
    goal = "each < 200 MiB"
    figure("more than that after each failure", ", ".join(map(mib, more)), goal=goal, reached=max(more) < 200 << 20)
