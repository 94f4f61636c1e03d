"""The files for Ray's launcher have no fault but what is to be filled in; each fault that they could have is found."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from dray.cluster.checks import ec2_model
from dray.cluster.checks.launcher_file import faults, spot_field
from tests.cli.conftest import dray  # noqa: F401 - a fixture
from tests.cli.said import Said

ROOT = Path(__file__).parents[1]
FILES = ["cluster.yaml", "clusters/gcp.yaml", "clusters/local.yaml"]
FILLED = {"FILL_IN_KEY": "~/.ssh/key"}
"""What is filled in; anything else is a word."""

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


def ray_takes(config: dict[str, Any]) -> bool:
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(copy.deepcopy(config)))
    except Exception:
        return False
    return True


# --------------------------------------------------------------------------------------------------------- as shipped
@pytest.mark.parametrize("name", FILES)
def test_a_filled_in_shipped_file_has_no_fault(name: str) -> None:
    assert faults(filled(name)) == []
    assert ray_takes(filled(name))


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
    assert spot_field(spot["node_config"]) is not None
    assert spot_field(on_demand["node_config"]) is None
    assert spot["priority"] > on_demand["priority"]
    assert {name: node["labels"]["ray.io/node-group"] for name, node in types.items()} == {name: name for name in types}


def test_the_example_of_reserved_machines_has_no_fault() -> None:
    text = (ROOT / "cluster.yaml").read_text()
    [block] = re.findall(r"(?m)^  # gpu_reserved:\n(?:  #.*\n)+", text)
    shown = text.replace(block, re.sub(r"(?m)^  # ", "  ", block))
    config = yaml.safe_load(re.sub(r"FILL_IN_\w+", "cr-1", shown))
    reserved = config["available_node_types"]["gpu_reserved"]
    assert faults(config) == []
    assert ray_takes(config)
    assert reserved["priority"] > config["available_node_types"]["gpu_spot"]["priority"]
    reserved["node_config"]["CapacityReservationSpecification"]["CapacityReservationTarget"] = {"Id": "cr-1"}
    [(path, told)] = faults(config)
    assert path.endswith("gpu_reserved.node_config.CapacityReservationSpecification.CapacityReservationTarget.Id")
    assert "CapacityReservationId" in told


@pytest.mark.parametrize("name", FILES)
def test_a_driver_on_the_head_joins_the_cluster(name: str) -> None:
    # `ray submit` runs it with what ~/.bashrc exports, and names no address itself.
    [exports] = [line for line in filled(name)["setup_commands"] if "export" in line]
    assert " RAY_ADDRESS=auto " in exports


@pytest.mark.parametrize("name", FILES)
def test_the_driver_of_the_first_lines_finds_what_it_imports(name: str) -> None:
    [driver] = set(re.findall(r"ray submit \S+ (\S+)/driver.py", (ROOT / name).read_text()))
    config = filled(name)
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
    assert ray_takes(config)
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
HEAD, SPOT, MORE = (f"available_node_types.{name}" for name in ("head", "gpu_spot", "gpu_on_demand"))
ENVIRONMENT = "setup_commands.1"
START = "head_start_ray_commands.1"
TOKEN = "file_mounts.[~/.ray/auth_token]"


def without(what: str) -> Callable[[str], str]:
    return lambda command: command.replace(what, "")


def with_(what: str) -> Callable[[str], str]:
    return lambda command: command + what


def storage(where: str) -> Callable[[str], str]:
    return lambda command: re.sub(r"DRAY_STORAGE=\S+", where, command)


def opened(port: int, cidr: str = "0.0.0.0/0", field: str = "IpRanges") -> dict[str, Any]:
    key = "CidrIp" if field == "IpRanges" else "CidrIpv6"
    return {"IpPermissions": [{"FromPort": port, "ToPort": port, "IpProtocol": "tcp", field: [{key: cidr}]}]}


FAULTS: dict[str, tuple[str, Changed, dict[str, str]]] = {
    # what: the file, what is changed in it, and the faults: each field, and what of it is told
    "a field of a machine, misspelt": (
        "cluster.yaml",
        {f"{SPOT}.node_config.InstanceMarketOption": {"MarketType": "spot"}},
        {f"{SPOT}.node_config.InstanceMarketOption": "unknown field; did you mean InstanceMarketOptions?"},
    ),
    "a field within a field, misspelt": (
        "cluster.yaml",
        {f"{HEAD}.node_config.BlockDeviceMappings.0.Ebs": {"VolumeSice": 150}},
        {f"{HEAD}.node_config.BlockDeviceMappings.0.Ebs.VolumeSice": "unknown field; did you mean VolumeSize?"},
    ),
    "text where there is a number": (
        "cluster.yaml",
        {f"{HEAD}.node_config.BlockDeviceMappings.0.Ebs.VolumeSize": "150"},
        {f"{HEAD}.node_config.BlockDeviceMappings.0.Ebs.VolumeSize": "must be an integer, got '150'"},
    ),
    "a mapping where there is a list": (
        "cluster.yaml",
        {f"{HEAD}.node_config.BlockDeviceMappings": {"DeviceName": "/dev/sda1"}},
        {f"{HEAD}.node_config.BlockDeviceMappings": "must be a list, got"},
    ),
    "text where there is a mapping": (
        "cluster.yaml",
        {f"{SPOT}.node_config.IamInstanceProfile": "dray-worker"},
        {f"{SPOT}.node_config.IamInstanceProfile": "must be a mapping of Arn, Name, ..., got 'dray-worker'"},
    ),
    "a number where there is text": (
        "cluster.yaml",
        {f"{SPOT}.node_config.IamInstanceProfile": {"Name": 5}},
        {f"{SPOT}.node_config.IamInstanceProfile.Name": "must be a string, got 5"},
    ),
    "text where there is yes or no": (
        "cluster.yaml",
        {f"{SPOT}.node_config.EbsOptimized": "yes, please"},
        {f"{SPOT}.node_config.EbsOptimized": "must be true or false, got 'yes, please'"},
    ),
    "a word that AWS does not know": (
        "cluster.yaml",
        {f"{SPOT}.node_config.InstanceMarketOptions.MarketType": "cheap"},
        {f"{SPOT}.node_config.InstanceMarketOptions.MarketType": "it has spot, "},
    ),
    "a machine that AWS does not have": (
        "cluster.yaml",
        {f"{SPOT}.node_config.InstanceType": "g5.2xlrage"},
        {f"{SPOT}.node_config.InstanceType": "AWS has no InstanceType 'g5.2xlrage'; did you mean g5.2xlarge?"},
    ),
    "a label that is not the type's name": (
        "cluster.yaml",
        {f"{SPOT}.labels": {"ray.io/node-group": "spot"}},
        {f"{SPOT}.labels.ray.io/node-group": "must be gpu_spot, the type's name, got spot"},
    ),
    "a mount that is not there": (
        "cluster.yaml",
        {"file_mounts.[/data]": "~/nothing/there"},
        {"file_mounts./data": "no such file or directory: ~/nothing/there"},
    ),
    "no token": ("cluster.yaml", {TOKEN: GONE}, {"file_mounts": "add ~/.ray/auth_token: ~/.ray/auth_token"}),
    "a token that was not made": (
        "cluster.yaml",
        {TOKEN: "~/.ray/other/.ray/auth_token"},
        {"file_mounts.~/.ray/auth_token": "ray get-auth-token --generate && chmod 600"},
    ),
    "a token that nobody asks for": (
        "cluster.yaml",
        {ENVIRONMENT: without("RAY_AUTH_MODE=token")},
        {"setup_commands": "no command sets RAY_AUTH_MODE=token"},
    ),
    "the token off": (
        "cluster.yaml",
        {START: lambda command: command.replace("ray start", "RAY_AUTH_MODE=disabled ray start")},
        {"setup_commands": "no command sets RAY_AUTH_MODE=token"},
    ),
    "the dashboard for all": (
        "clusters/gcp.yaml",
        {START: with_(" --dashboard-host=0.0.0.0")},
        {START: "--dashboard-host=0.0.0.0 lets whoever can reach the port run jobs"},
    ),
    "the dashboard for all, by IPv6": (
        "clusters/local.yaml",
        {START: with_(" --dashboard-host ::")},
        {START: "host=::"},
    ),
    "the dashboard for all, by Ray's default": (
        "cluster.yaml",
        {"head_start_ray_commands": GONE},
        {"head_start_ray_commands": "by default Ray opens the dashboard"},
    ),
    "a port for all": (
        "cluster.yaml",
        {"provider.security_group": opened(8265)},
        {"provider.security_group.IpPermissions.0": "opens ports 8265 to 8265 to the world (0.0.0.0/0)"},
    ),
    "a port for all, by IPv6": (
        "cluster.yaml",
        {"provider.security_group": opened(10001, "::/0", "Ipv6Ranges")},
        {"provider.security_group.IpPermissions.0": "opens ports 10001 to 10001 to the world (::/0)"},
    ),
    "a rule for ports, misspelt": (
        "cluster.yaml",
        {"provider.security_group": {"IpPermissions": [{"FormPort": 22}]}},
        {"provider.security_group.IpPermissions.0.FormPort": "did you mean FromPort?"},
    ),
    "a head that may be taken away": (
        "cluster.yaml",
        {f"{HEAD}.node_config.InstanceMarketOptions": {"MarketType": "spot"}},
        {f"{HEAD}.node_config.InstanceMarketOptions": "the cloud can reclaim a spot machine at any time"},
    ),
    "a head that may be taken away, on Google Cloud": (
        "clusters/gcp.yaml",
        {f"{HEAD}.node_config.scheduling": [{"preemptible": True}]},
        {f"{HEAD}.node_config.scheduling": "the cloud can reclaim a spot machine at any time"},
    ),
    "results nowhere": (
        "cluster.yaml",
        {ENVIRONMENT: storage("")},
        {"setup_commands": "results need a place that all nodes see"},
    ),
    "results on each node's own disk": (
        "cluster.yaml",
        {ENVIRONMENT: storage("DRAY_HOME=/mnt/results")},
        {"setup_commands": "/mnt/results is on each node's own disk"},
    ),
    "results at home": (
        "clusters/local.yaml",
        {ENVIRONMENT: lambda command: command.replace("/mnt/dray_results", "$HOME/results")},
        {"setup_commands": "$HOME/results is on each node's own disk"},
    ),
    "workers that may not write": (
        "cluster.yaml",
        {f"{MORE}.node_config.IamInstanceProfile": GONE},
        {f"{MORE}.node_config.IamInstanceProfile": "may not write to s3://filled-in/dray"},
    ),
    "workers that may not write, on Google Cloud": (
        "clusters/gcp.yaml",
        {f"{SPOT}.node_config.serviceAccounts": GONE},
        {f"{SPOT}.node_config.serviceAccounts": "may not write to gs://filled-in/dray"},
    ),
}


@pytest.mark.slow  # some hundredths of a second each, but there are many
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_found_that_ray_lets_through(what: str) -> None:
    name, changes, expected = FAULTS[what]
    config = changed(filled(name), changes)
    found = faults(config)
    assert [path for path, _ in found] == list(expected), found
    for path, told in found:
        assert expected[path] in told


@pytest.mark.parametrize(
    ("changes", "path", "told"),
    [
        ({"idle_timeout_minute": 10}, "idle_timeout_minute", "unknown field; did you mean idle_timeout_minutes?"),
        ({f"{SPOT}.max_worker": 2}, f"{SPOT}.max_worker", "unknown field; did you mean max_workers?"),
        ({f"{SPOT}.node_config": GONE}, f"{SPOT}.node_config", "missing required field"),
        ({"max_workers": "8"}, "max_workers", "'8' is not of type 'integer'"),
        ({"provider": GONE}, "provider", "missing required field"),
        ({"head_node_type": "haed"}, "file", "Ray refuses it: `head_node_type` must be one of `available_node_types`"),
        ({f"{SPOT}.min_workers": 9}, "file", "Ray refuses it: "),
    ],
)
def test_what_ray_finds_is_reported_too(changes: Changed, path: str, told: str) -> None:
    [found] = faults(changed(filled("cluster.yaml"), changes))
    assert found[0] == path
    assert told in found[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"provider.security_group": opened(8265, "203.0.113.0/24")},
        {"provider.security_group": opened(22)},
        {START: with_(" --dashboard-host=127.0.0.1")},
        {"head_setup_commands.0": "pip install boto3==1.44.5 && python -m pip install --upgrade pip"},
        {"head_setup_commands.0": "pip install 'ray @ https://example.org/ray-2.60.0-cp311-linux.whl'"},
        {
            ENVIRONMENT: storage("DRAY_HOME=/mnt/efs/results"),
            "setup_commands.0": "sudo mount -t nfs4 a:/ /mnt/efs/results",
        },
        {f"{SPOT}.resources": {"GPU": 1, "accelerator_type:A10G": 1}},
        {f"{SPOT}.resources": GONE},
        {f"{SPOT}.node_config.SubnetIds": ["subnet-1"]},
        {f"{SPOT}.node_config.ImageId": "ami-0123456789abcdef0"},
        {"docker": {"image": "rayproject/ray:2.60.0-py311-gpu", "container_name": "dray"}},
    ],
    ids=lambda changes: str(next(iter(changes))),
)
def test_valid_files_have_no_fault(changes: Changed) -> None:
    found = faults(changed(filled("cluster.yaml"), changes))
    assert [
        fault for fault in found if fault[0] != "setup_commands"
    ] == []  # without the first, the token stays readable


def test_a_token_that_others_may_read_is_a_fault(this_machine: Path) -> None:
    (this_machine / ".ray/auth_token").chmod(0o644)
    [(path, told)] = faults(filled("cluster.yaml"))
    assert path == "file_mounts.~/.ray/auth_token"
    assert told.endswith("chmod 600 ~/.ray/auth_token")


def test_without_boto3_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ec2_model.shapes.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "botocore.session", None)
    assert faults(filled("cluster.yaml")) == [
        ("provider.type", "aws needs boto3 on this machine, for `ray up` too: pip install boto3")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_values_are_reported_and_never_raise(seed: int) -> None:
    def paths(value: Any, *path: Any) -> list[tuple[Any, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(each for name, item in inner for each in paths(item, *path, name))]

    random = Random(seed)
    for _ in range(50):
        config = json.loads(json.dumps(filled(random.choice(FILES))))
        config["provider"]["security_group"] = opened(8265)
        *path, last = random.choice(paths(config)[1:])
        place = config
        for name in path:
            place = place[name]
        place[last] = random.choice([None, True, 5, -1.5, "", "x", [], ["x"], {}, {"x": 1}, [None], [{"a": None}]])
        assert all(path and told for path, told in faults(config))


# --------------------------------------------------------------------------------------------------------- the command
def test_the_command_reports_all_faults_at_once(tmp_path: Path, dray: Callable[..., Said]) -> None:  # noqa: F811
    names = ["a field of a machine, misspelt", "a mount that is not there", "the dashboard for all", "no token"]
    every = {path: value for name in names for path, value in FAULTS[name][1].items()}
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump(changed(filled("cluster.yaml"), every)))
    said = dray("cluster", "validate", file)
    assert said.code == 2
    first, *others = said.err.splitlines()
    assert first == f"dray: {file} has 4 errors:"
    paths = {path for name in names for path in FAULTS[name][2]}
    assert {line.split(": ")[0].strip() for line in others} == paths
    said = dray("cluster", "validate", file, "--json")
    assert said.code == 2
    assert {fault["path"] for fault in json.loads(said.out)} == paths


def test_the_command_says_that_nothing_is_wrong(tmp_path: Path, dray: Callable[..., Said]) -> None:  # noqa: F811
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(filled("cluster.yaml")))
    said = dray("cluster", "validate", file)
    assert (said.code, said.err) == (0, "")
    assert said.out == f"{file}: no errors found (provider aws); start the cluster with `ray up {file}`\n"
    assert dray("cluster", "validate", file, "--json").value == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "line 1, column 5: not valid YAML"),
        ("a: 1\na: 2\n", "the field 'a' is given twice"),
        ("- a\n", "must be a mapping"),
        ("", "must be a mapping of fields to values, got an empty file"),
        ("cluster_name: 5\n", "provider: missing required field"),
        ("cluster_name: a\nprovider: aws\n", "provider: 'aws' is not of type 'object'"),
    ],
)
def test_files_that_are_no_cluster_file_are_errors(
    text: str,
    told: str,
    tmp_path: Path,
    dray: Callable[..., Said],  # noqa: F811
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    said = dray("cluster", "validate", file)
    assert said.code == 2
    assert told in said.err
    assert "Traceback" not in said.err


def test_a_missing_file_is_an_error(dray: Callable[..., Said]) -> None:  # noqa: F811
    said = dray("cluster", "validate", "nowhere.yaml")
    assert said.code == 2
    assert "no such file: nowhere.yaml" in said.err
