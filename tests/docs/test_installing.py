"""docs/installing.md: the wheel is complete, the lists are those of pyproject.toml, the name is ours."""

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
NAME = "dray-train"
OLD_NAME = re.compile(
    r"""(?<![\w./-])dray(?:\[[a-z]|\s*@\s|[=<>~!]=|-\d)"""
    r"""|\b(?:pip|uv|uvx|pipx)\s[^`\n]*[\s'"]dray(?![\w.:/-])"""
    r"""|\b(?:version|distribution|metadata|requires|files)\(['"]dray['"]\)"""
)
"""Requirements, commands and lookups that name the distribution `dray`, which on PyPI is another project."""
OFFLINE = "--no-deps --no-build-isolation"


def git(*words: str) -> str:
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def requirement() -> str:
    """As the page writes it, with the address of this repository."""
    return f"{NAME} @ git+file://localhost{ROOT}@{git('rev-parse', 'HEAD').strip()}"


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
    assert (written.name, project["name"]) == (NAME, NAME)
    quoted = re.findall(rf"'({NAME}[^'\n]* @ [^'\n]+)'", PAGES[PAGE])
    assert {Requirement(each).url for each in quoted} == {written.url}
    needed = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    assert ("any from 2.7 on" in PAGES[PAGE], str(needed["torch"])) == (True, ">=2.7")
    assert ("Ray (2.54 or newer, below 3)" in PAGES[PAGE], str(needed["ray"])) == (True, "<3,>=2.54")


def test_nothing_installs_or_looks_up_the_other_project_named_dray() -> None:
    code = "".join(block.text for block in blocks(page=PAGE))
    renamed = [line.replace(NAME, "dray") for line in code.splitlines() if NAME in line]
    assert renamed
    assert [line for line in renamed if not OLD_NAME.search(line)] == []
    lines = git("grep", "-Iwn", "dray").splitlines()  # with the file's name
    assert [line for line in lines if OLD_NAME.search(line)] == []
