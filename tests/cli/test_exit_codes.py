"""Exit codes that a closed terminal must not change."""

from __future__ import annotations

import os
import subprocess
import sys

COMMAND = """
import sys
from dray.cli import errors

def command(**_):
    sys.stdin.readline()
    sys.stdout.write("half a line, which stays in the buffer")
    raise KeyboardInterrupt("SIGHUP")

errors.run(command, [])
"""


def test_exit_code_names_the_signal_also_if_nothing_can_be_written_any_more() -> None:
    terminal, inner = os.openpty()
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        env=buffered,
    ) as process:
        os.close(inner)
        os.close(terminal)
        process.communicate(b"\n", timeout=120)
        assert process.returncode == 129
