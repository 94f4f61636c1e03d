"""Code comes to the workers of a cluster by itself: no node but the driver's has the project, and none has dray."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import travels
from tests.cluster.namespaces import isolated, run_isolated

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *isolated]


def seen(directory: Path, *cases: str) -> dict[str, Any]:
    ran = run_isolated(travels.__file__, directory, *cases, home=directory / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    found: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    for case, driver in found.items():
        print(f"{case}: {driver['seconds']:.1f} s")
        assert driver["rc"] == 0, f"{case}\n{driver['said']}"
    return found


def check(directory: Path, driver: dict[str, Any], *, trials: int = 1) -> None:
    """What every trial finds on a worker, and what the user is told."""
    assert re.search(
        r"sending \S+-experiment/code \(\d+ files, \d+\.\d KiB\) and dray itself to the workers", driver["said"]
    )
    assert len(driver["found"]) == trials
    for found in driver["found"]:
        for module, file in found["files"].items():
            sent = "/dray-code-" if module == "beside" else "/runtime_resources/py_modules_files/"
            assert sent in file, f"{module} is not what the driver has sent"
        assert found["left_out"] == []
        assert found["link"] == str(directory / "shared"), "a link leads where it led, and nothing of it went"
        assert found["edition"] == "first"


def test_a_server_on_the_head_lends_a_node_with_nothing_to_one_experiment_after_another(tmp_path: Path) -> None:
    driver = seen(tmp_path, "served")["served"]
    first, second = driver["found"]
    assert (first["edition"], second["edition"]) == ("first", "second")
    assert first["pid"] == second["pid"], "the second experiment trains in the process of the first"
    for found in (first, second):
        assert "/runtime_resources/py_modules_files/" in found["files"]["dray"]
        assert found["left_out"] == []
        assert found["link"] == str(tmp_path / "shared")


def test_so_does_a_notebooks_and_an_experiment_that_is_resumed_has_the_code_that_it_began_with(tmp_path: Path) -> None:
    drivers = seen(tmp_path, "notebook", "resumed")
    check(tmp_path, drivers["notebook"])
    # Meanwhile the script's directory has another edition.
    check(tmp_path, drivers["resumed"], trials=2)
