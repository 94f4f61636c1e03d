"""The versions of a model directory in a git repository, and which of them train alike."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import subprocess
import tarfile
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

from dray.config.yaml_file import parsed
from dray.text import one_line

NO_CODE = (".md", ".rst")
"""Files with these endings are not compared: no training reads them."""
ABOUT = ("name", "description", "labels")
"""Fields of a config that no training depends on."""


class NoHistory(ValueError):
    """There is no such commit, file or repository; the message is one line."""


@dataclass(frozen=True, slots=True)
class Commit:
    hash: str
    subject: str
    author: str
    date: str  # ISO 8601

    @property
    def short(self) -> str:
        return self.hash[:10]


@dataclass(frozen=True)
class History:
    """The commits from one to another, along first parents, and a config and a model directory in them.

    Args:
        config: the path of the experiment's config, as it is now; commits have their own.
        model_dir: the directory of the model's code; by default, that of the config.

    Raises:
        NoHistory: there is no repository or commit, or `bad` does not descend from `good`.
    """

    config: Path
    good: str
    bad: str
    model_dir: Path | None = None
    _root: Path = field(init=False)

    def __post_init__(self) -> None:
        place = self.config.resolve().parent
        if not place.is_dir():
            raise NoHistory(f"no such directory: {place}; give --config, the experiment's config file in a repository")
        object.__setattr__(
            self,
            "_root",
            Path(
                _git(place, "rev-parse", "--show-toplevel", what=f"{place} is not in a git repository")
                .decode()
                .rstrip("\n")
            ),
        )

    @cached_property
    def commits(self) -> list[Commit]:
        """The commits, `good` first."""
        good, bad = (self._git("rev-parse", "--verify", "--quiet", f"{each}^{{commit}}", what=f"no commit {each!r}")
                     .decode().strip() for each in (self.good, self.bad))  # fmt: skip
        form = "--format=%H%x00%s%x00%an%x00%aI"
        log = self._git("log", "--first-parent", "--reverse", form, f"{good}..{bad}") if good != bad else b""
        first = self._git("log", "-1", form, good)
        found = [Commit(*line.split("\0")) for line in (first + log).decode(errors="replace").splitlines()]
        parent = self._git("rev-parse", f"{found[1].hash}^").decode().strip() if len(found) > 1 else good
        if parent != good or found[-1].hash != bad:
            raise NoHistory(
                f"{self.bad} does not descend from {self.good} by first parents; give a good commit on the same branch"
            )
        return found

    def version(self, commit: Commit) -> str:
        """A text that commits share if their code and config differ only in comments, docstrings, formatting, and
        documents."""
        tree = self._git("ls-tree", "-r", "-z", commit.hash, "--", self._code or ".").decode(errors="surrogateescape")
        try:
            content, _ = parsed(self.config_text(commit))
        except NoHistory:  # it will not run
            content = None
        config = (
            {name: value for name, value in content.items() if name not in ABOUT} if isinstance(content, dict) else {}
        )
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        for entry in tree.split("\0")[:-1]:
            about, _, name = entry.partition("\t")
            mode, kind, blob = about.split()
            path = PurePosixPath(name)
            if kind == "blob" and path.suffix not in NO_CODE and name != self._config:
                content = _normalised(self._root, blob, path.suffix)
                digest.update(f"{mode} {name} {hashlib.sha256(content).hexdigest()}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def config_text(self, commit: Commit) -> str:
        """The config of a commit; `NoHistory` if it has none."""
        what = f"{commit.short} has no file {self._config}"
        return self._git("show", f"{commit.hash}:{self._config}", what=what).decode(errors="replace")

    def export(self, commit: Commit, to: Path) -> None:
        """Write the model directory of a commit into a directory."""
        what = f"{commit.short} has no directory {self._code or '.'}"
        packed = self._git("archive", "--format=tar", f"{commit.hash}:{self._code}", what=what)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(to, filter="data")

    def stat(self, first: Commit, last: Commit) -> list[str]:
        """The lines of ``git diff --stat`` of the changes of commits, from the first one's to the last one's."""
        return self._git("diff", "--stat=100", f"{first.hash}^", last.hash).decode(errors="replace").splitlines()

    @property
    def _config(self) -> str:
        return self.config.resolve().relative_to(self._root).as_posix()

    @property
    def _code(self) -> str:
        place = (self.model_dir or self.config.parent).resolve()
        if not place.is_relative_to(self._root):
            raise NoHistory(f"{place} is not in the repository {self._root}, which has the config")
        code = place.relative_to(self._root).as_posix()
        return "" if code == "." else code

    def _git(self, *arguments: str, what: str = "") -> bytes:
        return _git(self._root, *arguments, what=what)


@lru_cache(maxsize=10_000)
def _normalised(root: Path, blob: str, suffix: str) -> bytes:
    """The content of a file as far as training may depend on it; equal blobs are read once."""
    content = _git(root, "cat-file", "blob", blob)
    if suffix == ".py":
        return _code_only(content)
    if suffix in (".yaml", ".yml"):
        value, fault = parsed(content.decode(errors="replace"))
        return content if fault else json.dumps(value, sort_keys=True, default=str).encode()
    return content


def _code_only(source: bytes) -> bytes:
    """Python code without comments, docstrings and formatting; unchanged if it can't be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            if is_text and isinstance(first.value.value, str):  # type: ignore[union-attr]
                node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree).encode(errors="surrogateescape")


def _git(place: Path, *arguments: str, what: str = "") -> bytes:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=place, capture_output=True, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise NoHistory("git is not installed") from None
    if done.returncode:
        said = one_line(done.stderr.decode(errors="replace")).removeprefix("fatal: ")
        raise NoHistory(f"{what or f'git {arguments[0]} failed'}{f': {said}' if said else ''}")
    return done.stdout
