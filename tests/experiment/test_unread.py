"""Hyperparameters that are searched, but that no trial has read: noted in the trial, told once, kept in the journal."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import dray
from dray import core, pytorch
from dray.config.load import load_config
from dray.desk.effects import Say
from dray.desk.messages import DeskReport
from dray.experiment.effects import Append
from dray.experiment.local import run_local
from dray.experiment.unread import UnreadHparams
from dray.hosts import use_host
from dray.training import cluster_info
from dray.training.cluster_info import use_cluster_info
from searchers.space import parse
from tests.experiment.test_driver import Scene
from tests.experiment.test_local import CONFIG, TRIAL
from tests.pytorch.fakes import FakeHost

RANGE = {"type": "double", "minval": 0.0, "maxval": 1.0}
SPACE = parse(
    {"lr": RANGE, "dropuot": RANGE, "hidden": 64, "global_batch_size": RANGE, "sgd": {"momentum": RANGE}}
).root
DRAWN = {"lr": 0.1, "dropuot": 0.5, "hidden": 64, "global_batch_size": 8, "sgd": {"momentum": 0.9}}
INFO = core.ClusterInfo(trial=core.TrialInfo(trial_id=0, experiment_id=0, trial_seed=0, hparams=DRAWN))


def test_only_searched_names_that_no_trial_has_read_are_unread() -> None:
    unread = UnreadHparams(())
    first = unread.add(SPACE, DRAWN, ["hidden", "lr"])
    assert first == {
        "event": "unread",
        "unread": ["dropuot", "sgd.momentum"],
        "read": ["hidden", "lr"],
    }
    assert unread.add(SPACE, DRAWN, ["lr"]) is None, "nothing new"
    second = UnreadHparams([first]).add(SPACE, DRAWN, ["sgd"])  # by another driver
    assert second is not None
    assert second["unread"] == ["dropuot"]
    last = unread.add(SPACE, DRAWN, ["sgd", "dropuot"])
    assert last is not None
    assert last["unread"] == []
    assert UnreadHparams(()).add(SPACE, DRAWN, list(DRAWN)) is None, "a program that reads all"
    branch = {name: value for name, value in DRAWN.items() if name != "dropuot"}
    assert UnreadHparams(()).add(SPACE, branch, ["lr", "sgd"]) is None, "what is not drawn can't be read"


@pytest.mark.parametrize(
    ("reads", "found"),
    [
        (lambda context: context.get_hparam("lr"), ["lr"]),
        (lambda context: [context.get_hparam(name) for name in ("sgd", "lr")], ["sgd", "lr"]),
        (lambda context: context.get_hparams(), None),
        (lambda context: [context.get_hparams()["lr"], context.get_hparam("lr")], None),
        (lambda context: dray.get_cluster_info(), None),
        (lambda context: context.get_per_slot_batch_size(), []),
    ],
)
def test_the_context_notes_what_is_read_and_that_all_may_be(
    tmp_path: Path, reads: Any, found: list[str] | None
) -> None:
    with use_cluster_info(INFO), use_host(FakeHost(tmp_path)), pytorch.init() as context:
        reads(context)
        noted = cluster_info.hparams_read
        assert (None if noted is None else list(noted)) == found
    assert cluster_info.hparams_read is None


def test_a_driver_tells_it_once_and_records_what_changes() -> None:
    scene = Scene()
    for lease, trial in ((1, 0), (2, 1)):
        scene.grant(lease, trial)
    scene.take(Append)
    for lease, read in ((1, None), (1, ()), (2, ()), (2, ("lr", "other"))):
        scene.driver.report("call", lease, DeskReport(read=read), False)
    assert scene.take(Say) == [Say("warning: lr is searched, but no trial has read it; read: none")]
    records = [each.record for each in scene.take(Append)]
    assert [(each["unread"], each["read"]) for each in records] == [(["lr"], []), ([], ["lr"])]
    again = Scene(scene.journal)
    again.grant(3, 0)
    again.driver.report("call", 3, DeskReport(read=()), False)
    assert again.take(Say) == []


@pytest.mark.parametrize("name", ["lr", "dropuot"])
def test_a_local_run_tells_it(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_weight.py").write_text(TRIAL)
    hparams = {**CONFIG["hyperparameters"], name: {"type": "double", "minval": 0.05, "maxval": 0.2}}
    with caplog.at_level(logging.WARNING):
        run_local(load_config({**CONFIG, "hyperparameters": hparams}), tmp_path / "code", path=tmp_path / "run")
    line = "dropuot is searched, but no trial has read it; read: lr"
    assert (line in caplog.text) == (name == "dropuot")
