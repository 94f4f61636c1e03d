"""The files for Ray's launcher have no fault but what is to be filled in; each fault that they could have is found."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.checks.launcher_file import faults
from tests.cli.conftest import dray  # noqa: F401 - a fixture
from tests.cli.said import Said

ROOT = Path(__file__).parents[1]
FILES = ["cluster.yaml", "clusters/gcp.yaml", "clusters/local.yaml"]
FILLED = {"FILL_IN_KEY": "~/.ssh/key"}
"""What is filled in; anything else is a word."""

pinned_ray = pytest.mark.skipif(
    f"\nray=={version('ray')}\n" not in (ROOT / "constraints.txt").read_text(),
    reason="the files are for the pinned Ray",
)
pytestmark = pinned_ray

Changed = dict[str, Any]
GONE = object()


@pytest.fixture(autouse=True)
def this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the token and a key; the directory is the repository's."""
    for name in (".ray/auth_token", ".ssh/key"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    return tmp_path


def filled(name: str) -> dict[str, Any]:
    """The file as its user leaves it."""
    return copy.deepcopy(_filled(name))


@cache
def _filled(name: str) -> dict[str, Any]:
    text = re.sub(r"FILL_IN_\w+", lambda found: FILLED.get(found[0], "filled-in"), (ROOT / name).read_text())
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def changed(config: dict[str, Any], changes: Changed) -> dict[str, Any]:
    """A copy with other values; a name may have dots in it, if it is the last and in brackets."""
    config = json.loads(json.dumps(config))  # YAML's anchors are one object
    for path, value in changes.items():
        parts = re.findall(r"\[(.+?)\]|([^.\[\]]+)", path)
        *names, last = [bracketed or plain for bracketed, plain in parts]
        place: Any = config
        for name in names:
            place = place[int(name) if isinstance(place, list) else name]
        key: Any = int(last) if isinstance(place, list) else last
        if value is GONE:
            del place[key]
        else:
            place[key] = value(place[key]) if callable(value) else value
    return config


# --------------------------------------------------------------------------------------------------------- as shipped
@pytest.mark.parametrize("name", FILES)
def test_a_filled_in_shipped_file_has_no_fault(name: str) -> None:
    assert faults(filled(name)) == []


@pytest.mark.parametrize("name", FILES)
def test_placeholders_are_the_only_faults_and_have_a_comment(name: str) -> None:
    text = (ROOT / name).read_text()
    found = faults(yaml.safe_load(text))
    assert found
    assert all("FILL_IN_" in told and "must be replaced; the comment above it" in told for _, told in found)
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if re.search(r"FILL_IN_\w+", line):
            assert any(re.search(r"#.*\bFILL IN\b", before) for before in lines[max(0, number - 7) : number]), line


@pytest.mark.parametrize("name", FILES[:2])
def test_workers_scale_from_zero_spot_first_and_the_head_trains_nothing(name: str) -> None:
    config = filled(name)
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert (head["resources"]["GPU"], head["max_workers"]) == (0, 0)
    assert all(w["min_workers"] == 0 < w["max_workers"] <= config["max_workers"] for w in types.values())
    spot, on_demand = types.values()
    is_spot = re.compile("'spot'|'SPOT'")
    assert is_spot.search(repr(spot["node_config"]))
    assert not is_spot.search(repr([on_demand["node_config"], head["node_config"]]))
    assert spot["priority"] > on_demand["priority"]
    assert {name: node["labels"]["ray.io/node-group"] for name, node in types.items()} == {name: name for name in types}


def test_the_example_of_reserved_machines_has_no_fault() -> None:
    text = (ROOT / "cluster.yaml").read_text()
    [block] = re.findall(r"(?m)^  # gpu_reserved:\n(?:  #.*\n)+", text)
    shown = text.replace(block, re.sub(r"(?m)^  # ", "  ", block))
    config = yaml.safe_load(re.sub(r"FILL_IN_\w+", "cr-1", shown))
    reserved = config["available_node_types"]["gpu_reserved"]
    assert faults(config) == []
    assert reserved["priority"] > config["available_node_types"]["gpu_spot"]["priority"]


@pytest.mark.parametrize("name", FILES)
def test_the_driver_of_the_first_lines_joins_the_cluster_and_finds_what_it_imports(name: str) -> None:
    [driver] = set(re.findall(r"ray submit \S+ (\S+)/driver.py", (ROOT / name).read_text()))
    config = filled(name)
    # `ray submit` runs it with what ~/.bashrc exports, and names no address itself.
    [exports] = [line for line in config["setup_commands"] if "export" in line]
    assert " RAY_ADDRESS=auto " in exports
    assert config["file_mounts"]["~/code"] == driver
    commands = [*config["setup_commands"], *config.get("head_setup_commands", [])]
    assert any("~/code" in command and "code.pth" in command for command in commands)
    # Ray starts workers by way of bash, which reads ~/.bashrc again: they would lose what Ray has put there.
    assert not any("PYTHONPATH=" in command for command in commands)


# ----------------------------------------------------------------------------------------------------------------- EFA
@pytest.mark.parametrize(("name", "machine", "cards"), [("p4d", "p4d.24xlarge", 4), ("p5", "p5.48xlarge", 32)])
def test_a_node_type_with_efa_has_an_interface_on_each_network_card(name: str, machine: str, cards: int) -> None:
    config = filled("cluster.yaml")
    node_type = filled("clusters/efa.yaml")["available_node_types"][name]
    config["available_node_types"][name] = node_type
    assert faults(config) == []
    node = node_type["node_config"]
    assert (node["InstanceType"], node["Placement"]) == (machine, {"GroupName": "dray"})
    first, *others = node["NetworkInterfaces"]
    assert [each["NetworkCardIndex"] for each in (first, *others)] == list(range(cards))
    assert (first["InterfaceType"], first["DeviceIndex"]) == ("efa", 0)
    assert all((each["InterfaceType"], each["DeviceIndex"]) == ("efa-only", 1) for each in others)
    # Ray's own rules: all have a subnet and a group, and the machine has none beside them.
    from ray.autoscaler._private.aws.config import _configure_subnets_and_groups_from_network_interfaces as configured

    assert configured(node)["SubnetIds"] == ["filled-in"] * cards


def test_machines_with_efa_export_their_variables_to_every_login_shell(tmp_path: Path) -> None:
    for node_type in filled("clusters/efa.yaml")["available_node_types"].values():
        user_data = node_type["node_config"]["UserData"]
        assert user_data.startswith("#cloud-config\n")  # or cloud-init ignores it
        [file] = yaml.safe_load(user_data)["write_files"]
        assert Path(file["path"]).match("/etc/profile.d/*.sh")
        (tmp_path / "efa.sh").write_text(file["content"])
        said = subprocess.run(
            ["bash", "-euc", ". ./efa.sh; env"], cwd=tmp_path, env={}, capture_output=True, text=True, check=True
        )
        variables = dict(line.split("=", 1) for line in said.stdout.splitlines())
        assert (variables["FI_EFA_USE_HUGE_PAGE"], variables["NCCL_SOCKET_IFNAME"]) == ("0", "^docker,lo")


# -------------------------------------------------------------------------------------------------------------- faults
SPOT = "available_node_types.gpu_spot"
ENVIRONMENT = "setup_commands.1"
START = "head_start_ray_commands.1"
TOKEN = "file_mounts.[~/.ray/auth_token]"


Change = Callable[[str], str]


def without(what: str) -> Change:
    return lambda command: command.replace(what, "")


def with_(what: str) -> Change:
    return lambda command: command + what


def storage(where: str) -> Change:
    return lambda command: re.sub(r"DRAY_STORAGE=\S+", where, command)


AWS, GCP, LOCAL = FILES
FAULTS: list[tuple[str, str, Any, str, str]] = [
    # the file, a field of it, its new value, the field that is reported, and a part of the message
    (
        AWS,
        f"{SPOT}.labels",
        {"ray.io/node-group": "spot"},
        f"{SPOT}.labels.ray.io/node-group",
        "must be gpu_spot, the ",
    ),
    (AWS, "file_mounts.[/data]", "~/nothing/there", "file_mounts./data", "no such file or directory: ~/nothing/there"),
    (AWS, TOKEN, GONE, "file_mounts", "add ~/.ray/auth_token: ~/.ray/auth_token"),
    (AWS, TOKEN, "~/.ray/other/.ray/auth_token", "file_mounts.~/.ray/auth_token", "ray get-auth-token --generate && "),
    (AWS, ENVIRONMENT, without("RAY_AUTH_MODE=token"), "setup_commands", "no command sets RAY_AUTH_MODE=token"),
    (AWS, START, lambda c: f"RAY_AUTH_MODE=disabled {c}", "setup_commands", "no command sets RAY_AUTH_MODE=token"),
    (GCP, START, with_(" --dashboard-host=0.0.0.0"), START, "0.0.0.0 lets whoever can reach the port run jobs"),
    (LOCAL, START, with_(" --dashboard-host ::"), START, "host=::"),
    (AWS, "head_start_ray_commands", GONE, "head_start_ray_commands", "by default Ray opens the dashboard"),
    (AWS, ENVIRONMENT, storage(""), "setup_commands", "results need a place that all nodes see"),
    (AWS, ENVIRONMENT, storage("DRAY_HOME=/mnt/results"), "setup_commands", "/mnt/results is on each node's own disk"),
    (LOCAL, ENVIRONMENT, lambda c: c.replace("/mnt/dray_", "$HOME/"), "setup_commands", "$HOME/results is on each "),
    (AWS, "idle_timeout_minute", 10, "file", "Ray refuses it: "),
    (AWS, "provider", "aws", "provider", "Ray refuses it: 'aws' is not of type 'object'"),
    (AWS, f"{SPOT}.min_workers", "9", f"{SPOT}.min_workers", "Ray refuses it: "),
]


@pytest.mark.parametrize(("name", "field", "value", "path", "told"), FAULTS)
def test_a_fault_is_found(name: str, field: str, value: Any, path: str, told: str) -> None:
    [fault] = faults(changed(filled(name), {field: value}))
    assert fault[0] == path
    assert told in fault[1]


@pytest.mark.parametrize(
    "changes",
    [
        {START: with_(" --dashboard-host=127.0.0.1")},
        {
            ENVIRONMENT: storage("DRAY_HOME=/mnt/efs/results"),
            "setup_commands.0": "sudo mount -t nfs4 a:/ /mnt/efs/results",
        },
        {f"{SPOT}.resources": GONE},
    ],
    ids=lambda changes: str(next(iter(changes))),
)
def test_valid_files_have_no_fault(changes: Changed) -> None:
    assert faults(changed(filled("cluster.yaml"), changes)) == []


def test_a_token_that_others_may_read_is_a_fault(this_machine: Path) -> None:
    (this_machine / ".ray/auth_token").chmod(0o644)
    [(path, told)] = faults(filled("cluster.yaml"))
    assert path == "file_mounts.~/.ray/auth_token"
    assert told.endswith("chmod 600 ~/.ray/auth_token")


# --------------------------------------------------------------------------------------------------------- the command
def test_the_command_reports_all_faults_at_once(tmp_path: Path, dray: Callable[..., Said]) -> None:  # noqa: F811
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(filled("cluster.yaml")))
    said = dray("cluster", "validate", file)
    assert (said.code, said.err) == (0, "")
    assert said.out == f"{file}: no errors found (provider aws); start the cluster with `ray up {file}`\n"
    assert dray("cluster", "validate", file, "--json").value == []

    paths = {"file_mounts", "head_start_ray_commands"}
    file.write_text(yaml.safe_dump(changed(filled("cluster.yaml"), {TOKEN: GONE, "head_start_ray_commands": GONE})))
    said = dray("cluster", "validate", file)
    assert said.code == 2
    first, *others = said.err.splitlines()
    assert first == f"dray: {file} has 2 errors:"
    assert {line.split(": ")[0].strip() for line in others} == paths
    said = dray("cluster", "validate", file, "--json")
    assert said.code == 2
    assert {fault["path"] for fault in json.loads(said.out)} == paths


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no such file: "),
        ("a: [", "line 2, column 1: not valid YAML"),
        ("", "must be a mapping of fields to values, got an empty file"),
        ("cluster_name: a\nprovider: aws\n", "provider: Ray refuses it: "),
        ("provider: 5\navailable_node_types: [a]\n", "file: Ray refuses it: "),
    ],
)
def test_files_that_are_no_cluster_file_are_errors(
    text: str | None,
    told: str,
    tmp_path: Path,
    dray: Callable[..., Said],  # noqa: F811
) -> None:
    file = tmp_path / "cluster.yaml"
    if text is not None:
        file.write_text(text)
    said = dray("cluster", "validate", file)
    assert said.code == 2
    assert told in said.err
    assert "Traceback" not in said.err
