"""Hosts with a name, an address, processes and an empty disk of their own, on the network of machines.py: pods, or
nodes of Slurm. In private namespaces only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.machines import HERE, plug
from tests.cluster.namespaces import NAMESPACES

SHARED = Path("/mnt/shared")
"""Where all hosts see one directory: what an image or a network file system has elsewhere."""
HOME = Path("/tmp/home")
_SHARED_PROCESSES = [option for option in NAMESPACES if option not in ("--pid", "--mount-proc")]

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
{itself} {name}' > /tmp/hosts
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
        calls_itself: the address of its name, as it sees it; by default the one on the network.
        own_processes: whether its processes see one another only. Otherwise any host can run something on another one.
    """

    def __init__(
        self,
        name: str,
        address: str,
        directory: Path,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
        *,
        own_processes: bool = True,
        calls_itself: str = "",
    ) -> None:
        self.name, self.address, self.log = name, address, directory / f"{name}.log"
        self._own_processes = own_processes
        self._environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(HOME),
            "RAY_USAGE_STATS_ENABLED": "0",
            **environment,
        }
        itself = calls_itself or address
        boot = _BOOT.format(
            name=name, address=address, itself=itself, directory=directory, shared=SHARED, home=HOME, here=HERE
        )
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*(NAMESPACES if own_processes else _SHARED_PROCESSES), "bash", "-c", boot, "-", *command],
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
        plug(name, self.process.pid)
        assert self.process.stdin is not None
        print("connected", file=self.process.stdin, flush=True)
        while not Path(f"/proc/{self.first}/root/tmp/booted").exists():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] = {}, **options: object
    ) -> subprocess.Popen[str]:
        """Start a command on the host, with the variables of its first process."""
        enter = ["nsenter", f"--target={self.first}", "--mount", "--uts", "--ipc", "--net", f"--wdns={HOME}"]
        if self._own_processes:  # which takes a process between, that passes no signals on
            enter.append("--pid")
        variables = {**self._environment, **environment}
        return subprocess.Popen([*enter, "--", *command], env=variables, text=True, **options)  # type: ignore[call-overload, no-any-return]

    def run(self, command: Sequence[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command on the host."""
        process = self.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out, _ = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, out)

    def delete(self, grace_s: float, before: Sequence[str] = ()) -> dict[str, object]:
        """End it as Kubernetes ends a pod: its hook runs, it gets SIGTERM, and at the end of the time SIGKILL.

        Returns:
            how long that took, what the hook has printed, and whether it had to be killed.
        """
        began = time.monotonic()
        printed = self.run(before, timeout=grace_s).stdout if before else ""
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
