"""docs/installing.md: the wheel is complete, the lists are those of pyproject.toml, the name is ours."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dray.agents import docs
from tests.docs.pages import PAGES, PROJECT, ROOT, blocks

PAGE = "installing.md"
NAME = "dray-train"
OLD_NAME = re.compile(
    r"""(?<![\w./-])dray(?:\[[a-z]|\s*@\s|[=<>~!]=|-\d)"""
    r"""|\b(?:pip|uv|uvx|pipx)\s[^`\n&;,]*[\s'"]dray(?![\w.:/-])"""
    r"""|\b(?:version|distribution|metadata|requires|files)\(['"]dray['"]\)"""
)
"""Requirements, commands and lookups that name the distribution `dray`, which on PyPI is another project."""
OFFLINE = "--no-deps --no-build-isolation"


def git(*words: str) -> str:
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def build(source: Path, to: Path) -> Path:
    """Build the sdist and the wheel of a directory."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", to], cwd=source, check=True, capture_output=True)
    return to


@pytest.mark.slow
@pytest.mark.long
def test_sdist_and_wheel_are_complete_and_equal_wherever_built(tmp_path: Path) -> None:
    # As the page writes it, with the address of this repository.
    requirement = f"{NAME} @ git+file://localhost{ROOT}@{git('rev-parse', 'HEAD').strip()}"
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-index", *OFFLINE.split(), "-w", tmp_path, requirement]
    subprocess.run(command, check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name in PAGES[PAGE]
    git("clone", "--quiet", str(ROOT), str(tmp_path / "clone"))
    [sdist] = build(tmp_path / "clone", tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    packed = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert packed == {*git("ls-tree", "-r", "--name-only", "HEAD").splitlines(), "PKG-INFO"}
    (unpacked / "PKG-INFO").unlink()
    again = build(unpacked, tmp_path / "again")
    assert (again / sdist.name).read_bytes() == sdist.read_bytes()
    for place in (tmp_path / "dist", again):
        assert (place / wheel.name).read_bytes() == wheel.read_bytes()
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    places = ["dray", "searchers", "clusters", "examples/digits", *(f"docs/{name}.md" for name in docs.titles())]
    sources = git("ls-tree", "-r", "--name-only", "HEAD", *places).splitlines()
    moved = {"examples/digits/": "dray/demo/", "docs/": "dray/docs/", "clusters/": "dray/clusters/"}
    folder = re.compile(r"^(examples/digits|docs|clusters)/")
    assert packed == {folder.sub(lambda found: moved[found[0]], name) for name in sources} | {
        "dray/clusters/cluster.yaml"
    }


def test_requirements_and_extras_are_those_of_pyproject() -> None:
    table = re.findall(r"^\| `(\w+)` \|", PAGES[PAGE], flags=re.MULTILINE)
    assert set(table) == set(PROJECT["optional-dependencies"])
    [text] = blocks("text", page=PAGE)
    [written] = map(Requirement, re.findall(r'"(.+)"', text.text))
    assert (written.name, PROJECT["name"]) == (NAME, NAME)
    quoted = re.findall(rf"'({NAME}[^'\n]* @ [^'\n]+)'", PAGES[PAGE])
    assert {Requirement(each).url for each in quoted} == {written.url}
    needed = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
    assert ("any from 2.8 on" in PAGES[PAGE], str(needed["torch"])) == (True, ">=2.8")
    words = " ".join(PAGES[PAGE].lower().split())
    for package in ("torch", "optuna", "pandas", "pyarrow", "numpy", "scipy"):
        [lowest] = needed[package]
        assert f"{package} {lowest.version}" in words
    pythons = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if " :: Python :: 3." in each]
    assert f"python {', '.join(pythons[:-1])} and {pythons[-1]}" in words
    assert ("Ray (2.54 or newer, below 3)" in PAGES[PAGE], str(needed["ray"])) == (True, "<3,>=2.54")


def test_nothing_installs_or_looks_up_the_other_project_named_dray() -> None:
    code = "".join(block.text for block in blocks(page=PAGE))
    renamed = [line.replace(NAME, "dray") for line in code.splitlines() if NAME in line]
    assert renamed
    assert [line for line in renamed if not OLD_NAME.search(line)] == []
    lines = git("grep", "-Iwn", "dray").splitlines()  # with the file's name
    assert [line for line in lines if OLD_NAME.search(line)] == []
