"""Process groups that a trial makes end with it, or the process is replaced; those that dray keeps stay."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dray.core import DistributedContext
from dray.desk.messages import Departure
from dray.training.parallel import ddp
from dray.worker import serve
from dray.worker.isolation.leaks import group_names
from dray.worker.isolation.snapshot import ProcessSnapshot
from dray.worker.ranks import Place
from tests.core.test_distributed import nodes
from tests.worker.test_worker import Desk
from tests.workers import connected, worker_spec

Run = Callable[..., tuple[Any, list[str]]]


@pytest.fixture
def run(group: None) -> Run:
    """Run a trial on the only rank of a process group."""
    return ProcessSnapshot().run


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def use_mesh() -> None:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    group: Any = dist.new_group([0])
    mesh = DeviceMesh.from_group(group, "cpu")
    tensor = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
    dist.all_reduce((tensor @ tensor).full_tensor(), group=group)


def test_groups_of_trials_end_with_them(run: Run) -> None:
    assert run(use_mesh) == (None, [])  # this imports and connects for the first time
    before = descriptors()
    for _ in range(3):
        assert run(use_mesh) == (None, [])
    assert len(group_names()) == 1
    assert descriptors() <= before


def test_a_group_that_the_next_trial_would_find_is_a_reason_for_a_new_process(run: Run) -> None:
    kept: list[Any] = []
    _, [reason] = run(lambda: kept.append(dist.new_group([0])))
    assert reason == "1 process group that its trial made can't be freed"
    assert run(lambda: None) == (None, []), "it has ended"


def test_groups_that_a_failed_trial_leaves_are_a_reason_and_stay(run: Run) -> None:
    def trial() -> str:
        dist.new_group([0])
        return "failed"

    _, [reason] = run(trial, lambda result: result == "failed")
    assert reason == "its failed trial has left 1 process group"
    assert len(group_names()) == 2


def test_the_groups_that_dray_keeps_stay(run: Run) -> None:
    def total() -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones, group=ddp.gradients_group().group)
        return ones.item()

    assert [run(total) for _ in range(2)] == [(1.0, [])] * 2
    assert len(group_names()) == 2


def test_a_rank_names_groups_as_the_others_do_although_it_left_the_trial_before_with_fewer(
    run: Run, tmp_path: Path
) -> None:
    """Ranks find each other by the name."""

    def name_after(made: int) -> str:
        trials: list[list[str]] = []

        def trial(*_: object, is_reused: bool) -> Departure:
            trials.append([dist.new_group([0]).group_name for _ in range(1 if trials else made)])
            return Departure(outcome="invalid_hp")

        spec = worker_spec(None, SimpleNamespace(reuse_workers=True, secrets=[], collective_timeout_s=60))
        loaded = serve.Loaded(spec.experiment, type("Trial", (), {}), None)
        peers: Any = SimpleNamespace(close=lambda: None)
        rank = DistributedContext(**nodes(2)[0], transport=peers)
        given = spec, connected(Desk(tmp_path)), loaded, rank, Place("a", "1"), ProcessSnapshot()
        serve.serve_joined(*given, run_trial=trial)
        return trials[1][0]

    assert name_after(0) == name_after(2)
