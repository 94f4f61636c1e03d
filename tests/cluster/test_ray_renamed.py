"""Searches on copies of Ray in which a private name that dray uses has another name, as after a refactoring of Ray.

The name is changed in all of Ray's Python files, so that Ray itself works. Its compiled part uses none of these names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray

import dray
from tests.cluster.test_ray_internals import NAMES
from tests.ray.harness import OWN_CLUSTER, TRIALS, recorded, write_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

RAY = Path(ray.__file__).parent
# dray does not import this class, but reads this attribute of an instance.
OF_INSTANCES = {"RayActorManager": "RayActorManager._tracked_actors_to_task_futures"}
IMPORTED_BY_COMPILED_CODE = {"ray._private.utils", "ray._private.worker"}
COSTS: dict[str, set[str]] = {}
"""What the absence of a name or a module costs."""
for _, cost, name, _ in NAMES:
    module, _, attribute = name.partition(":")
    COSTS.setdefault(f"{module}:{OF_INSTANCES.get(attribute, attribute)}", set()).add(cost)
    if attribute not in OF_INSTANCES and module not in IMPORTED_BY_COMPILED_CODE:
        COSTS.setdefault(module, set()).add(cost)

USED_ON_A_JOINED_CLUSTER = ("ray.autoscaler.", "ray._private.runtime_env.")
DRIVER = """
import sys
import ray
from ray.cluster_utils import Cluster
from dray.cli import main

_, copy, joins, *command = sys.argv
assert ray.__file__.startswith(copy)
if joins == "True":
    # Without the process of an autoscaler, dray asks the head for what an autoscaler is doing.
    node = {"num_cpus": 1, "include_dashboard": False, "no_monitor": True}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=node)
main(command)
"""


def renamed(name: str, to: Path) -> None:
    """Make a copy of the installed Ray in which ``module:attribute`` or ``module`` has another name."""
    copy = to / "ray"
    shutil.copytree(RAY, copy, copy_function=os.symlink)
    module, _, attribute = name.partition(":")
    place = to.joinpath(*module.split("."))
    file = place if place.is_dir() else place.with_suffix(".py")
    parent, _, last = module.rpartition(".")
    *owner, old = attribute.split(".")
    new = f"{old or last}_renamed"
    imported = re.compile(rf"(?<=\bfrom {re.escape(parent)} import )(\([^)]*\)|.*)")
    imports_it = re.compile(rf"\bfrom ({re.escape(parent)}|{re.escape(module)}) import (\([^)]*)?.*\b{old}\b")
    for path in copy.rglob("*.py"):
        before = after = path.read_text()
        if not attribute:
            after = re.sub(rf"\b{re.escape(module)}\b", f"{parent}.{new}", before)
            after = imported.sub(lambda names: re.sub(rf"\b{last}\b( as)?", f"{new} as", names[0]), after)
        elif not owner:
            after = re.sub(rf"\b{last}\.{old}\b", f"{last}.{new}", before)
            if path == file or imports_it.search(before):
                after = re.sub(rf"(?<![.\w]){old}\b", new, after)
        elif path.relative_to(copy).parts[0] == module.split(".")[1]:  # a method, in its package of Ray
            after = re.sub(rf"\b{old}\b", new, before)
        if after != before:
            path.unlink()  # the link
            path.write_text(after)
    if not attribute:
        file.rename(file.with_stem(new))


@pytest.mark.parametrize("name", COSTS)
def test_without_a_private_name_a_search_loses_a_feature_and_says_so(name: str, tmp_path: Path) -> None:
    renamed(name, tmp_path / "site")
    path = tmp_path / "experiment"
    config = recorded(tmp_path / "record", trials=2, batches=10, resources={"slot": "cpu", "max_slots": 1})
    command = ["experiment", "create", write_config(tmp_path, config), TRIALS, "--path", path]
    joins = name.startswith(USED_ON_A_JOINED_CLUSTER)
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, tmp_path / "site", str(joins), *command],
        env={**os.environ, **OWN_CLUSTER, "PYTHONPATH": str(tmp_path / "site")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout
    assert dray.Result(path).trials["state"].tolist() == ["COMPLETED"] * 2
    for cost in COSTS[name]:
        assert ran.stdout.count(cost) == 1, ran.stdout
