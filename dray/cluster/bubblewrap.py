"""The sandbox of a trial with ``isolation: sandbox``: the command that starts it, by bubblewrap.

Its processes have namespaces of their own: they see no other processes, reach no network, and of the file system they
see only what is listed here, all of it read-only except their own directory and temporary files.
"""

from __future__ import annotations

import functools
import glob
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

TOOL = "bwrap"
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
SETTINGS = (
    "alternatives", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "nsswitch.conf",
    "os-release", "passwd",
)  # fmt: skip
"""The files and directories of /etc that programs and libraries need."""
SYSTEM = ("/sys/devices/system/cpu", "/sys/devices/system/node")
GPUS = ("/dev/nvidia*", "/dev/nvidia-caps/*", "/dev/kfd", "/dev/dri/*")
VARIABLES = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
"""The environment variables of the worker that its sandboxes get too."""
HOME = "/tmp"

PROBE_S = 20.0


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process in the sandbox, given that of the worker."""
    found = {name: environment[name] for name in VARIABLES if name in environment}
    paths = [_of_dray(), *filter(None, found.get("PYTHONPATH", "").split(os.pathsep))]
    # The user's own packages are found although HOME is another one.
    base = {"PYTHONUSERBASE": site.getuserbase()}
    own = {"PYTHONPATH": os.pathsep.join(path for path in paths if path not in _python_path())}
    return {**found, **{name: value for name, value in {**base, **own}.items() if value}, "HOME": HOME}


def command(
    program: Sequence[str],
    *,
    own: Sequence[Path] = (),
    read: Iterable[str | Path] = (),
    hidden: Iterable[Path] = (),
    gpu: bool = False,
) -> list[str]:
    """The command that runs a program in a sandbox.

    Args:
        own: directories that it may write to.
        read: files and directories that it may read, besides Python and the system's programs and libraries.
        hidden: directories that it finds empty, although they are within others that it may read.
        gpu: whether it may use the machine's GPUs.
    """
    # Each path with its mount; a later entry replaces an earlier one for the same path.
    mounts: dict[str, str] = dict.fromkeys(_with_ends_of_links(hidden), "--tmpfs")
    mounts |= dict.fromkeys(PROGRAMS, "--ro-bind-try")
    mounts |= dict.fromkeys((f"/etc/{name}" for name in SETTINGS), "--ro-bind-try")
    mounts |= dict.fromkeys(("/sys",) if gpu else SYSTEM, "--ro-bind-try")
    mounts |= dict.fromkeys(_of_python(), "--ro-bind")
    mounts |= dict.fromkeys(_with_ends_of_links(read), "--ro-bind")
    mounts |= dict.fromkeys(_with_ends_of_links(own), "--bind")
    options = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for device in sorted({path for pattern in GPUS if gpu for path in glob.glob(pattern)}):
        options += ["--dev-bind-try", device, device]
    # A directory is mounted before what lies in it.
    for path in sorted(mounts, key=lambda path: (path.count("/"), path)):
        options += [mounts[path], path] if mounts[path] == "--tmpfs" else [mounts[path], path, path]
    # In /proc/sys, root could change settings of the machine without any capability.
    options += ["--remount-ro", "/proc", "--remount-ro", "/", "--chdir", HOME]
    return [TOOL, *options, "--", *program]


def with_info(command: Sequence[str], descriptor: int) -> list[str]:
    """The command with a file descriptor that gets the id of the sandbox's first process, as JSON."""
    return [command[0], "--info-fd", str(descriptor), *command[1:]]


def why_impossible() -> str:
    """Why no sandbox can start on this machine, as the predicate of a sentence; "" if it can."""
    if shutil.which(TOOL) is None:
        return f"has no bubblewrap (the command {TOOL})"
    probe = command([sys.executable, "-I", "-S", "-c", ""])
    try:
        done = subprocess.run(
            probe, env=variables(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired:
        return f"started no sandbox within {PROBE_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"{TOOL} exited with code {done.returncode}"]
    return f"does not allow a sandbox: {lines[-1]}"


def _with_ends_of_links(paths: Iterable[str | Path]) -> list[str]:
    return [form for path in paths for form in dict.fromkeys((os.path.abspath(path), os.path.realpath(path)))]


def _of_dray() -> str:
    return str(Path(__file__).parents[2])


@functools.cache
def _python_path() -> list[str]:
    """`sys.path` of a Python that has just started: this process's may have directories of trials."""
    listing = [sys.executable, "-c", "import os, sys; print(os.pathsep.join(sys.path[1:]))"]
    listed = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.strip()
    return [path for path in listed.split(os.pathsep) if os.path.exists(path)]


def _of_python() -> list[str]:
    """The directories that Python needs: its own, those of installed packages, and dray's."""
    return _with_ends_of_links([sys.prefix, sys.exec_prefix, sys.base_prefix, *_python_path(), _of_dray()])
