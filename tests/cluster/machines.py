"""Machines with an address, a disk and an sshd of their own, on one network. In private namespaces only.

The process that makes them is one more machine of that network: the one that a person sits at.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import pytest

from tests.cluster.namespaces import NAMESPACES, ROOT, isolated
from tests.ray.harness import wait_for

HERE = "10.77.0.1"
"""The address of who made the machines."""
USER = pwd.getpwuid(0).pw_name
HOME = Path(pwd.getpwuid(0).pw_dir)
"""The home directory of the account that ssh logs in to, on each machine."""
_SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

with_machines = [
    *isolated,
    pytest.mark.skipif(not (_SSHD and shutil.which("rsync")), reason="needs sshd (openssh-server) and rsync"),
]
"""The marks of a test whose script uses `Machines`."""

_SSHD_CONFIG = """
HostKey {etc}/host_key
AuthorizedKeysFile {etc}/authorized_keys
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
"""

_BOOT = """
set -e
mount -t tmpfs none /mnt
mount -t tmpfs none /run
mount -t tmpfs none /dev/shm
mkdir /run/sshd /mnt/{{0..{last}}}
{stage}
{hide}
{show}
hostname {name}
mount --bind {etc}/hosts /etc/hosts
cp /etc/skel/.bashrc ~/
python3=$(readlink -f {python})
$python3 -m venv --without-pip ~/dray-venv
cp {constraints} ~/dray-venv/
printf '%s\\n' {path} ~/dray > $(echo ~/dray-venv/lib/python3*/site-packages)/installed.pth
for tool in ray:ray.scripts.scripts dray:dray.cli; do
    script=~/dray-venv/bin/${{tool%%:*}}
    # As pip writes it: the server's processes import it.
    printf '#!%s\\nfrom %s import main\\n' ~/dray-venv/bin/python ${{tool#*:}} > $script
    printf 'if __name__ == "__main__":\\n    main()\\n' >> $script
    chmod +x $script
done
ip link set lo up
read connected
ip address add {address}/24 dev eth0
ip link set eth0 up
ip route add default via {here}
# Not in place of this shell: process 1 has to bury whom nobody waits for, and sshd does not.
{sshd} -D -e -f {etc}/sshd_config &
wait
"""


class Machine:
    """One of `Machines`. Its home has an environment with all that dray needs; dray itself is looked for in ~/dray.

    Attributes:
        name: its host's.
        address: on the network.
        key: that opens it.
    """

    def __init__(self, name: str, address: str, *, directory: Path, key: Path, mounts: Mapping[Path, Path]) -> None:
        self.name, self.address, self.key = name, address, key
        etc = directory / name
        etc.mkdir(parents=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", etc / "host_key"], check=True)
        shutil.copy(f"{key}.pub", etc / "authorized_keys")
        (etc / "sshd_config").write_text(_SSHD_CONFIG.format(etc=etc))
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
        self._log = directory / f"{name}.txt"
        # What it sees of this machine's disk in places that it has for itself; the repository is none of it.
        seen = {etc: etc, Path(sys.prefix): Path(sys.prefix), Path(sys.base_prefix): Path(sys.base_prefix), **mounts}
        stage = [f"mount --bind {source} /mnt/{number}" for number, source in enumerate(seen.values())]
        show = [f"mkdir -p {place} && mount --bind /mnt/{number} {place}" for number, place in enumerate(seen)]
        hide = [f"mkdir -p {place} && mount -t tmpfs none {place}" for place in (Path("/tmp"), HOME, ROOT)]
        boot = _BOOT.format(
            last=len(seen) - 1,
            stage="\n".join(stage),
            hide="\n".join(hide),
            show="\n".join(show),
            name=name,
            address=address,
            here=HERE,
            etc=etc,
            sshd=_SSHD,
            python=sys.executable,
            constraints=etc / "constraints.txt",
            path=" ".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}),
        )
        (etc / "boot").write_text(boot)
        shutil.copy(ROOT / "constraints.txt", etc)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*NAMESPACES, "bash", etc / "boot"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(HOME)},
            )

    def connect(self) -> None:
        """Plug it in."""
        plug(self.name, self._process.pid)
        assert self._process.stdin is not None
        print("connected", file=self._process.stdin, flush=True)
        wait_for(self._answers, f"machine {self.name}", 60)

    def _answers(self) -> bool:
        assert self._process.poll() is None, f"machine {self.name} has gone down: {self._log.read_text()}"
        return self.run("true", check=False).returncode == 0

    def run(self, command: str, *, check: bool = True, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Have its account run a command, by ssh."""
        options = ("IdentitiesOnly=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        ran = subprocess.run(
            ["ssh", f"-i{self.key}", *(f"-o{option}" for option in options), f"{USER}@{self.address}", command],
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert not check or ran.returncode == 0, (
            f"{command} on {self.name}: {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
        )
        return ran

    def power_off(self) -> None:
        """From one moment to the next: no process of it says goodbye, and no packet leaves it."""
        self._process.kill()
        self._process.wait()


class Machines:
    """Machines on a network.

    Args:
        names: of the hosts.
        directory: for their logs, and for the key that opens all of them.
        mounts: directories by the place where all machines have them: what a network file system is elsewhere.
    """

    def __init__(self, *names: str, directory: Path, mounts: Mapping[Path, Path] = {}) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        key = directory / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        make_network()
        self._machines = [
            Machine(name, f"10.77.0.{number}", directory=directory, key=key, mounts=mounts)
            for number, name in enumerate(names, 2)
        ]

    def __enter__(self) -> list[Machine]:
        for machine in self._machines:
            machine.connect()
        return self._machines

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self._machines:
            machine.power_off()


def make_network() -> None:
    """A network in these namespaces, of which this process has the address HERE."""
    _ip("link add switch type bridge")
    _ip(f"address add {HERE}/24 dev switch")
    _ip("link set switch up")
    _ip(f"route add default via {HERE}")  # by which Ray finds its own address


def plug(name: str, process: int) -> None:
    """Give the network namespace of a process an eth0 on that network."""
    _ip(f"link add port-{name} type veth peer name eth0 netns {process}")
    _ip(f"link set port-{name} master switch up")


def _ip(command: str) -> None:
    subprocess.run(["ip", *shlex.split(command)], check=True)
