"""What can die of a search on a real Ray, and when: each cell once in `make test-all`, with `make soak` ten times.

| what dies | as it trains | as it saves | as an experiment of a server |
|---|---|---|---|
| rank 0's worker, another's, all of a group | here | here, one rank | |
| an error of one rank | here, `test_programs.py` | | |
| the Tune handle, the driver | here | | `test_server.py`: its process |
| a raylet alone, a node, the head | here | | `test_server.py`: the server's Ray |
| the server | | | `test_server.py` |
| a node that is taken away, or joins, of an elastic trial | `test_elastic.py` | | |
| a trial on a shared slot that runs out of memory | `test_sharing.py` | | |
| a rank that hangs, alone or in a collective | `test_entrypoint_bugs.py`; NCCL: `bench/on_gpu` | | |
| SIGTERM, SIGHUP, the experiment's directory | `test_interrupt.py` | | |

What Ray has no part in is shown by `tests/simulation` alone, with whatever else may happen before and after: lost
connections, partitions, full disks, damaged checkpoints, stores that are away, drivers that were taken for dead.

`make test` has kills of a worker in `test_core_api.py`, of a driver and of the server in `test_server.py`, and of a
rank that writes its shards in tests/pytorch/test_sharded_ranks.py.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

import dray
from tests.ray.faults import OF_RANKS, ON_A_CLUSTER, ON_THIS_MACHINE, SAVED_EVERY, Play, config, faults_of, weights_of
from tests.ray.harness import journal

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.usefixtures("ray_is_up"),
    pytest.mark.timeout(600),
]

RANKS = {"rank-0 worker": 0, "another worker": 1, "rank 0 saving": 0, "another saving": 1}
"""The rank that is killed, by the case."""


@pytest.mark.parametrize(
    ("cases", "sharded", "where"),
    [
        pytest.param(ON_THIS_MACHINE, {}, "own", id="own"),
        pytest.param(ON_A_CLUSTER, {}, "nodes", id="of others"),
        pytest.param(OF_RANKS, range(len(OF_RANKS)), "shared", id="shared, sharded"),
        pytest.param(ON_A_CLUSTER, range(len(ON_A_CLUSTER)), "nodes", id="of others, sharded"),
    ],
)
def test_whatever_dies_trials_end_once_with_undisturbed_weights(
    cases: Sequence[str], sharded: Collection[int], where: str, digits_dir: Path, shared_cluster: str, tmp_path: Path
) -> None:
    trials = len(cases)
    undisturbed = config(tmp_path / "undisturbed", trials, sharded=sharded, pause_s=0.0)
    expected = weights_of(dray.Experiment(undisturbed, model_dir=digits_dir, path=tmp_path / "experiment").run())
    address = {"address": shared_cluster} if where == "shared" else {}
    with Play(tmp_path / "play", trials=trials, sharded=sharded, on_a_cluster=where == "nodes", **address) as play:
        result = play.run(cases, random.Random(7))
        print(*play.deaths, sep="\n")
    assert faults_of(result, expected) == []
    assert [death.case for death in play.deaths] == list(cases)
    assert play.left == []
    told = {record["trial"]: record["error"] for record in journal(result.path) if record["event"] == "restarted"}
    for trial, death in enumerate(play.deaths):
        if (rank := RANKS.get(death.case)) is not None:
            assert told[trial].startswith(f"the process of rank {rank} of worker group "), "not what the other said"
        if "saving" in death.case:
            assert death.resumed_at == (death.at + 1) // SAVED_EVERY * SAVED_EVERY - SAVED_EVERY, "the one before"
