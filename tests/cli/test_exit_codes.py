"""Exit codes, where there is no terminal any more, or no Ray."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    ("package", "arguments", "needs"),
    [
        ("ray", ["cluster", "status"], "dray-train 'ray[default,train,tune]>=2.54,<3'"),
        ("mcp", ["mcp"], "'dray-train[mcp]'"),
    ],
)
def test_a_requirement_that_is_not_installed_is_one_line_with_its_extra(
    package: str, arguments: list[str], needs: str
) -> None:
    command = f"import sys; sys.modules[{package!r}] = None; from dray.cli import main; main({arguments})"
    ran = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120)
    [error] = ran.stderr.splitlines()
    assert error.startswith("dray: ")
    assert error.endswith(f"; this command needs it: pip install {needs}")
    assert ran.returncode == 1
