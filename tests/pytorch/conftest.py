"""Fixtures for tests of the PyTorch API: a host in a temporary directory, and one way to run a trial on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dray import pytorch
from dray.hosts import use_host
from tests.pytorch.fakes import FakeHost
from tests.pytorch.processes import backend as backend
from tests.pytorch.processes import results_of

#: The fixture `fit`.
Fit = Callable[..., Any]


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "trial")


@pytest.fixture
def fit(host: FakeHost) -> Fit:
    """Make a trial, train it on the host, return it."""
    default = host

    def run(
        trial_class: Callable[[pytorch.PyTorchTrialContext], Any],
        host: FakeHost | None = None,
        *,
        init: dict[str, Any] | None = None,
        prepare: Callable[[Any], object] = lambda trial: None,
        callbacks: Mapping[str, pytorch.PyTorchCallback] | None = None,
        **fit: Any,
    ) -> Any:
        with use_host(host or default), pytorch.init(**(init or {})) as context:
            trial = trial_class(context)
            if callbacks is not None:
                trial.callbacks.update(callbacks)
            prepare(trial)
            pytorch.Trainer(trial, context).fit(**fit)
        return trial

    return run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Path:
    """The state that the ranks of a module share."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, directory: Path, backend: str) -> list[dict[str, Any]]:
    """Two ranks' results in the scenarios of this module, which is their script; see `serve`."""
    return results_of(2, request.module.__file__, directory, backend)
