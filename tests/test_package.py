"""The package's public names, the cost of importing it, and its requirements."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dray
from tests.docs.pages import PROJECT, ROOT
from tests.sources import at_import, imported, nodes

FOR_AN_EXTRA = {
    "dray/agents/server.py",
    "dray/observers/mlflow_runs.py",
    "dray/observers/wandb_runs.py",
    "dray/transformers.py",
}
"""Modules that are imported only if the package is installed."""
IF_INSTALLED = {"datasets", "torchao", "transformers"}
"""In no extra: whoever uses them has them."""


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not know the packages of every distribution")
def test_each_package_that_is_imported_is_a_requirement_and_not_only_of_ray_or_torch() -> None:
    plain, extras = names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    with_extras = plain.union(IF_INSTALLED, *(names(listed) for extra, listed in extras.items() if extra != "dev"))
    provided_by = {**packages_distributions(), "pydantic_core": ["pydantic"]}  # which pins the other's version
    undeclared = set()
    ours = {*sys.stdlib_module_names, "dray", "searchers"}
    for file, found in nodes().items():
        early = set() if file in FOR_AN_EXTRA else set(at_import(found[0]))
        for node in found:
            for package in {name.partition(".")[0] for name in imported(node)} - ours:
                providers = {canonicalize_name(each) for each in provided_by.get(package, [package])}
                if not providers & (plain if node in early else with_extras):
                    undeclared.add((package, file))
    assert undeclared == set()


def test_constraints_pin_all_requirements_that_make_installs() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = names([line for line in lines if "==" in line and not line.startswith("#")])
    extras = {extra: listed for extra, listed in PROJECT["optional-dependencies"].items() if extra != "azure"}
    assert names(PROJECT["dependencies"]).union(*map(names, extras.values())) - pinned == set()


@pytest.mark.api("8.15")
def test_public_names_are_loaded_on_first_use() -> None:
    code = (
        "import sys, dray\n"
        "assert dray.__version__ and '%(levelname)s' in dray.LOG_FORMAT\n"
        "assert set(dray.__all__) <= set(dir(dray))\n"
        "assert not {'torch', 'ray', 'pydantic', 'pandas'} & set(sys.modules)\n"
        "assert dray.get_cluster_info() is None\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_driver_has_no_need_of_torch() -> None:
    code = "import sys, dray.experiment.experiment, dray.experiment.run; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_exist_and_an_unknown_one_is_an_attribute_error() -> None:
    assert all(getattr(dray, name) is not None for name in dray.__all__)
    with pytest.raises(AttributeError, match="module 'dray' has no attribute 'Experimnt'"):
        dray.Experimnt  # noqa: B018
