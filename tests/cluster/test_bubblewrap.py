"""The command that starts a sandbox, and what it says where there can be none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import dray
from dray.cluster import bubblewrap


def mounts(command: list[str]) -> list[tuple[str, str]]:
    """The kinds and places of a command's mounts, in order."""
    words = command[: command.index("--")]
    return [(words[at], words[at + 1]) for at, word in enumerate(words) if word in KINDS]


KINDS = ("--tmpfs", "--bind", "--ro-bind", "--ro-bind-try", "--dev-bind-try", "--proc", "--dev")


def test_only_its_own_directory_can_be_written_to(tmp_path: Path) -> None:
    own, data = tmp_path / "results/experiment/trial_3", tmp_path / "data"
    command = bubblewrap.command(["true"], own=[own], read=[data])
    assert command[-2:] == ["--", "true"]
    assert [place for kind, place in mounts(command) if kind == "--bind"] == [str(own)]
    assert ("--ro-bind", str(data)) in mounts(command)
    assert command.count("--remount-ro") == 2, "the root and /proc; in others nothing is made"


def test_a_directory_is_mounted_before_what_lies_in_it(tmp_path: Path) -> None:
    experiment = tmp_path / "results" / "experiment"
    own, logs, code = experiment / "trial_3", experiment / "trial_3" / "logs", experiment / "code"
    given = {"own": [own], "read": [logs, code, tmp_path], "hidden": [experiment, experiment.parent]}
    places = [place for _, place in mounts(bubblewrap.command(["true"], **given))]
    mine = [Path(place) for place in places if place.startswith(str(tmp_path))]
    assert set(mine) == {tmp_path, experiment.parent, experiment, own, logs, code}
    for at, place in enumerate(mine):
        assert not any(later in place.parents for later in mine[at:])
    assert places.index("/tmp") < places.index(str(mine[0])), "an empty one must not hide the others"


def test_what_can_be_read_is_python_the_system_and_what_is_named(tmp_path: Path) -> None:
    places = [Path(place) for kind, place in mounts(bubblewrap.command(["true"])) if kind.startswith("--ro-bind")]
    assert {Path(sys.prefix), Path(sys.base_prefix), Path(dray.__file__).parents[1], Path("/usr")} <= set(places)
    for secret in ("/", "/root", "/home", "/run", "/var", "/etc", "/etc/shadow", str(Path.home()), str(tmp_path)):
        assert Path(secret) not in places
    assert not any(path in Path.home().joinpath(".ssh").parents for path in places)


def test_a_link_leads_where_it_does_outside(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    read = mounts(bubblewrap.command(["true"], read=[tmp_path / "data"]))
    assert {("--ro-bind", str(tmp_path / name)) for name in ("data", "disk")} <= set(read)


def test_devices_of_gpus_are_there_only_for_trials_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(bubblewrap, "GPUS", (f"{tmp_path}/nvidia*",))
    device = ("--dev-bind-try", str(tmp_path / "nvidia0"))
    assert device in mounts(bubblewrap.command(["true"], gpu=True))
    assert device not in mounts(bubblewrap.command(["true"]))


def test_its_environment_has_no_variable_that_is_not_listed() -> None:
    outside = {"PATH": "/bin", "TZ": "UTC", "AWS_SECRET_ACCESS_KEY": "x", "RAY_AUTH_TOKEN": "x", "HOME": "/root"}
    inside = bubblewrap.variables({**outside, "DRAY_STORAGE": "s3://b", "PYTHONPATH": "/lib/mine"})
    assert {name: inside[name] for name in ("PATH", "TZ", "HOME")} == {"PATH": "/bin", "TZ": "UTC", "HOME": "/tmp"}
    assert "/lib/mine" in inside["PYTHONPATH"].split(os.pathsep)
    assert not {"AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "DRAY_STORAGE"} & inside.keys()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "has no bubblewrap (the command bwrap)"),
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "does not allow a sandbox: bwrap: No per"),
        ("exit 3", "does not allow a sandbox: bwrap exited with code 3"),
        ("exit 0", ""),
    ],
)
def test_a_machine_without_sandboxes_says_why(
    script: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / bubblewrap.TOOL).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / bubblewrap.TOOL).chmod(0o755)
    found = bubblewrap.why_impossible()
    assert found.startswith(why)
    assert bool(found) == bool(why)
