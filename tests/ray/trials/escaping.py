"""A program that tries to get out of its sandbox, and reports how many of its attempts succeeded.

The hyperparameters say what there is outside: ``home``, ``results``, ``experiment``, ``port``, ``pid``.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attempts(outside: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """By name: each returns if it has succeeded, and raises an `OSError` or `KeyError` otherwise."""
    home, results, experiment = (Path(outside[name]) for name in ("home", "results", "experiment"))

    def connect(address: Any) -> None:
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(5)
            connection.connect(address)

    def replace_log() -> None:
        (experiment / "trial_0/logs").rename(experiment / "trial_0/logs-of-others")
        (experiment / "trial_0/logs-of-others").rename(experiment / "trial_0/logs")

    return {
        "write to the home directory": lambda: (home / "written").write_text("x"),
        "read a key": (home / ".ssh/id_rsa").read_text,
        "read the server's token": (results / ".server.json").read_text,
        "read the experiment's secrets": (experiment / "secrets.yaml").read_text,
        "read another trial's files": (experiment / "trial_7/state").read_text,
        "follow a link that another trial has made": (experiment / "trial_8/checkpoint_5/id_rsa").read_text,
        "list the results": lambda: (results / "other").stat(),
        "write to the code": lambda: (experiment / "code/written.py").write_text("x"),
        "write to the log": lambda: os.close(os.open(experiment / "trial_0/logs/rank_0.log", os.O_WRONLY)),
        "replace the log": replace_log,
        "connect to a port": lambda: connect(("127.0.0.1", outside["port"])),
        "connect to a socket": lambda: connect(str(home / "socket")),
        "connect to an abstract socket": lambda: connect(f"\0dray-test-{outside['port']}"),
        "reach a process by a signal": lambda: os.kill(outside["pid"], 0),
        "see a process": lambda: Path(f"/proc/{outside['pid']}/cmdline").read_bytes()[0],
        "read the environment": lambda: os.environ["A_SECRET_OF_THE_WORKER"],
        "set a setting of the machine": lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)),
    }


def succeeded(outside: dict[str, Any]) -> list[str]:
    found = []
    for name, attempt in attempts(outside).items():
        try:
            attempt()
        except (OSError, KeyError, IndexError):
            continue
        found.append(name)
    return found


def stay_behind(directory: Path) -> None:
    """Start a process that leaves this one's session, and holds a lock for as long as it lives."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with (directory / "alive").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                os.write(writing, b"x")
                time.sleep(600)
        os._exit(0)
    os.read(reading, 1)


def main() -> None:
    import dray
    from dray import core

    info = dray.get_cluster_info()
    assert info is not None
    hparams = info.trial.hparams
    with core.init() as context:
        own = Path(hparams["experiment"]) / f"trial_{info.trial.trial_id}"
        stay_behind(own)
        (own / "checkpoint_9").symlink_to(hparams["home"])  # for processes outside that look there
        found = succeeded(hparams)
        print(json.dumps({"succeeded": found, "argv": sys.argv}))
        context.train.report_validation_metrics(1, {"escapes": float(len(found))})


if __name__ == "__main__":
    main()
