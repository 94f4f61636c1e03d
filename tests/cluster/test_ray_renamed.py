"""A search on copies of Ray in which a private name that dray uses has another name, as after Ray's next refactoring.

Ray itself works there: the name is replaced in all of Ray's Python files. dray must do without it, or say in one error
what it needs before anything trains.
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
from tests.cluster.test_ray_internals import NAMES, is_private
from tests.ray.harness import OWN_CLUSTER, TRIALS, recorded, write_config

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

RAY = Path(ray.__file__).parent
USED = {name for _, _, name, _ in NAMES if is_private(name)}
PRIVATE = sorted(USED | {name.partition(":")[0] for name in USED})
DRIVER = """
import sys, ray
from dray.cli import main
assert ray.__file__.startswith(sys.argv[1])
main(sys.argv[2:])
"""


def renamed(name: str, to: Path) -> None:
    """Make a copy of the installed Ray in which this module or attribute has another name.

    An attribute is renamed in its package of Ray, such as ``ray.train``, and in files elsewhere that name its module.
    """
    copy = to / "ray"
    shutil.copytree(RAY, copy, copy_function=os.symlink)
    module, _, attribute = name.partition(":")
    parent, _, last = (attribute or module).rpartition(".")
    new = f"{last}_renamed"
    for path in copy.rglob("*.py"):
        before = after = path.read_text()
        if not attribute:
            after = re.sub(rf"\b{re.escape(module)}\b", f"{parent}.{new}", before)
            imported = rf"(?<=\bfrom {re.escape(parent)} import )(\([^)]*\)|.*)"
            after = re.sub(imported, lambda names: re.sub(rf"\b{last}\b( as)?", f"{new} as", names[0]), after)
        elif path.relative_to(copy).parts[0] == module.split(".")[1] or module in before:
            after = re.sub(rf"\b{last}\b", new, before)
        if after != before:
            path.unlink()  # the link
            path.write_text(after)
    if not attribute:
        place = to.joinpath(*module.split("."))
        file = place if place.is_dir() else place.with_suffix(".py")
        file.rename(file.with_stem(new))


@pytest.mark.parametrize("name", PRIVATE)
def test_a_search_runs_or_says_what_it_needs_on_a_ray_without(name: str, tmp_path: Path) -> None:
    renamed(name, tmp_path / "site")
    record, path = tmp_path / "record", tmp_path / "experiment"
    config = write_config(tmp_path, recorded(record, trials=2, batches=10, resources={"slot": "cpu", "max_slots": 1}))
    command = ["experiment", "create", config, TRIALS, "--path", path]
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, tmp_path / "site", *command],
        env={**os.environ, **OWN_CLUSTER, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(ran.stdout, ran.stderr)
    if ran.returncode == 0:
        assert dray.Result(path).trials["state"].tolist() == ["COMPLETED"] * 2
    else:
        [error] = ran.stderr.splitlines()
        assert error.startswith("dray: ")
        assert re.split("[.:]", name)[-1] in error
        assert not record.exists(), "nothing has trained"
