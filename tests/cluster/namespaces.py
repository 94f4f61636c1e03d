"""Clusters that tests have for themselves, in private namespaces: what starts or ends one ends every Ray it can see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMESPACES = ["unshare", "--net", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]

# Its own /tmp/ray, and shared memory, too.
_PREPARE = "ip link set lo up && mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && mount -t tmpfs none /dev/shm"


def _possible() -> bool:
    return os.geteuid() == 0 and subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0


isolated = [
    pytest.mark.cluster,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(not _possible(), reason="needs root, and namespaces of its own"),
]
"""The marks of a test that uses `run_isolated`."""


def run_isolated(
    script: str | Path, *arguments: str | Path, home: Path, timeout: float = 900, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python script in namespaces of its own: no process, network, or shared memory of the machine is in sight.

    Args:
        home: its HOME; made if it is not there. Ray keeps its token and ssh keys there.
        environment: variables to add.
    """
    home.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [*NAMESPACES, "bash", "-c", f'{_PREPARE} && exec "$@"', "-", sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={
            # Without what Ray has set in this process for a cluster of its own, such as that it has a token.
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            **environment,
        },
    )
