"""What test_two_machines.py runs in namespaces of its own: `python two_machines.py <directory>`.

Two machines, and this one at which a person sits; clusters/local.yaml, with what is marked there filled in: `ray up`,
the example's search, a trial with a worker on each machine, `ray down`. What came of it is in <directory>/seen.json.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster.hosts import make_network
from tests.cluster.machines import USER, Machine
from tests.cluster.namespaces import ROOT
from tests.ray.harness import DIGITS

BESIDE = Path(__file__).parent


def fill_in(directory: Path, code: Path, head: Machine, worker: Machine) -> Path:
    places = {
        "FILL_IN_HEAD": head.address,
        "FILL_IN_WORKER": worker.address,
        "FILL_IN_USER": USER,
        "FILL_IN_KEY": str(head.key),
        "~/code: examples/digits": f"~/code: {code}",
    }
    text = (ROOT / "clusters" / "local.yaml").read_text()
    for place, filling in places.items():
        assert text.count(place) == 1, f"clusters/local.yaml has {place} {text.count(place)} times"
        text = text.replace(place, filling)
    assert "FILL_IN" not in text
    (filled := directory / "local.yaml").write_text(text)
    return filled


def running(machine: Machine) -> str:
    """What of Ray runs there; nothing: ""."""
    return machine.ssh("pgrep -fa 'raylet|gcs_server|ray::'").stdout


def main(directory: Path) -> None:
    seen: dict[str, Any] = {"took": {}}
    (directory / "results").mkdir()
    code = directory / "code"
    shutil.copytree(DIGITS, code)
    shutil.copy(BESIDE / "spread.py", code)
    (code / "words.txt").write_text("brought")
    subprocess.run(["ray", "get-auth-token", "--generate"], check=True, capture_output=True)
    Path("~/.ray/auth_token").expanduser().chmod(0o600)
    make_network()
    one, two = Machine("one", "10.77.0.2", directory), Machine("two", "10.77.0.3", directory)
    cluster = fill_in(directory, code, one, two)

    def ray(command: str, option: str, *arguments: str | Path) -> str:
        """`ray <command> local.yaml ...`; what it printed."""
        began = time.monotonic()
        ran = subprocess.run(
            ["ray", command, option, cluster, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            timeout=400,
        )
        assert ran.returncode == 0, f"ray {command}: {ran.returncode}\n{ran.stdout}"
        seen["took"][" ".join([command, *(Path(argument).name for argument in arguments[:1])])] = (
            time.monotonic() - began
        )
        return ran.stdout

    ray("up", "-y", "--no-config-cache")
    seen["printed"] = ray("submit", "--no-config-cache", DIGITS / "driver.py")
    # Ray's launcher has brought it there too; this machine is to have it from dray.
    assert two.ssh("rm -r ~/code").returncode == 0
    ray("submit", "--no-config-cache", BESIDE / "spread_driver.py")
    seen["before"] = running(one)
    ray("down", "-y")
    seen["after"] = running(one)
    (directory / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
