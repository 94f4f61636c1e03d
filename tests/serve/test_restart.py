"""A server that replaces its process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
from dray.errors import ExperimentError
from dray.serve.restart import restart

print("starts", sys.argv[1:], os.getpid(), os.environ.get("SET_SINCE"))
given = dict(os.environ)
os.environ["SET_SINCE"] = "yes"
try:
    restart(given, print)
except ExperimentError as error:
    print(error)
"""


def test_a_server_starts_again_as_it_was_started_but_not_twice_within_minutes() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "--port=8600"], stdout=subprocess.PIPE, text=True)
    said = process.communicate()[0].splitlines()
    started = f"starts ['--port=8600'] {process.pid} None"
    died = "a process of Ray on this machine has died"
    assert said[:3] == [started, f"{died}; the server starts again, and continues its queue", started]
    assert said[3].startswith(f"{died} again within 5 minutes")
