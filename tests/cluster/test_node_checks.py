"""What makes a node one where no trial can run, found on the node itself."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from dray.cluster.node_check import (
    Needs,
    Trouble,
    UnfitNode,
    directory_trouble,
    other_versions,
    versions,
    write_sign,
)
from dray.storage import Location
from dray.worker.unfit import unfit_by

HERE = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.9.1+cpu", "dray": "0.1.0"}


@pytest.mark.parametrize(
    ("differs", "told"),
    [
        ({}, None),
        ({"torch": "2.9.1+cu128"}, None),  # the head has no GPU
        ({"python": "3.11.2"}, None),
        ({"python": "3.12.7"}, "has python 3.12.7, but the driver has python 3.11.7"),
        ({"torch": "2.9.0+cpu"}, "has torch 2.9.0+cpu, but the driver has torch 2.9.1+cpu"),
        ({"torch": ""}, "has torch none, but the driver has torch 2.9.1+cpu"),
        ({"ray": "2.60.1", "dray": "0.2"}, "has ray 2.60.1, dray 0.2, but the driver has ray 2.60.0, dray 0.1.0"),
    ],
    ids=["same", "build", "patch", "python", "torch", "no-torch", "two"],
)
def test_versions_that_count_are_the_drivers(differs: dict[str, str], told: str | None) -> None:
    found = other_versions(HERE, HERE | differs)
    assert (found.what if found else None) == told


def test_a_directory_is_the_drivers_if_its_sign_is_there(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    write_sign(mine, "run-1")
    write_sign(other, "run-0")
    assert directory_trouble(str(mine), "run-1") is None
    assert [path.name for path in mine.iterdir()] == [".seen-by-all"], "what it wrote is gone again"
    assert trouble(other, "run-1") == ("unseen", f"has a different directory {other} than the driver")
    assert trouble(tmp_path / "nowhere", "run-1")[0] == "unseen"
    (mine / ".seen-by-all").unlink()
    assert trouble(mine, "run-1")[0] == "unseen"
    write_sign(mine, "run-2")
    assert directory_trouble(str(mine), "run-2") is None


def test_a_directory_that_need_not_be_the_drivers_is_made(tmp_path: Path) -> None:
    assert directory_trouble(str(tmp_path / "a" / "b"), None) is None
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    assert trouble(tmp_path / "file" / "b", None) == (
        "refused",
        f"can't write to {tmp_path / 'file' / 'b'}: Not a directory",
    )


def trouble(directory: Path, sign: str | None) -> Trouble:
    found = directory_trouble(str(directory), sign)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EROFS, "refused")], ids=str
)
def test_an_unwritable_directory_is_reported_with_the_cause(
    number: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sign(tmp_path, "run")

    def write(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", write)
    assert trouble(tmp_path, "run").kind == kind
    assert os.strerror(number) in trouble(tmp_path, "run").what
    assert [path.name for path in tmp_path.iterdir()] == [".seen-by-all"]


class Store:
    """An object store that can be used, or not; counts how often that is tried."""

    tried = 0
    refuses = False

    def __init__(self, location: Location, **_: Any) -> None:
        pass

    def probe(self) -> None:
        Store.tried += 1
        if Store.refuses:
            raise PermissionError("ACCESS_DENIED")


def test_the_object_store_is_tried_once_a_node_until_it_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("dray.storage.RemoteDirectory", Store)
    monkeypatch.setattr(Store, "tried", 0)
    needs = Needs(versions=versions(), directory=str(tmp_path), sign=None, store=Location("s3://bucket/digits-1"))
    monkeypatch.setattr(Store, "refuses", True)
    for _ in range(2):
        with pytest.raises(UnfitNode, match=r"^node \S+ \(.+\) can't use the experiment's storage: ACCESS_DENIED; "):
            needs.check_this_node("run-1")
    monkeypatch.setattr(Store, "refuses", False)
    for run in ("run-1", "run-1", "run-2"):
        needs.check_this_node(run)
    assert Store.tried == 4


def test_a_node_that_is_unfit_is_named_also_by_another_process(tmp_path: Path) -> None:
    needs = Needs(versions={**versions(), "torch": "1.0"}, directory=str(tmp_path), sign=None, store=None)
    with pytest.raises(UnfitNode) as raised:
        needs.check_this_node("run")
    told = pickle.loads(pickle.dumps(raised.value))
    assert (str(told), told.trouble) == (str(raised.value), raised.value.trouble)
    assert f"({os.uname().nodename}) has torch" in str(told)
    assert "but the driver has torch 1.0; install the driver's versions there" in str(told)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("versions", None), ("full", None), ("unseen", "checkpoint_storage"), ("refused", "checkpoint_storage")],
)
def test_what_a_config_can_mend_is_its_fault(kind: Any, field: str | None) -> None:
    unfit = unfit_by(UnfitNode("10.0.0.7 (gpu-1)", Trouble(kind, "has something")))
    path, what = unfit.faults[0] if unfit.faults else (None, unfit.message)
    assert path == field
    assert "node 10.0.0.7 (gpu-1) has something; " in what
    assert unfit.resumable
