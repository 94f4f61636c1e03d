"""``startup-hook.sh`` in the model's directory: prepares a machine, such as its data, before the model's code runs.

A shell (bash if there is one) runs it in that directory, as in Determined: trials get what it exports in their
environment, and the first command that fails ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dray import private
from dray.environment import set_variables
from dray.storage.disk import scratch

HOOK = "startup-hook.sh"
_SHOWN_LINES = 20
# The shell itself sets these variables.
_OF_THE_SHELL = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})


class StartupHookFailed(RuntimeError):
    """``startup-hook.sh`` ended with an error; the message has the end of its output."""


def run_startup_hook(code: Path) -> None:
    """Run the hook of this directory, if it has one, and take over the environment that it leaves."""
    if not (code / HOOK).is_file():
        return
    with scratch("hook") as directory:
        after, output = directory / "environment", directory / "output"
        shell = shutil.which("bash") or "sh"
        with output.open("wb") as file:
            done = subprocess.run(
                [shell, "-e", "-c", f"trap 'env -0 > \"$0\"' EXIT; . ./{HOOK}", str(after)],
                cwd=code,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        lines = output.read_text(errors="replace").splitlines()
        if done.returncode != 0:
            shown = "\n".join(f"    | {line}" for line in lines[-_SHOWN_LINES:]) or "    | (nothing)"
            raise StartupHookFailed(
                f"exited with code {done.returncode}; fix the script, whose output ends with:\n{shown}"
            )
        if lines:
            print("\n".join(lines))
        if after.exists():  # not if the hook has set its own trap
            listed = (os.fsdecode(line) for line in after.read_bytes().split(b"\0"))
            set_variables(_changes(os.environ, dict(line.split("=", 1) for line in listed if "=" in line)))


def run_startup_hook_once(code: Path, run: str) -> None:
    """Run the hook in the first process of a run on this machine; its other processes wait and use the outcome."""
    if not (code / HOOK).is_file():
        return
    place = Path(tempfile.gettempdir()) / f"dray-hooks-{os.getuid()}"
    try:
        private.make_directory(place)
    except PermissionError as error:
        raise StartupHookFailed(f"can't be run: {error}") from None
    before = dict(os.environ)
    with (place / run).open("a+") as file:
        # Held while the hook runs; the system releases it if this process dies.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if text := file.read():
            outcome = json.loads(text)
        else:
            try:
                run_startup_hook(code)
                outcome = {"error": None, "environment": _changes(before, os.environ)}
            except StartupHookFailed as failure:
                outcome = {"error": str(failure)}
            file.write(json.dumps(outcome))
    if outcome["error"] is not None:
        raise StartupHookFailed(outcome["error"])
    set_variables(outcome["environment"])


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    names = (before.keys() | after.keys()) - _OF_THE_SHELL
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}
