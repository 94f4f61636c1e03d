"""The end of a trial that has left its group before its last checkpoint was written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dray import pytorch
from dray.leases.messages import Departure
from dray.worker import trial
from dray.worker.behind import Behind
from dray.worker.log.trial_log import TrialLog
from tests.workers import SETTINGS, connected, experiment_spec, lease_in


def test_a_rank_that_learns_late_that_all_is_written_leaves_the_files_of_the_trials_next_lease_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, ranks, place = connected(object()), SimpleNamespace(rank=1, size=2), SimpleNamespace()
    downloads = [tmp_path / f".opened-{lease}" for lease in (1, 2)]
    behind = Behind(desk)

    def leaves(*_: object) -> Departure:
        downloads[0].mkdir()
        behind.take(lambda: None, 0, goes_on=True)
        return Departure(outcome="writing")

    monkeypatch.setattr(trial, "_run", leaves)
    given: Any = pytorch.PyTorchTrial, None, lease_in(tmp_path), desk, desk, experiment_spec(SETTINGS), ranks, place
    trial.run_logged(*given, TrialLog(tmp_path / "rank_1.log", -1), behind=behind)
    downloads[1].mkdir()
    assert behind.complete is not None
    behind.complete()
    assert [each.exists() for each in downloads] == [False, True]


def test_the_desk_learns_of_an_end_that_its_log_could_not_take() -> None:
    left: list[Departure] = []
    behind = Behind(connected(SimpleNamespace(leave=lambda lease, rank, departure: left.append(departure))))
    behind.begin(7, 0)

    def complete() -> Departure:
        raise BrokenPipeError("the writer was killed")

    behind.complete = complete
    behind.start()
    behind.wait()
    assert [(each.outcome, each.failure and each.failure.kind) for each in left] == [("errored", "error")]
