"""Has a script forked by `server`, and ends as it does: ``python rank.py <script> <arguments>``.

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


def main(command: list[str]) -> int:
    """Its exit code."""
    request = {"argv": command, "environment": dict(os.environ), "directory": os.getcwd(), "blocked": []}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[ADDRESS])
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        with server.makefile() as replies:
            number = int(replies.readline())
            # torchrun ends all ranks when one has failed.
            signal.signal(signal.SIGTERM, lambda *_: os.kill(number, signal.SIGTERM))
            return int(replies.readline())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
