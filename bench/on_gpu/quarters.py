"""Four trials on one GPU against one, in searches on Ray: batches a second, and memory outside of torch's allocator."""

from __future__ import annotations

from pathlib import Path

import ray
from _measure import Stamp, end_on_sigterm
from part import ON_GPU, attempt, check, figure, mib
from part import stamps as stamped

import dray
from dray.worker.gpu_share import CONTEXT_BYTES


def main(tiny: bool) -> None:
    """One trial, then four."""
    end_on_sigterm()
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    lasts_s = 2.0 if tiny else 8.0
    rates: dict[int, float] = {}
    for trials in (1, 4):
        with attempt(f"{trials} on one GPU"):
            before = len(stamped("batch"))
            search(trials, lasts_s, tiny)
            stamps = stamped("batch")[before:]
            rates[trials] = report(trials, stamps)
    if len(rates) == 2:
        figure("batches a second of four by those of one", f"{rates[4] / rates[1]:.2f}")


def search(trials: int, lasts_s: float, tiny: bool) -> None:
    meeting = Path.cwd() / f"meeting-{trials}"
    meeting.mkdir()
    config = {
        "name": f"quarters-{trials}",
        "entrypoint": "quarter:Quarter",
        "hyperparameters": {
            "trials": trials,
            "meeting": str(meeting),
            "lasts_s": lasts_s,
            "tiny": tiny,
            "unused": {"type": "double", "minval": 0, "maxval": 1},
        },
        "searcher": {
            "name": "random",
            "metric": "validation_loss",
            "max_length": {"batches": 1_000_000},
            "max_trials": trials,
        },
        "resources": {
            "slots_per_trial": 1 / trials if trials > 1 else 1,
            "max_slots": 1,
            "cpus_per_slot": 4,
            "slot": "gpu" if ON_GPU else "cpu",
        },
        "scheduling_unit": 500,
        "checkpoint_policy": "none",
        "max_restarts": 0,
    }
    result = dray.Experiment(config, model_dir=Path(__file__).parent, path=Path.cwd() / f"experiment-{trials}").run()
    check(f"states of {trials}", result.trials["state"].tolist(), ["COMPLETED"] * trials)


def report(trials: int, stamps: list[Stamp]) -> float:
    """Note the figures of the time in which all trained; return the batches per second of all."""
    by_trial: dict[int, list[Stamp]] = {}
    for each in stamps:
        by_trial.setdefault(each.fields["trial"], []).append(each)
    check(f"processes of {trials}", len({each.pid for each in stamps}), trials)
    # The first stamps are of the warm-up.
    begin = max(mine[2].time for mine in by_trial.values())
    end = min(mine[-1].time for mine in by_trial.values())
    rates, outside = [], 0.0
    together = {trial: [each for each in mine if begin <= each.time <= end] for trial, mine in by_trial.items()}
    for mine in together.values():
        first, last = mine[0], mine[-1]
        rates.append((last.fields["number"] - first.fields["number"]) / (last.time - first.time))
    lasts = [mine[-1].fields for mine in together.values()]
    outside = (max(last["used"] for last in lasts) - sum(last["reserved"] for last in lasts)) / trials
    figure(f"batches a second, {trials} at a time", f"{sum(rates):,.0f}, each {min(rates):,.0f} to {max(rates):,.0f}")
    figure(
        f"memory of a process outside of torch's allocator, {trials} at a time",
        mib(outside),
        goal=f"<= {mib(CONTEXT_BYTES)}",
        reached=outside <= CONTEXT_BYTES,
    )
    return sum(rates)
