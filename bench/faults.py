"""asha.yaml under kill -9: of a worker once, of the driver five times, each of these followed by `resume`.

Twice the driver is killed while everything starts, three times in the middle, and the worker in the middle of a trial.
The trials are those of asha.yaml; they also note each batch in a file, and sleep for a moment in it, so that there is a
middle. Prints what was done and what came of it; exits with 1 if something did not come as it should.

    python bench/faults.py [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.ray.harness import (  # noqa: E402
    DIGITS,
    TRIALS,
    Attempt,
    Driver,
    attempts,
    ends,
    in_the_middle,
    journal,
    saved_batches,
    wait_for,
    write_config,
)

PAUSE_S = 0.01
TRIAL_COUNT = 64
MIDDLES = (6, 30, 45)
"""How many trials have ended when the driver is killed in the middle."""
WORKER_AFTER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A trial that was interrupted.

    Attributes:
        attempt: what its process had trained.
        number: of its attempts until then.
        saved: batches of its latest whole checkpoint, 0 without one.
    """

    attempt: Attempt
    number: int
    saved: int


class Play:
    """One experiment and what is done to it."""

    def __init__(self, directory: Path) -> None:
        self.path, self.record, self.log = directory / "experiment", directory / "record", directory / "output.txt"
        self.code = directory / "model"
        self.code.mkdir()
        for file in (DIGITS / "model_def.py", TRIALS / "recorded.py", TRIALS / "recorded_digits.py"):
            shutil.copy(file, self.code)
        config = yaml.safe_load((DIGITS / "asha.yaml").read_text())
        config["entrypoint"] = "recorded_digits:RecordedDigits"
        config["hyperparameters"] |= {"record": str(self.record), "pause_s": PAUSE_S}
        self.config = write_config(directory, config)
        self.cuts: list[Cut] = []
        self.left: list[str] = []
        self.driver: Driver | None = None
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def start(self) -> None:
        """Create the experiment, or resume it."""
        command = (
            ("resume", self.path) if self.path.exists() else ("create", self.config, self.code, "--path", self.path)
        )
        self.driver = Driver(*command, log=self.log)
        self.say(f"dray experiment {command[0]} (process {self.driver.process.pid})")

    def finish(self, within_s: float) -> int:
        """Start the last driver, which nobody kills: its exit code."""
        self.start()
        assert self.driver is not None
        code = self.driver.wait(within_s)
        self.say(f"the last driver ended with exit code {code}")
        return code

    def wait(self, condition: Callable[[], object], what: str) -> None:
        assert self.driver is not None
        self.driver.wait_for(condition, what)

    def middle(self, ended: int) -> None:
        """Wait until so many trials have ended, and one that has a checkpoint is some batches past it."""
        self.wait(lambda: len(ends(self.path)) >= ended and in_the_middle(self.path, self.record), f"{ended} ends")

    def kill_driver(self, when: str) -> None:
        assert self.driver is not None
        self.left += self.driver.kill()
        over = ends(self.path)
        told = []
        for trial, mine in attempts(self.record).items():
            if trial not in over and mine[-1].batches:
                cut = Cut(attempt=mine[-1], number=len(mine), saved=saved_batches(self.path, trial))
                self.cuts.append(cut)
                told.append(f"trial {trial} got to batch {mine[-1].batches[-1] + 1}, saved at {cut.saved}")
        self.say(f"kill -9 of the driver, {when}: {len(over)} trials had ended; {'; '.join(told) or 'none ran'}")

    def kill_worker(self) -> None:
        victim = in_the_middle(self.path, self.record)[0]
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{victim.pid}/exe").exists(), "the worker's death", 5)
        mine = attempts(self.record)[victim.trial]
        cut = Cut(attempt=mine[-1], number=len(mine), saved=saved_batches(self.path, victim.trial))
        self.cuts.append(cut)
        self.say(
            f"kill -9 of worker {victim.pid}: trial {victim.trial} at batch {cut.attempt.batches[-1] + 1}, "
            f"saved at {cut.saved}"
        )

    def went_on(self, cut: Cut) -> tuple[bool, str]:
        """Whether the trial went on from its latest checkpoint: no batch before it trained again, none left out."""
        trial = cut.attempt.trial
        after = next((a for a in attempts(self.record)[trial][cut.number :] if a.batches), None)
        if after is None:  # its last checkpoint was its end
            states = {r["trial"]: r["reason"] for r in journal(self.path) if r["event"] == "exited"}
            return trial in states, f"trial {trial}: saved at {cut.saved}, {states.get(trial)} without another batch"
        return after.batches[
            0
        ] == cut.saved, f"trial {trial}: saved at {cut.saved}, went on with batch {after.batches[0]}"


def main() -> int:
    """Play it; 0 if all came as it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="leave the experiment and the drivers' output in this new directory")
    keep: Path | None = parser.parse_args().keep
    if keep is not None:
        keep.mkdir(parents=True)
        return play(Play(keep.resolve()))
    with tempfile.TemporaryDirectory(prefix="dray-faults-") as directory:
        return play(Play(Path(directory)))


def play(it: Play) -> int:
    try:
        it.start()
        it.wait(lambda: journal(it.path), "the start")
        time.sleep(1.5)
        it.kill_driver("as Ray starts")
        it.start()
        time.sleep(9)
        it.kill_driver("as the first worker group starts")
        for number, ended in enumerate(MIDDLES):
            it.start()
            if number == 1:
                it.middle(WORKER_AFTER)
                it.kill_worker()
            it.middle(ended)
            it.kill_driver("in the middle")
        return check(it, it.finish(300))
    finally:
        if it.driver is not None:
            it.driver.close()


def check(it: Play, code: int) -> int:
    """Print what came of it."""
    import dray

    result = dray.Result(it.path)
    trials, over = result.trials, ends(it.path)
    finished = {trial: sum(a.batches[-1:] == (int(n) - 1,) for a in attempts(it.record)[trial])
                for trial, n in trials.set_index("trial_id")["batches"].items()}  # fmt: skip
    repeated = [t for t, count in finished.items() if count != 1 and not any(c.attempt.trial == t for c in it.cuts)]
    went_on = [it.went_on(cut) for cut in it.cuts]
    restarts = [record for record in journal(it.path) if record["event"] == "restarted"]
    facts = [
        (code == 0, f"exit code {code}"),
        (len(trials) == TRIAL_COUNT, f"{len(trials)} trials: {trials['state'].value_counts().to_dict()}"),
        (set(over.values()) == {1} and len(over) == TRIAL_COUNT, f"{len(over)} trials ended, each once by the journal"),
        (not repeated, f"{len(repeated)} uninterrupted trials were trained to the end other than once"),
        (
            any(cut.saved for cut in it.cuts),
            f"{sum(c.saved > 0 for c in it.cuts)} of {len(it.cuts)} cuts had a checkpoint",
        ),
        *went_on,
        (len(restarts) == 1, f"{len(restarts)} restart counted, for the worker that was killed"),
        (not it.left, f"processes that outlived their driver by 30 s: {', '.join(it.left) or 'none'}"),
        (set(trials["batches"]) <= {23, 92, 368}, f"lengths in batches: {sorted(set(trials['batches']))}"),
    ]
    for holds, told in facts:
        print(f"  {'ok  ' if holds else 'FAIL'} {told}")
    best = result.best_trial
    print(f"best: trial {best.trial_id}, validation_loss {best.metric:.4f} after {best.batches} batches")
    return 0 if all(holds for holds, _ in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
