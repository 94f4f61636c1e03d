"""The best trials of a search on Ray are trained again, with seeds that they share."""

from __future__ import annotations

from pathlib import Path

import pytest

import dray
from tests.ray.harness import TRIALS, attempts, lines, recorded

pytestmark = [pytest.mark.ray, pytest.mark.slow]

BATCHES, SEEDS, TOP = 40, 2, 2


def test_best_trials_are_trained_again_to_the_end_with_shared_seeds(tmp_path: Path, ray_is_up: None) -> None:
    record = tmp_path / "record"
    config = recorded(record, trials=4, batches=BATCHES, repeat={"seeds": SEEDS, "for": f"top {TOP}"})
    config["searcher"] |= {"name": "asha", "variant": "promotion", "num_rungs": 2, "divisor": 2}
    result = dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "experiment").run()

    table = result.trials.set_index("trial_id")
    repeats = table[table["repeat_of"].notna()]
    finalists = [each.trial for each in result.reader.finalists()]
    assert sorted(zip(repeats["repeat_of"], repeats["repeat"], strict=True)) == sorted(
        (trial, seed) for trial in finalists for seed in (1, 2)
    )
    assert len(finalists) == TOP
    assert (repeats["batches"] == BATCHES).all(), "no rung ends a repeat"
    assert (repeats["hparams.lr"] == table["hparams.lr"].loc[repeats["repeat_of"]].to_numpy()).all()

    # The initial weights follow from a trial's seed alone.
    initial = {each["trial"]: each["initial"] for each in lines(record) if "initial" in each}
    by_seed = [{initial[trial] for trial in repeats.index[repeats["repeat"] == seed]} for seed in (1, 2)]
    assert [len(each) for each in by_seed] == [1, 1]
    assert len(set(initial.values())) == 4 + SEEDS
    assert all(tries[0].batches[0] == 0 for tries in attempts(record).values()), "each begins anew"

    best = result.best_trial
    assert best.trial_id == finalists[0]
    assert best.repeated is not None
    assert best.repeated.mean == pytest.approx(repeats.loc[repeats["repeat_of"] == best.trial_id, "best_metric"].mean())
    found = result.compare(*finalists)
    assert (found.seeds, found.paired) == (SEEDS, True)
