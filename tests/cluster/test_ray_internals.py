"""What dray uses of Ray that is not of Ray's public API: told by name when a new Ray has it no more, or otherwise."""

from __future__ import annotations

import importlib
import inspect

import pytest

USED = {
    # module, attribute path: the parameters that are given, and the file that gives them
    ("ray._private.state", "GlobalState.get_max_resources_from_cluster_config"): (set(), "dray/cluster/ray_cluster.py"),
    ("ray._private.runtime_env.working_dir", "upload_working_dir_if_needed"): (
        {"runtime_env", "include_gitignore", "scratch_dir", "logger"},
        "dray/cluster/ray_cluster.py",
    ),
    ("ray.tune.schedulers", "FIFOScheduler.on_trial_result"): (
        {"tune_controller", "trial", "result"},
        "searchers/ray_tune.py",
    ),
    ("ray.tune.schedulers", "FIFOScheduler.on_trial_complete"): (
        {"tune_controller", "trial", "result"},
        "searchers/ray_tune.py",
    ),
    ("ray.tune.schedulers", "FIFOScheduler.choose_trial_to_run"): ({"tune_controller"}, "searchers/ray_tune.py"),
    ("ray.tune.search", "Searcher.suggest"): ({"trial_id"}, "searchers/ray_tune.py"),
    ("ray.tune.callback", "Callback.on_trial_recover"): ({"trial"}, "searchers/ray_tune.py"),
    ("ray.train.v2.api.config", "RunConfig"): ({"worker_runtime_env", "logging_config"}, "dray/cluster/lending.py"),
    ("ray.train.v2.api.config", "FailureConfig"): (
        {"max_failures", "controller_failure_limit"},
        "dray/cluster/lending.py",
    ),
}


@pytest.mark.parametrize(("module", "path"), USED)
def test_ray_has_what_dray_uses_of_its_inside(module: str, path: str) -> None:
    parameters, file = USED[module, path]
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
        assert found is not None, f"Ray has no {module}.{path} any more; {file} uses it"
    missing = parameters - set(inspect.signature(found).parameters)
    assert not missing, f"Ray's {module}.{path} takes no {missing} any more; {file} gives them"


@pytest.mark.parametrize(
    ("module", "variable"),
    [
        ("ray.train.v2._internal.constants", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"),
        ("ray.train.v2._internal.constants", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"),
        ("ray.train.v2._internal.constants", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"),
        ("ray.tune.execution.tune_controller", "TUNE_MAX_PENDING_TRIALS_PG"),
        ("ray.tune.execution.tune_controller", "TUNE_GLOBAL_CHECKPOINT_S"),
        ("ray.tune.execution.tune_controller", "TUNE_PRINT_ALL_TRIAL_ERRORS"),
    ],
)
def test_ray_still_reads_the_environment_variables_that_dray_sets(module: str, variable: str) -> None:
    source = inspect.getsource(importlib.import_module(module))
    assert variable in source, f"{module} reads {variable} no more: what dray sets has no effect"
