"""clusters/Containerfile and clusters/ami.pkr.hcl: no fault that a linter knows, and what they copy exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CONTAINERFILE = ROOT / "clusters" / "Containerfile"
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", CONTAINERFILE.read_text())).splitlines()
    if line
]


def given(instruction: str) -> list[str]:
    return [arguments for name, arguments in INSTRUCTIONS if name == instruction]


@pytest.mark.slow
def test_the_containerfile_has_no_fault_that_hadolint_knows() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    said = subprocess.run([hadolint, CONTAINERFILE], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, "")


def test_the_base_is_pinned() -> None:
    [base] = given("FROM")
    assert re.fullmatch(r"[a-z]+:\d+\.\d+-slim", base)


def test_it_does_not_run_as_root_and_kubernetes_can_tell() -> None:
    assert [user.isdecimal() and int(user) > 0 for user in given("USER")] == [True]
    assert [name for name, _ in INSTRUCTIONS][-3:] == ["USER", "WORKDIR", "CMD"]


def test_what_it_copies_exists_and_is_all_that_the_builder_is_sent() -> None:
    copied = [source for arguments in given("COPY") for source in arguments.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    assert sorted(rule[1:] for rule in rules if rule.startswith("!")) == sorted(copied)
    assert any(fnmatch("dray/cli/__pycache__", rule.replace("**/", "*/")) for rule in rules if rule != "*")


def test_the_machine_image_has_what_cluster_yaml_then_finds_there() -> None:
    text = (ROOT / "clusters" / "ami.pkr.hcl").read_text()
    [sources] = re.findall(r"sources += (\[\"dray.*\])", text)
    assert all((ROOT / source).exists() for source in json.loads(sources))
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    # Mounted, so that the image's copies are replaced by newer ones.
    assert {f"~/dray/{source}" for source in json.loads(sources)} <= config["file_mounts"].keys()
    [install] = [command for command in config["setup_commands"] if "cmp -s" in command]
    unless, _, commands = install.partition(" || ")
    assert unless == "cmp -s ~/dray/constraints.txt ~/dray-venv/constraints.txt"
    for command in commands.strip("()").split(" && "):
        assert command.rstrip() in text
    assert f'"{config["available_node_types"]["head"]["node_config"]["ImageId"].removeprefix("resolve:ssm:")}"' in text
