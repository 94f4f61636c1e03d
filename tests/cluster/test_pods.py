"""A search as a RayJob of clusters/kuberay.yaml: suspended and deleted in the middle, it continues in other pods."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest

from tests.cluster import pods
from tests.cluster.namespaces import isolated, run_isolated
from tests.ray.harness import attempts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *isolated]


def test_a_suspended_and_deleted_job_trains_each_batch_exactly_once(tmp_path: Path) -> None:
    ran = run_isolated(pods.__file__, tmp_path, home=tmp_path / "home")
    assert ran.returncode == 0, f"{ran.stdout[-9000:]}\n{ran.stderr[-9000:]}"
    seen = json.loads((tmp_path / "seen.json").read_text())
    for name, end in seen["ends"].items():
        print(f"{name}: the hook took {end['hook_s']:.1f} s, all {end['took_s']:.1f} s")
        assert not end["killed"], f"{name}: {end}"
    assert len(seen["ends"]) == 6
    # At each end, all that was trained was saved.
    assert seen["saved"] == seen["trained"]
    first, second = seen["saved"]
    assert all(0 < before < pods.BATCHES for before in first)
    assert all(before <= after for before, after in zip(first, second, strict=True))
    assert sum(first) < sum(second) < pods.TRIAL_COUNT * pods.BATCHES  # one of the trials may have completed

    assert seen["status"] == "SUCCEEDED", seen["log"]
    found = attempts(tmp_path / "record")
    assert set(found) == set(range(pods.TRIAL_COUNT)), "no trial is lost, and none is new"
    for mine in found.values():
        assert list(chain.from_iterable(each.batches for each in mine)) == list(range(pods.BATCHES))
        assert len(mine) > 1
