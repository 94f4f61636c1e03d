"""Hosts with a name, an address, processes and an empty disk of their own, on one network. In private namespaces only.

The process that makes them is one more host of that network.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.namespaces import NAMESPACES

HERE = "10.77.0.1"
"""The address of who made the hosts."""
SHARED = Path("/mnt/shared")
"""Where all hosts see one directory: what an image or a network file system has elsewhere."""
HOME = Path("/tmp/home")

_BOOT = """
set -e
hostname {name}
mount -t tmpfs none /mnt
mkdir {shared}
mount --bind {directory} {shared}
mount -t tmpfs none /tmp
mount -t tmpfs none /dev/shm
mkdir {home}
echo '127.0.0.1 localhost
{address} {name}' > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
ip link set lo up
read connected
ip address add {address}/24 dev eth0
ip link set eth0 up
ip route add default via {here}
cd {home}
touch /tmp/booted
exec "$@" < /dev/null
"""


class Host:
    """A host that runs a command as its first process.

    Args:
        name: its host name.
        address: on the network.
        directory: what it sees at `SHARED`; its log is written to it.
        command: what it runs.
        environment: all variables of the command, beside HOME and PATH.
    """

    def __init__(
        self,
        name: str,
        address: str,
        directory: Path,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
    ) -> None:
        self.name, self.address, self.log = name, address, directory / f"{name}.log"
        self._environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(HOME),
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        boot = _BOOT.format(name=name, address=address, directory=directory, shared=SHARED, home=HOME, here=HERE)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*NAMESPACES, "bash", "-c", boot, "-", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=self._environment,
            )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (first := children.read_text().split()):  # before that, it is not yet in its namespaces
            time.sleep(0.01)
        self.first = int(first[0])
        _ip(f"link add port-{name} type veth peer name eth0 netns {self.process.pid}")
        _ip(f"link set port-{name} master switch up")
        assert self.process.stdin is not None
        print("connected", file=self.process.stdin, flush=True)
        while not Path(f"/proc/{self.first}/root/tmp/booted").exists():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)

    def run(self, command: Sequence[str], timeout: float) -> str:
        """Run a command on the host, with the variables of its first process; what it printed."""
        enter = ["nsenter", f"--target={self.first}", "--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={HOME}"]
        ran = subprocess.run(
            [*enter, "--", *command],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return ran.stdout

    def delete(self, grace_s: float, before: Sequence[str] = ()) -> dict[str, object]:
        """End it as Kubernetes ends a pod: its hook runs, it gets SIGTERM, and at the end of the time SIGKILL.

        Returns:
            how long that took, what the hook has printed, and whether it had to be killed.
        """
        began = time.monotonic()
        printed = self.run(before, timeout=grace_s) if before else ""
        hook_s = time.monotonic() - began
        os.kill(self.first, signal.SIGTERM)
        try:
            self.process.wait(max(0.0, grace_s - hook_s))
            killed = False
        except subprocess.TimeoutExpired:
            killed = True
            self.power_off()
        return {"hook_s": hook_s, "took_s": time.monotonic() - began, "killed": killed, "printed": printed}

    def power_off(self) -> None:
        """From one moment to the next."""
        self.process.kill()
        self.process.wait()


def make_network() -> None:
    """A network in these namespaces, of which this process has the address HERE."""
    _ip("link add switch type bridge")
    _ip(f"address add {HERE}/24 dev switch")
    _ip("link set switch up")
    _ip(f"route add default via {HERE}")  # by which Ray finds its own address


def _ip(command: str) -> None:
    subprocess.run(["ip", *shlex.split(command)], check=True)
