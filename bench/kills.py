"""kill -9 of the driver at random moments of the 64 trials of asha.yaml, and `resume` each time.

Half of them while it starts, half while it trains.

The trials are those of bench/faults.py. At the end the set of trials, their hyperparameters, their ends, the rungs and
every result that a trial had an answer to are held against the journal, and the journal against what it was at each
kill. Prints what was done and what came of it; exits with 1 if something did not come as it should.

    python bench/kills.py [--kills 20] [--seed 0] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from faults import TRIAL_COUNT, Play  # also brings the root of the repository onto the path

from dray.config.load import build_search, build_space, load_config
from tests.ray.harness import attempts, ends, journal, lines

EPOCH = 23
"""Batches of 64 in 1,437 images."""
DIVISOR, RUNGS = 4, (1, 4, 16)
STARTING_S, TRAINING_S = 9.0, 3.0
"""A start takes about so long; and the training kills come within so long after a driver's first batch."""


class Killed(Play):
    """An experiment that is killed; `journals` is what was in its journal each time."""

    def __init__(self, directory: Path, rng: Random) -> None:
        super().__init__(directory)
        self.rng = rng
        self.journals: list[list[dict[str, object]]] = []
        self.kills = {"it starts": 0, "it trains": 0}

    def kill(self, when: str) -> None:
        """Start a driver, and kill it at a random moment of what it does first, or of its training."""
        before = len(lines(self.record))
        self.start()
        assert self.driver is not None
        if when == "it trains":
            self.wait(lambda: len(lines(self.record)) > before, "a batch of this driver")
            time.sleep(self.rng.uniform(0, TRAINING_S))
        else:
            until = time.monotonic() + self.rng.uniform(0.5, STARTING_S)
            while time.monotonic() < until and len(lines(self.record)) == before:
                time.sleep(0.02)
        trained = len(lines(self.record)) > before
        assert self.driver.process.poll() is None, f"it ended by itself:\n{self.log.read_text()[-2000:]}"
        happened = "it trains" if trained else "it starts"
        self.kill_driver(f"as {happened}")
        self.kills[happened] += 1
        self.journals.append(journal(self.path))


def main() -> int:
    """Play it; 0 if all came as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--keep", type=Path, help="leave the experiment and the drivers' output in this new directory")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        return play(Killed(options.keep.resolve(), Random(options.seed)), options.kills)
    with tempfile.TemporaryDirectory(prefix="dray-kills-") as directory:
        return play(Killed(Path(directory), Random(options.seed)), options.kills)


def play(it: Killed, kills: int) -> int:
    moments = ["it starts"] * (kills - kills // 2) + ["it trains"] * (kills // 2)
    it.rng.shuffle(moments)
    try:
        for when in moments:
            it.kill(when)
        return check(it, it.finish(600))
    finally:
        if it.driver is not None:
            it.driver.close()


def check(it: Killed, code: int) -> int:
    """Print what came of it."""
    import dray

    result, records = dray.Result(it.path), journal(it.path)
    config = load_config(it.path / "experiment.yaml")
    search = build_search(config, lambda record: None, records=records)  # raises where a decision is another one
    trials, over = result.trials, ends(it.path)
    space = build_space(config)
    seed = config.reproducibility.experiment_seed
    drawn = {n: space.sample(Random(f"{seed}:{n}")) for n in range(TRIAL_COUNT)}
    others = [view.id for view in search.trials.values() if view.hparams != drawn[view.id]]
    lost = [n for n, then in enumerate(it.journals) if records[: len(then)] != then]
    wrong, ranked = decisions(records)
    unheard = [known for known in answered(it) if known not in ranked]
    rows = result.metrics.query("kind == 'validation' and name == 'validation_loss'")
    measured = {(row.trial_id, row.batches): row.value for row in rows.itertuples()}
    unlike = [key for key, value in ranked.items() if measured.get((key[0], key[1] * EPOCH)) != value]
    went_on = [it.went_on(cut) for cut in it.cuts]
    facts = [
        (code == 0, f"exit code {code}"),
        (True, f"kills: {it.kills['it starts']} while it started, {it.kills['it trains']} while it trained"),
        (sorted(search.trials) == list(range(TRIAL_COUNT)), f"{len(search.trials)} trials"),
        (not others, f"{len(others)} trials whose hyperparameters are not those of an undisturbed search"),
        (over == dict.fromkeys(range(TRIAL_COUNT), 1), f"{len(over)} trials ended, each once by the journal"),
        (not lost, f"{len(lost)} kills after which the journal had lost or changed a record"),
        (search.done is not None, f"the journal replays to the end, {len(records)} records"),
        (not wrong, f"{len(ranked)} decisions at rungs, {len(wrong)} other than the rule's on the journal's values"),
        (not unheard, f"{len(unheard)} results that a trial had an answer to are not in the journal"),
        (not unlike, f"{len(unlike)} results in the journal differ from the metrics"),
        (all(holds for holds, _ in went_on), f"{sum(holds for holds, _ in went_on)} of {len(went_on)} trials that were "
         "cut off went on from their latest checkpoints"),
        (trials["restarts"].eq(0).all(), f"{trials['restarts'].sum()} restarts counted: a driver's death is none"),
        (not it.left, f"processes that outlived their driver by 30 s: {', '.join(it.left) or 'none'}"),
        (set(trials["batches"]) <= {rung * EPOCH for rung in RUNGS}, f"lengths: {sorted(set(trials['batches']))}"),
    ]  # fmt: skip
    for holds, told in facts:
        print(f"  {'ok  ' if holds else 'FAIL'} {told}")
    for told in [told for holds, told in went_on if not holds]:
        print(f"       {told}")
    return 0 if all(holds for holds, _ in facts) else 1


def decisions(records: list[dict]) -> tuple[list[dict], dict[tuple[int, float], float]]:
    """Records whose decision is not that of the rule, computed anew; and every ranked value by trial and rung."""
    seen: dict[float, list[float]] = {}
    ranked: dict[tuple[int, float], float] = {}
    wrong = []
    for record in records:
        if record["event"] != "reported" or record["step"] not in RUNGS or (record["trial"], record["step"]) in ranked:
            continue
        ranked[record["trial"], record["step"]] = record["value"]
        if record["step"] == RUNGS[-1]:
            continue
        rung = seen.setdefault(record["step"], [])
        better = sum(value < record["value"] for value in rung)
        rung.append(record["value"])
        stopped = any(action["action"] == "stop" for action in record["actions"])
        if stopped != (better >= max(len(rung) // DIVISOR, 1)):
            wrong.append(record)
    return wrong, ranked


def answered(it: Killed) -> list[tuple[int, int]]:
    """Trial and rung of every report that a trial must have had an answer to: it has trained past it."""
    furthest = {trial: max((a.batches[-1] + 1 for a in mine if a.batches), default=0)
                for trial, mine in attempts(it.record).items()}  # fmt: skip
    return [(trial, rung) for trial, batches in furthest.items() for rung in RUNGS if batches > rung * EPOCH]


if __name__ == "__main__":
    sys.exit(main())
