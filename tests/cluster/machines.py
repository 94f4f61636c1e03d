"""Hosts that one logs in to by ssh. In private namespaces only."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.cluster.hosts import SHARED, Host
from tests.cluster.namespaces import ROOT, isolated
from tests.ray.harness import wait_for

USER = pwd.getpwuid(0).pw_name
HOME = Path(pwd.getpwuid(0).pw_dir)
"""The home directory of the account that ssh logs in to, on each machine."""
_SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

with_machines = [
    *isolated,
    pytest.mark.skipif(not (_SSHD and shutil.which("rsync")), reason="needs sshd (openssh-server) and rsync"),
]
"""The marks of a test whose script uses `Machine`."""

# Its home has an environment with all that dray needs; dray itself is looked for in ~/dray. Of the repository and of
# the account it sees Python's environments, if they lie there; of what hosts share only the results, as on NFS.
_LOG_IN = """
set -e
mount -t tmpfs none /run
mkdir -p /run/sshd /run/{{0,1}} /mnt/dray_results
mount --bind {shared}/results /mnt/dray_results
mount --bind {prefix} /run/0
mount --bind {base} /run/1
cp -r {shared}/etc {shared}/constraints.txt /run/
for place in {home} {root}; do mount -t tmpfs none $place; done
mkdir -p {prefix} {base}
mount --bind /run/0 {prefix}
mount --bind /run/1 {base}
umount {shared}
export HOME={home}
cp /etc/skel/.bashrc ~/
python3=$(readlink -f {python})
$python3 -m venv --without-pip ~/dray-venv
cp /run/constraints.txt ~/dray-venv/
printf '%s\\n' {path} ~/dray > $(echo ~/dray-venv/lib/python3*/site-packages)/installed.pth
for tool in ray:ray.scripts.scripts dray:dray.cli; do
    script=~/dray-venv/bin/${{tool%%:*}}
    # As pip writes it: the server's processes import it.
    printf '#!%s\\nfrom %s import main\\n' ~/dray-venv/bin/python ${{tool#*:}} > $script
    printf 'if __name__ == "__main__":\\n    main()\\n' >> $script
    chmod +x $script
done
# Not in place of this shell: process 1 has to bury whom nobody waits for, and sshd does not.
{sshd} -D -e -f /dev/null -h /run/etc/host_key -o AuthorizedKeysFile=/run/etc/key.pub -o PidFile=none \
    -o PermitRootLogin=yes -o StrictModes=no -o UsePAM=no &
wait
"""


class Machine(Host):
    """A host with an sshd.

    Args:
        directory: for all machines. They see its `results` at /mnt/dray_results, and its `etc/key` opens them.
    """

    def __init__(self, name: str, address: str, directory: Path) -> None:
        self.key = directory / "etc" / "key"
        if not self.key.exists():
            self.key.parent.mkdir()
            for key in ("key", "host_key"):
                command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key.with_name(key)]
                subprocess.run(command, check=True)
            shutil.copy(ROOT / "constraints.txt", directory)
        log_in = _LOG_IN.format(
            shared=SHARED,
            home=HOME,
            root=ROOT,
            sshd=_SSHD,
            prefix=sys.prefix,
            base=sys.base_prefix,
            python=sys.executable,
            path=" ".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}),
        )
        super().__init__(name, address, directory, ["bash", "-c", log_in])
        wait_for(self._answers, f"machine {name}", 60)

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"machine {self.name} has gone down: {self.log.read_text()}"
        return self.ssh("true").returncode == 0

    def ssh(self, command: str) -> subprocess.CompletedProcess[str]:
        """Have its account run a command."""
        options = ("IdentitiesOnly=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        return subprocess.run(
            ["ssh", f"-i{self.key}", *(f"-o{option}" for option in options), f"{USER}@{self.address}", command],
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
        )
