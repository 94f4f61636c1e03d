"""The package's face: what it offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dray


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_driver_has_no_need_of_torch() -> None:
    code = "import sys, dray.experiment.experiment, dray.experiment.run; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_exist_and_an_unknown_one_is_an_attribute_error() -> None:
    assert all(getattr(dray, name) is not None for name in dray.__all__)
    with pytest.raises(AttributeError, match="module 'dray' has no attribute 'Experimnt'"):
        dray.Experimnt  # noqa: B018
