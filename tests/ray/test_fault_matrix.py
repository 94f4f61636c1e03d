"""Each case of the fault matrix, once: what can die on one machine in `make test`, and of a cluster in `make test-all`.

`make soak` plays each ten times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import dray
from tests.ray.faults import ON_A_CLUSTER, ON_THIS_MACHINE, Play, config, faults_of, weights
from tests.ray.harness import journal

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def expected(digits_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """The weights that each trial ends with where nothing happens."""
    directory = tmp_path_factory.mktemp("undisturbed")
    undisturbed = config(directory / "record", trials=len(ON_THIS_MACHINE), pause_s=0.0)
    return weights(dray.Experiment(undisturbed, model_dir=digits_dir, path=directory / "experiment").run())


@pytest.mark.parametrize(
    ("cases", "on_a_cluster"),
    [
        pytest.param(ON_THIS_MACHINE, False, id="own"),
        pytest.param(ON_A_CLUSTER, True, id="of others", marks=pytest.mark.long),
    ],
)
def test_whatever_dies_every_trial_ends_once_with_the_weights_of_an_undisturbed_run(
    cases: Sequence[str], on_a_cluster: bool, expected: dict[int, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    with Play(tmp_path / "play", trials=len(cases), on_a_cluster=on_a_cluster) as play:
        result = play.run(cases, random.Random())
        print(*play.deaths, sep="\n")
    assert faults_of(result, expected) == []
    assert [death.case for death in play.deaths] == list(cases)
    assert play.left == []
    told = {record["trial"]: record["error"] for record in journal(result.path) if record["event"] == "restarted"}
    for case, rank in {"rank-0 worker": 0, "another worker": 1}.items():
        if case in cases:
            assert told[cases.index(case)].startswith(f"the process of rank {rank} of worker group "), (
                "not what the other said"
            )
