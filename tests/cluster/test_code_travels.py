"""Code comes to the workers of a cluster by itself: no node but the driver's has the project, and none has dray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster import travels
from tests.cluster.namespaces import isolated, run_isolated
from tests.ray.harness import lines

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, *isolated]


def test_a_resumed_experiment_sends_the_code_that_it_began_with(tmp_path: Path) -> None:
    ran = run_isolated(travels.__file__, tmp_path, home=tmp_path / "home")
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    said = (tmp_path / "said.txt").read_text()
    sending = r"sending \S+experiment/code \(\d+ files, \d+\.\d KiB\) and dray itself to the workers"
    assert len(re.findall(sending, said)) == 2
    trials = lines(tmp_path / "found.jsonl")
    assert len(trials) == 2
    for found in trials:
        for module, file in found["files"].items():
            sent = "/dray-code-" if module == "beside" else "/runtime_resources/py_modules_files/"
            assert sent in file, f"{module} is not what the driver has sent"
        assert found["left_out"] == []
        assert found["link"] == str(tmp_path / "shared"), "a link leads where it led, and nothing of it went"
        assert found["edition"] == "first", "meanwhile the script's directory has another"
