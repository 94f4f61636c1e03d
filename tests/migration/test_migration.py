"""Model directories written for Determined, unmodified: with Determined 0.38.1, and with dray on 1 and on 2 slots.

`golden/` has the losses of Determined, so that dray's are compared with them where Determined is not installed, and
perhaps on other processors; `make test-determined` runs both, side by side, on the same machine.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dray
from dray.cli import main as command
from tests.forks.process import ROOT, Forked
from tests.migration.models import HERE, MODELS
from tests.migration.real import PYTHON, planned, run, trials
from tests.migration.told import KINDS, Told, difference, with_dray
from tests.ray.harness import descendants

SAME_MACHINE = 1e-6
"""Relative, in single precision: the last digit. Only means over the processes of two slots are rounded differently."""
OTHER_MACHINE = 2e-3
"""Relative: 24 to 50 steps with other kernels; a wrong order of batches, seed or rate is a hundred times as far off."""

TAKES_AT_MOST_S = 1200
"""All the experiments of a test, one after another; ten seconds each where nothing else runs."""

BOTH = [(name, slots) for name in MODELS for slots in (1, 2)]
#: A launcher's script on two slots: what `make test` has time for.
SOME = [("launched_script", 2)]


# ------------------------------------------------------------------------------------------------------ as they are
@pytest.mark.api("10.3")
@pytest.mark.parametrize("name", MODELS)
def test_model_directory_knows_determined_and_not_dray(name: str) -> None:
    imported = set()
    for file in MODELS[name].directory.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    assert "determined" in imported
    assert not {"dray", "ray", "searchers"} & imported


@pytest.mark.parametrize("name", MODELS)
def test_goldens_are_of_the_trials_that_the_search_begins(name: str) -> None:
    for slots in (1, 2):
        recorded = {trial: (told["hparams"], told["seed"]) for trial, told in golden(name, slots).items()}
        assert recorded == planned(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_migrate_finds_nothing_to_change(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["migrate", str(MODELS[name].directory)])
    assert not ended.value.code
    assert ": 0 to change, " in capsys.readouterr().out.splitlines()[-1]


# -------------------------------------------------------------------------------------------------- dray, with goldens
Drive = Callable[[list[tuple[str, int]]], Path]


@pytest.fixture(scope="module")
def drive(shared_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drive]:
    """Run experiments with `drive.py`; where they are stored."""
    started: list[Forked] = []

    @functools.cache
    def start(wanted: tuple[tuple[str, int], ...]) -> Path:
        root = tmp_path_factory.mktemp("experiments")
        with (root / "output.txt").open("w") as output:
            program = [str(HERE / "drive.py"), str(root), *(f"{name}:{n}" for name, n in wanted)]
            environment = {**os.environ, "RAY_ADDRESS": shared_cluster, "PYTHONPATH": str(ROOT)}
            started.append(Forked(*program, environment=environment, directory=ROOT, output=output.fileno()))
            output.write(started[-1].communicate(TAKES_AT_MOST_S)[1])
        return root

    yield lambda wanted: start(tuple(wanted))
    for process in started:
        if process.returncode is None:
            family = [process.pid, *descendants(process.pid)]
            for pid in family:
                os.kill(pid, signal.SIGKILL)


def golden(name: str, slots: int) -> dict[int, dict[str, Any]]:
    recorded = json.loads(MODELS[name].golden.read_text())["slots"][str(slots)]
    return {int(trial): {**told, "hparams": json.loads(told["hparams"])} for trial, told in recorded.items()}


def compare_with_golden(root: Path, name: str, slots: int) -> None:
    path = root / f"{name}-{slots}"
    assert (path / "journal.jsonl").exists(), (root / "output.txt").read_text()
    expected = golden(name, slots)
    assert_ended_well(path, root)
    for trial, (hparams, seed) in trials(path).items():
        assert (hparams, seed) == (expected[trial]["hparams"], expected[trial]["seed"]), (
            "the goldens are of other trials"
        )
        assert_equal(with_dray(path, trial), Told.of_json(expected[trial]), OTHER_MACHINE)


def assert_ended_well(path: Path, root: Path) -> None:
    table = dray.Result(path).trials
    ended = (root / "output.txt").read_text()
    assert set(table["state"]) <= {"COMPLETED", "PRUNED"}, ended
    assert "COMPLETED" in set(table["state"]), ended


def assert_equal(mine: Told, theirs: Told, tolerance: float) -> None:
    """As far as the search let dray's trial train."""
    assert len(mine.batches) >= 12, "the first rung"
    assert mine.batches.keys() <= theirs.batches.keys()
    for kind in KINDS:
        assert difference(getattr(mine, kind), getattr(theirs, kind)) <= tolerance, kind


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(TAKES_AT_MOST_S + 60)
@pytest.mark.api("10.3")
@pytest.mark.parametrize(("name", "slots"), SOME)
def test_losses_are_those_of_determined(drive: Drive, name: str, slots: int) -> None:
    compare_with_golden(drive(SOME), name, slots)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(TAKES_AT_MOST_S + 60)
@pytest.mark.parametrize(("name", "slots"), [each for each in BOTH if each not in SOME])
def test_losses_of_the_others_are_those_of_determined(drive: Drive, name: str, slots: int) -> None:
    compare_with_golden(drive([each for each in BOTH if each not in SOME]), name, slots)


# ----------------------------------------------------------------------------------------------- both, on one machine
@pytest.mark.determined
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(TAKES_AT_MOST_S + 600)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs Determined 0.38.1: make test-determined")
@pytest.mark.parametrize(("name", "slots"), BOTH)
def test_losses_equal_those_of_determined_here(drive: Drive, tmp_path: Path, name: str, slots: int) -> None:
    root = drive(BOTH)
    path = root / f"{name}-{slots}"
    assert_ended_well(path, root)
    for trial, (hparams, seed) in trials(path).items():
        scratch = tmp_path / str(trial)
        scratch.mkdir()
        theirs = Told.of_json(run(MODELS[name], hparams, seed, slots, scratch))
        assert_equal(with_dray(path, trial), theirs, SAME_MACHINE)
