"""docs/installing.md: what it installs from git, with pip and with uv and without a clone, works and is complete."""

from __future__ import annotations

import os
import re
import site
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
INSTALLERS = {
    "pip": f"{sys.executable} -m pip --python {{python}} install -qq --no-index {OFFLINE}",
    "uv": f"{sys.executable} -m uv pip install -q --offline --no-cache {OFFLINE} --python {{python}}",
}
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def requirement() -> str:
    """As the page writes it, with the address of this repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    return f"dray @ git+file://localhost{ROOT}@{git('rev-parse', 'HEAD').strip()}"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment's, which has what dray needs, but not dray: paths in a .pth file bring no editable packages."""
    new = tmp_path / "new"
    subprocess.run([sys.executable, "-m", "uv", "venv", "-q", "--offline", "-p", sys.executable, new], check=True)
    [packages] = (new / "lib").glob("python*/site-packages")
    (packages / "beside.pth").write_text("\n".join(site.getsitepackages()))
    return new / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["pip", pytest.param("uv", marks=pytest.mark.long)])
def test_installation_from_git_is_complete(installer: str, requirement: str, python: Path, tmp_path: Path) -> None:
    def run(*words: str | Path) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(python, "-c", "import importlib.util as u; print(u.find_spec('dray'))") == "None\n"
    run(*INSTALLERS[installer].format(python=python).split(), requirement)
    found = run(python, "-c", "import dray, searchers; print(dray.__file__, searchers.__file__)")
    assert all(Path(each).is_relative_to(tmp_path) for each in found.split())
    for line in blocks("sh", page=PAGE)[-1].text.splitlines():
        command, *words = line.split()
        assert run(python.with_name(command), *words)


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
