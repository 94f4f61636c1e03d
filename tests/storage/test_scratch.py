"""Temporary directories: of a process that was killed they are removed by the next one, of one that lives they stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HOLD = """
from dray.storage.disk import scratch
with scratch("{name}") as directory:
    (directory / "file").touch()
    print(directory, flush=True)
    input()
"""
MAKE = "from dray.storage.disk import scratch\nwith scratch('next') as directory: print(directory)"


def start(folder: Path, name: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a directory, two minutes ago."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(name=name)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    made_at = directory.stat().st_mtime - 120
    os.utime(directory, (made_at, made_at))
    return process, directory


def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    killed, left = start(tmp_path, "killed")
    living, used = start(tmp_path, "living")
    killed.kill()
    killed.wait()
    made = subprocess.check_output(
        [sys.executable, "-c", MAKE], env={**os.environ, "TMPDIR": str(tmp_path)}, text=True
    ).strip()
    assert Path(made).parent == tmp_path
    assert sorted(tmp_path.iterdir()) == [used, others], "its own was removed at the end"
    assert (used / "file").exists()
    living.communicate("\n")
    assert list(tmp_path.iterdir()) == [others]
    assert left != used
