"""An elastic trial on a cluster with an autoscaler: it asks for a node, gets it, uses it, and leaves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray import autoscaled
from tests.ray.harness import ROOT, lines

NAMESPACES = ["unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode != 0,
        reason="needs root, and namespaces: what starts such a cluster ends every Ray that it can see",
    ),
]


def test_an_elastic_trial_is_what_an_autoscaler_starts_a_node_for(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    # Its own /tmp/ray, and shared memory, too.
    prepare = "ip link set lo up && mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && mount -t tmpfs none /dev/shm"
    ran = subprocess.run(
        [*NAMESPACES, "bash", "-c", f'{prepare} && exec "$@"', "-", sys.executable, autoscaled.__file__, tmp_path],
        capture_output=True,
        text=True,
        timeout=500,
        env={
            **os.environ,
            "HOME": str(tmp_path / "home"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    seen = json.loads((tmp_path / "seen.json").read_text())
    print(f"another node {seen['node_after_s']:.1f} s after the experiment's start")
    assert seen["trials"] == [["COMPLETED", 0]]
    assert [line["size"] for line in lines(tmp_path / "record")][-1] == 2
    assert seen["nodes"] == 1, "and nothing holds the other any more"
