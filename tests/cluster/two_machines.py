"""What test_two_machines.py runs in namespaces of its own: `python two_machines.py <scenario> <directory>`.

Machines, and this one at which a person sits; clusters/local.yaml, with what is marked there filled in. What came of it
is written to <directory>/seen.json.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cluster.machines import USER, Machine, Machines
from tests.cluster.namespaces import ROOT
from tests.ray.harness import DIGITS, wait_for

BESIDE = Path(__file__).parent
DRIVER = BESIDE / "spread_driver.py"
RESULTS = Path("/mnt/dray_results")
"""As in clusters/local.yaml: a directory that all machines have mounted."""


class Person:
    """Who types commands in the repository's root, about a cluster of two machines.

    Args:
        directory: for what belongs to this person alone.

    Attributes:
        took: seconds, by Ray's command.
    """

    def __init__(self, directory: Path) -> None:
        self.took: dict[str, float] = {}
        self._directory = directory
        self._cluster = directory / "local.yaml"
        code = directory / "code"
        shutil.copytree(DIGITS, code)
        shutil.copy(BESIDE / "spread.py", code)
        (code / "words.txt").write_text("brought")
        subprocess.run(["ray", "get-auth-token", "--generate"], check=True, capture_output=True)
        Path("~/.ray/auth_token").expanduser().chmod(0o600)

    def up(self, head: Machine, worker: Machine) -> None:
        """Fill in what is to be filled in, and `ray up`."""
        places = {
            "FILL_IN_HEAD": head.address,
            "FILL_IN_WORKER": worker.address,
            "FILL_IN_USER": USER,
            "FILL_IN_KEY": str(head.key),
            "~/code: examples/digits": f"~/code: {self._directory / 'code'}",
        }
        text = (ROOT / "clusters" / "local.yaml").read_text()
        for place, filling in places.items():
            assert text.count(place) == 1, f"clusters/local.yaml has {place} {text.count(place)} times"
            text = text.replace(place, filling)
        assert "FILL_IN" not in text
        self._cluster.write_text(text)
        self.ray("up")

    def ray(self, command: str, *arguments: str | Path) -> str:
        """`ray <command> local.yaml ...`; what it printed."""
        began = time.monotonic()
        process, log = self.start(command, *arguments)
        code, output = process.wait(400), log.read_text()
        assert code == 0, f"ray {command}: {code}\n{output}"
        self.took[" ".join(["ray", command, *(Path(argument).name for argument in arguments[:1])])] = (
            time.monotonic() - began
        )
        return output

    def start(self, command: str, *arguments: str | Path) -> tuple[subprocess.Popen[bytes], Path]:
        """The same, not waited for; where it prints to."""
        options = {"up": ["-y", "--no-config-cache"], "down": ["-y"]}.get(command, ["--no-config-cache"])
        log = self._directory / f"{command}-{len(self.took)}.txt"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["ray", command, *options, self._cluster, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
        return process, log


def running(machine: Machine) -> str:
    """What of Ray runs there; nothing: ""."""
    return machine.run("pgrep -fa 'raylet|gcs_server|ray::'", check=False).stdout


def sweep(directory: Path) -> dict[str, Any]:
    """`ray up`, the example's search, a trial with a worker on each machine, `ray down`."""
    (results := directory / "results").mkdir()
    with Machines("one", "two", directory=directory / "machines", mounts={RESULTS: results}) as (one, two):
        person = Person(directory)
        person.up(one, two)
        printed = person.ray("submit", DIGITS / "driver.py")
        # Ray's launcher has brought it there too; this machine is to have it from dray.
        two.run("rm -r ~/code")
        person.ray("submit", DRIVER, "--", "spread", "0")
        before = running(one)
        person.ray("down")
        after = running(one)
    return {"took": person.took, "printed": printed, "before": before, "after": after}


def head_lost(directory: Path) -> dict[str, Any]:
    """The head goes down with the driver; other machines go on, from the directory that all have mounted."""
    (results := directory / "results").mkdir()
    names = ("one", "two", "three")
    with Machines(*names, directory=directory / "machines", mounts={RESULTS: results}) as (one, two, three):
        person = Person(directory)
        person.up(one, two)
        driver, log = person.start("submit", DRIVER, "--", "lost", "1")

        def saved() -> bool:
            assert driver.poll() is None, f"the driver has ended:\n{log.read_text()}"
            return bool(list(results.glob("lost-*/trial_0/checkpoint_5")))

        wait_for(saved, "a checkpoint")
        one.power_off()
        [path] = results.glob("lost-*")
        person.up(two, three)
        ran = two.run(f"dray experiment resume {RESULTS / path.name}")
    return {"printed": ran.stdout}


if __name__ == "__main__":
    seen = globals()[sys.argv[1]](directory := Path(sys.argv[2]))
    (directory / "seen.json").write_text(json.dumps(seen))
