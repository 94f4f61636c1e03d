"""The fault matrix: what can die while a search runs, killed with -9, and what must come of it.

One experiment, of trials with two workers each, shuffled data and dropout, one trial at a time; some have models that
are sharded over the workers. In the middle of each trial something dies. At the end every trial must have ended once,
and its weights must be, bit for bit, those of the same experiment without a fault. `test_fault_matrix.py` plays each
case once, `bench/soak.py --matrix` many times.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

import dray
from tests.ray.harness import (
    DIGITS,
    OWN_CLUSTER,
    TRIALS,
    Driver,
    descendants,
    ends,
    latest_checkpoint,
    lines,
    wait_for,
    weights,
    write_config,
)

ON_THIS_MACHINE = ("rank-0 worker", "another worker", "whole group", "Tune handle", "driver")
"""What dies of an experiment that has a cluster of its own."""
OF_RANKS = ("rank-0 worker", "another worker", "rank that raises", "rank 0 saving", "another saving")
"""What one rank of a sharded trial does to it; the last two are killed while they write their shards."""
ON_A_CLUSTER = ("raylet alone", "node", "head")
"""What dies of a cluster that was there before: all its machines are this one."""
BATCHES = 60
SAVED_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What was killed, and what came of it."""

    case: str
    trial: int
    at: int  # the last batch that the trial trained before it
    resumed_at: int | None  # the first after it; None if there was none left
    # from the death to the next batch that the trial trained, also if it trained that before; None if it had none left
    recovered_s: float | None
    survivors: int  # batches that processes of the trial trained after the death beside their successors


def config(record: Path, trials: int, *, sharded: Collection[int] = (), pause_s: float = 0.02) -> dict[str, Any]:
    """Random search over the learning rate; every 10th batch is validated and saved.

    Args:
        sharded: the trials whose models are.
    """
    return {
        "name": "faults",
        "entrypoint": "recorded_digits:WithDropout",
        "hyperparameters": {
            "global_batch_size": 64,
            "hidden": 32,
            "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -2},
            "record": str(record),
            "pause_s": pause_s,
            "sharded": sorted(sharded),
        },
        "searcher": {
            "name": "random",
            "metric": "validation_loss",
            "max_length": {"batches": BATCHES},
            "max_trials": trials,
            "max_concurrent_trials": 1,
        },
        "resources": {"slots_per_trial": 2, "slot": "cpu"},
        "min_validation_period": {"batches": SAVED_EVERY},
        "min_checkpoint_period": {"batches": SAVED_EVERY},  # or only those better than all before, of any trial
        "reproducibility": {"experiment_seed": 11},
    }


