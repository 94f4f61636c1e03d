"""docs/installing.md: what it installs from git is complete, and its lists are those of pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from tests.docs.pages import PAGES, ROOT, blocks

PAGE = "installing.md"
OFFLINE = "--no-deps --no-build-isolation"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def requirement() -> str:
    """As the page writes it, with the address of this repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    return f"dray @ git+file://localhost{ROOT}@{git('rev-parse', 'HEAD').strip()}"


@pytest.mark.slow
def test_wheel_has_all_files_of_both_packages(requirement: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-index", *OFFLINE.split(), "-w", tmp_path, requirement]
    subprocess.run(command, check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name in PAGES[PAGE]
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == set(git("ls-tree", "-r", "--name-only", "HEAD", "dray", "searchers").splitlines())


def test_requirements_and_extras_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = re.findall(r"^\| `(\w+)` \|", PAGES[PAGE], flags=re.MULTILINE)
    assert set(table) == set(project["optional-dependencies"])
    [text] = blocks("text", page=PAGE)
    [written] = [Requirement(each) for each in tomllib.loads(text.text)["dependencies"]]
    assert written.name == "dray"
    quoted = re.findall(r"'(dray[^'\n]* @ [^'\n]+)'", PAGES[PAGE])
    assert {Requirement(each).url for each in quoted} == {written.url}
    needed = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    assert ("any from 2.7 on" in PAGES[PAGE], str(needed["torch"])) == (True, ">=2.7")
    assert ("Ray 2.60" in PAGES[PAGE], needed["ray"].contains("2.60.0")) == (True, True)
