"""A git repository with the versions of a model, for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dray.bisect.history import History


class Repository:
    """A git repository with a model directory ``model`` and a config, ``const.yaml``, in it."""

    def __init__(self, path: Path, **files: str) -> None:
        self.path = path
        path.mkdir()
        self.git("init", "-q", "-b", "main")
        self.commit("first", **files)

    def git(self, *arguments: str) -> str:
        named = ("-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *named, *arguments], cwd=self.path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, message: str = "change", **files: str | None) -> str:
        for name, content in files.items():
            file = self.path / name
            file.parent.mkdir(exist_ok=True)
            if content is None:
                file.unlink()
            else:
                file.write_text(content)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def history(self, good: str, bad: str = "HEAD") -> History:
        return History(self.path / "model" / "const.yaml", good, bad)