class Play:
    """One experiment, and what is done to it.

    Args:
        directory: new, for everything.
        trials: so many.
        sharded: those whose models are.
        on_a_cluster: on nodes of a cluster that is there before.
        address: otherwise, of another one; by default the driver starts its own.
    """

    def __init__(
        self,
        directory: Path,
        *,
        trials: int,
        sharded: Collection[int] = (),
        on_a_cluster: bool = False,
        address: str = OWN_CLUSTER["RAY_ADDRESS"],
    ) -> None:
        self.path, self.record, self.log = directory / "experiment", directory / "record", directory / "output.txt"
        self._model = directory / "model"
        self._model.mkdir(parents=True)
        for file in (DIGITS / "model_def.py", TRIALS / "recorded.py", TRIALS / "recorded_digits.py"):
            shutil.copy(file, self._model)
        # Processes of a node that lost its raylet live on for about ten seconds: their trial should not end in these.
        pause_s = 0.3 if on_a_cluster else 0.02
        self._config = write_config(directory, config(self.record, trials, sharded=sharded, pause_s=pause_s))
        self.trials = trials
        self.deaths: list[Death] = []
        self.left: list[str] = []
        self._address = address
        self._cluster = _Nodes() if on_a_cluster else None
        self._driver: Driver | None = None

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_: object) -> None:
        if self._driver is not None:
            self._driver.close()
        if self._cluster is not None:
            self._cluster.close()

    def run(self, cases: Sequence[str] = (), rng: random.Random | None = None) -> dray.Result:
        """Play to the end; the first trials meet these cases, one each, at random batches."""
        rng = rng or random.Random(0)
        # A raylet's workers live on for a while; before a save that fails there is to be another.
        least = [SAVED_EVERY if "saving" in case else 1 for case in cases]
        most = [BATCHES // 4 if case == "raylet alone" else BATCHES - 5 for case in cases]
        at = [rng.randrange(*bounds) for bounds in zip(least, most, strict=True)]
        for trial in range(len(cases)):
            self._hold(trial, at[trial]).touch()
        self._start()
        for trial, case in enumerate(cases):
            self._kill(case, trial, at[trial])
        assert self._driver is not None
        code = self._driver.wait()
        assert code == 0, f"exit code {code}:\n{self.log.read_text()[-4000:]}"
        return dray.Result(self.path)

    def _start(self) -> None:
        made = self.path.exists()
        command = ("resume", self.path) if made else ("create", self._config, self._model, "--path", self.path)
        address = self._address if self._cluster is None else self._cluster.address
        self._driver = Driver(*command, log=self.log, RAY_ADDRESS=address)

    def _file(self, what: str, trial: int, number: int) -> Path:
        """That a trial looks for, see `recorded_digits.py`."""
        return Path(f"{self.record}.{what}.{trial}.{number}")

    def _hold(self, trial: int, at: int) -> Path:
        """While this file is there the trial waits, a few batches on: what is to die may not outlive it."""
        return self._file("hold", trial, at + 4)

    def _kill(self, case: str, trial: int, at: int) -> None:
        assert self._driver is not None
        if self._cluster is not None:
            self._cluster.have_spare()
        self._driver.wait_for(lambda: any(line.get("batch", -1) >= at for line in self._lines(trial)), f"trial {trial}")
        before = self._lines(trial)
        pids = {line["made"]: line["pid"] for line in before if "made" in line}
        match case:
            case "rank-0 worker" | "another worker":
                os.kill(pids[case == "another worker"], signal.SIGKILL)
            case "whole group":
                for pid in pids.values():
                    os.kill(pid, signal.SIGKILL)
            case "Tune handle":
                os.kill(self._process("ray::ResourceTr"), signal.SIGKILL)
            case "rank that raises":
                self._file("raise", trial, 1).touch()
            case "rank 0 saving" | "another saving":
                asked = self._file("save", trial, int(case == "another saving"))
                asked.touch()
            case "raylet alone" | "node":
                assert self._cluster is not None
                self._cluster.lose_node(workers=case == "node")
            case "head":
                assert self._cluster is not None
                self._cluster.lose_head()
        died = time.time()
        if case == "driver":
            self.left += self._driver.kill()
            self._start()
        self._hold(trial, at).unlink()
        if case in ("rank 0 saving", "another saving"):
            self._driver.wait_for(lambda: not asked.exists(), f"a checkpoint of trial {trial}")
            died, before = time.time(), self._lines(trial)
        if case == "head":
            assert self._cluster is not None
            # Ray would end it, after a minute.
            self._driver.wait_for(lambda: "does not answer" in self.log.read_text(), "a word on it")
            self._driver.kill()
            self._cluster = _Nodes()
            self._start()
        older = set(pids.values()) if case not in ("Tune handle", "rank that raises") else set()
        since = died
        if case == "rank that raises":  # its processes may go on with it
            made = self._driver.wait_for(
                lambda: [line for line in self._lines(trial) if "made" in line and line["time"] > died], "its restart"
            )
            since = made[0]["time"]
        self._driver.wait_for(
            lambda: self._after(trial, since, older) or trial in ends(self.path), f"{case}: trial {trial}"
        )
        after = self._after(trial, since, older)
        survivors = {line["batch"] for line in self._after(trial, died, set()) if line["pid"] in older}
        self.deaths.append(
            Death(
                case=case,
                trial=trial,
                at=max(line["batch"] for line in before if "batch" in line),
                resumed_at=after[0]["batch"] if after else None,
                recovered_s=after[0]["time"] - died if after else None,
                survivors=len(survivors),
            )
        )

    def _lines(self, trial: int) -> list[dict[str, Any]]:
        return [line for line in lines(self.record) if line["trial"] == trial]

    def _after(self, trial: int, died: float, older: set[int]) -> list[dict[str, Any]]:
        """The trial's batches after that time, by none of these processes."""
        mine = [line for line in self._lines(trial) if line.get("time", 0.0) > died and "batch" in line]
        return [line for line in mine if line["pid"] not in older]

    def _process(self, name: str) -> int:
        def found() -> list[int]:
            return [pid for pid, its in descendants(os.getpid()).items() if its.startswith(name)]

        return wait_for(found, name, 30)[-1]


class _Nodes:
    """A Ray cluster: a head without CPUs, and a node of two."""

    def __init__(self) -> None:
        # A node that does not answer is dead sooner than Ray has it, or its processes end the trial by themselves.
        settings = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 5000,  # a dead one refuses the connection at once; a busy one may be slow
            "health_check_failure_threshold": 2,
        }
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": settings},
        )
        self.address = str(self._cluster.address)
        self._nodes = [self._cluster.add_node(num_cpus=2)]

    def have_spare(self) -> None:
        """A node to go on with."""
        if len(self._nodes) < 2:
            self._nodes.append(self._cluster.add_node(num_cpus=2))

    def lose_node(self, *, workers: bool) -> None:
        """The node that the trial runs on: the one that was there first.

        Its workers die with it, or live on for as long as they like.
        """
        raylet = self._nodes.pop(0).all_processes["raylet"][0].process.pid
        family = list(descendants(raylet)) if workers else []
        for pid in (raylet, *family):
            os.kill(pid, signal.SIGKILL)

    def lose_head(self) -> None:
        """All of the cluster with it."""
        for node in (self._cluster.head_node, *self._nodes):
            pids = [each.process.pid for some in node.all_processes.values() for each in some]
            for pid in {*pids, *(child for parent in pids for child in descendants(parent))}:
                os.kill(pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def weights_of(result: dray.Result) -> dict[int, dict[str, torch.Tensor]]:
    """The model that each trial ended with."""
    found = {}
    for trial in result.trials["trial_id"]:
        checkpoint = latest_checkpoint(result.path / f"trial_{trial}")
        assert checkpoint is not None
        assert checkpoint.name == f"checkpoint_{BATCHES}"
        found[int(trial)] = weights(checkpoint)
    return found


def faults_of(result: dray.Result, expected: dict[int, dict[str, torch.Tensor]]) -> list[str]:
    """What is not as it has to be; empty if all is."""
    wrong, trials = [], len(result.trials)
    states = result.trials["state"].value_counts().to_dict()
    if states != {"COMPLETED": trials}:
        wrong.append(f"states of {trials} trials: {states}")
    if ends(result.path) != dict.fromkeys(range(trials), 1):
        wrong.append(f"ends by the journal: {dict(ends(result.path))}")
    for trial, mine in weights_of(result).items():
        other = [name for name, value in mine.items() if not torch.equal(value, expected[trial][name])]
        if other:
            wrong.append(f"trial {trial}: {', '.join(other)} differ from those of the run without a fault")
    return wrong
