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

errors.run(command, [], lambda: command)
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
        process.communicate(b"\n")
        assert process.returncode == 129


WITHOUT = """
import sys

sys.modules["ray"] = sys.modules["mcp"] = None
from dray.cli import main

for arguments in (["cluster", "status"], ["mcp"]):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 1
"""


def test_a_requirement_that_is_not_installed_is_one_line_with_its_extra() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    said = [line.partition("; this command needs it: pip install ") for line in ran.stderr.splitlines()]
    assert [line[2] for line in said] == ["dray-train 'ray[default,train,tune]>=2.54,<3'", "'dray-train[mcp]'"]
    assert all(line[0].startswith("dray: ") for line in said)
    assert ran.returncode == 0


WITH_RAY = """
import atexit, sys, threading, time
import dray.cluster.connection, dray.imports
from dray.cli import main

class Module:
    def __del__(self):
        print("freed")

module = Module()
atexit.register(print, "exit handler")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
for directory in sys.argv[1:]:
    dray.imports.use_model_dir(directory)
sys.argv = ["dray", "experiment", "describe", "none"]
main()
"""


@pytest.mark.parametrize(("model_dir", "freed"), [([], []), (["."], ["freed"])])
def test_after_ray_the_process_ends_without_freeing_its_modules_unless_users_may_have_files(
    model_dir: list[str], freed: list[str]
) -> None:
    ran = subprocess.run([sys.executable, "-c", WITH_RAY, *model_dir], capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["thread", "exit handler", *freed]
    assert ran.stderr.startswith("dray: ")
    assert ran.returncode == 2


def test_a_command_whose_output_is_closed_does_its_work() -> None:
    main = "from dray.cli import main; main(['--version'])"
    command = 'exec "$0" -c "$1" >&- 2>&-'
    assert subprocess.run(["sh", "-c", command, sys.executable, main]).returncode == 0
