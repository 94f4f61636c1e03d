"""Stands in for Ray's ``setup_worker.py``: has a worker forked by `server`, where its libraries are imported already.

It imports nothing but what Python brings.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

ADDRESS = "DRAY_FORKS"
"""The environment variable that names the server's socket."""
OWN = ("--serialized-runtime-env-context=", "--language=")


def main(command: list[str]) -> None:
    """Have the server run this command: a script of Python's and its arguments."""
    context = next((each.partition("=")[2] for each in command if each.startswith(OWN[0])), "{}")
    request = {
        "argv": [each for each in command if not each.startswith(OWN)],
        "environment": {**os.environ, **json.loads(context).get("env_vars", {})},
        "directory": os.getcwd(),
        "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[ADDRESS])
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        server.recv(1)


if __name__ == "__main__":
    main(sys.argv[1:])
