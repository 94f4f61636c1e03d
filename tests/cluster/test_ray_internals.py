"""What dray uses of Ray that is not of Ray's public API: told by name when a new Ray has it no more, or otherwise."""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import fields
from pathlib import Path

import pytest

USED = {
    ("ray._private.parameter", "RayParams"): ({"no_monitor", "include_log_monitor"}, "dray/cluster/ray_cluster.py"),
    ("ray._private.node", "Node.start_api_server"): (
        {"include_dashboard", "raise_on_failure"},
        "dray/cluster/ray_cluster.py",
    ),
    ("ray._private.services", "ConsolePopen"): (None, "dray/cluster/ray_cluster.py"),
    ("ray._private.utils", "set_sigterm_handler"): ({"sigterm_handler"}, "dray/cluster/ray_cluster.py"),
    # module, attribute path: the parameters that are given (None: not called), and the file that gives them
    ("ray._private.state", "GlobalState.get_cluster_config"): (set(), "dray/cluster/autoscaler.py"),
    ("ray.autoscaler.v2.sdk", "get_cluster_status"): ({"gcs_address"}, "dray/cluster/autoscaler.py"),
    ("ray.experimental.internal_kv", "_internal_kv_get"): ({"key"}, "dray/cluster/autoscaler.py"),
    ("ray._private.state", "GlobalState.get_draining_nodes"): (set(), "dray/cluster/watch.py"),
    ("ray._private.runtime_env.working_dir", "upload_working_dir_if_needed"): (
        {"runtime_env", "include_gitignore", "scratch_dir", "logger"},
        "dray/cluster/packages.py",
    ),
    ("ray.autoscaler._private.util", "prepare_config"): ({"config"}, "dray/cluster/launcher.py"),
    ("ray.autoscaler._private.util", "validate_config"): ({"config"}, "dray/cluster/launcher.py"),
    ("ray.autoscaler._private.resource_demand_scheduler", "_resource_based_utilization_scorer"): (
        {"node_resources", "resources", "node_availability_summary"},
        "dray/cluster/spot_first.py",
    ),
    ("ray.autoscaler._private.node_provider_availability_tracker", "NodeProviderAvailabilityTracker.summary"): (
        set(),
        "dray/cluster/spot_first.py",
    ),
    ("ray._private.worker", "print_to_stdstream"): ({"data", "ignore_prefix"}, "dray/cluster/chatter.py"),
    ("ray._private.worker", "global_worker_stdstream_dispatcher.handlers"): (None, "dray/cluster/chatter.py"),
    ("ray._private.worker", "global_worker_stdstream_dispatcher.add_handler"): (
        {"name", "handler"},
        "dray/cluster/chatter.py",
    ),
    ("ray._private.worker", "global_worker_stdstream_dispatcher.remove_handler"): ({"name"}, "dray/cluster/chatter.py"),
    ("ray.tune.schedulers", "FIFOScheduler.on_trial_result"): (
        {"tune_controller", "trial", "result"},
        "searchers/ray_tune.py",
    ),
    ("ray.tune.schedulers", "FIFOScheduler.on_trial_error"): ({"tune_controller", "trial"}, "searchers/ray_tune.py"),
    ("ray.tune.experiment", "Trial.error_file"): (None, "searchers/ray_tune.py"),
    ("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer._create_default_callbacks"): (
        set(),
        "dray/cluster/train_run.py",
    ),
    ("ray.train.v2.api.data_parallel_trainer", "DataParallelTrainer._initialize_and_run_controller"): (
        {"controller_init_kwargs"},
        "dray/cluster/train_run.py",
    ),
    ("ray.train.v2._internal.execution.controller", "TrainController"): (
        {"scaling_policy"},
        "dray/cluster/train_run.py",
    ),
    ("ray.train.v2._internal.execution.controller", "TrainController.run"): (set(), "dray/cluster/train_run.py"),
    ("ray.train.v2._internal.execution.controller", "TrainController.get_result"): (set(), "dray/cluster/train_run.py"),
    ("ray.train.v2._internal.execution.controller", "TrainController.worker_group_cls"): (
        None,
        "dray/cluster/train_run.py",
    ),
    ("ray.train.v2._internal.execution.worker_group", "WorkerGroup._create_placement_group"): (
        {"scaling_config", "worker_group_context"},
        "dray/cluster/train_run.py",
    ),
    ("ray.train.v2._internal.execution.worker_group.placement_group_handle", "DefaultPlacementGroupHandle"): (
        set(),
        "dray/cluster/train_run.py",
    ),
    ("ray.train.v2._internal.execution.scaling_policy", "FixedScalingPolicy.after_controller_start"): (
        {"train_run_context"},
        "dray/cluster/train_run.py",
    ),
    ("ray.train.v2._internal.execution.scaling_policy", "FixedScalingPolicy._maybe_send_resource_request"): (
        set(),
        "dray/cluster/train_run.py",
    ),
    ("ray._private.authentication.authentication_utils", "is_token_auth_enabled"): (set(), "dray/cluster/admission.py"),
    ("ray._private.grpc_utils", "init_grpc_channel"): ({"address"}, "dray/cluster/admission.py"),
    ("ray._private.utils", "read_ray_address"): (set(), "dray/cluster/admission.py"),
    ("ray.core.generated.gcs_service_pb2", "GetClusterIdRequest"): (None, "dray/cluster/admission.py"),
    ("ray.core.generated.gcs_service_pb2_grpc", "NodeInfoGcsServiceStub"): ({"channel"}, "dray/cluster/admission.py"),
    ("ray.cloudpickle", "register_pickle_by_value"): ({"module"}, "dray/cluster/node_checks.py"),
    ("ray.cloudpickle", "unregister_pickle_by_value"): ({"module"}, "dray/cluster/node_checks.py"),
    ("ray.train.backend", "Backend.share_cuda_visible_devices"): (None, "dray/cluster/train_run.py"),
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
    if parameters is None:
        return
    missing = parameters - set(inspect.signature(found).parameters)
    assert not missing, f"Ray's {module}.{path} takes no {missing} any more; {file} gives them"


@pytest.mark.parametrize(
    ("module", "variable"),
    [
        ("ray.train.v2._internal.constants", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"),
        ("ray.train.v2._internal.constants", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"),
        ("ray.train.v2._internal.constants", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"),
        ("ray.train.v2._internal.constants", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"),
        ("ray.autoscaler._private.constants", "RAY_AUTOSCALER_UTILIZATION_SCORER"),  # cluster.yaml does
        ("ray.tune.execution.tune_controller", "TUNE_MAX_PENDING_TRIALS_PG"),
        ("ray.tune.execution.tune_controller", "TUNE_GLOBAL_CHECKPOINT_S"),
        ("ray.tune.execution.tune_controller", "TUNE_PRINT_ALL_TRIAL_ERRORS"),
    ],
)
def test_ray_still_reads_the_environment_variables_that_dray_sets(module: str, variable: str) -> None:
    source = inspect.getsource(importlib.import_module(module))
    assert variable in source, f"{module} reads {variable} no more: what dray sets has no effect"


def test_helper_actors_that_dray_leaves_out_are_still_train_callbacks() -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from dray.cluster.train_run import TrainRun

    run = TrainRun(print, own_cluster=True, config={}, scaling_config=ScalingConfig(), run_config=RunConfig(name="run"))
    rays = {type(one) for one in DataParallelTrainer._create_default_callbacks(run)}
    assert rays - {type(one) for one in run._create_default_callbacks()} == {
        DatasetsCallback,
        PlacementGroupCleanerCallback,
    }


def test_processes_of_a_cluster_that_dray_starts_get_no_signal_of_its_group_and_die_with_it() -> None:
    from ray._private import services

    from dray.cluster.ray_cluster import _only_processes_of_use

    with _only_processes_of_use():
        started = services.start_ray_process(["sleep", "600"], "sleep", fate_share=True).process
    try:
        assert os.getsid(started.pid) == started.pid, (
            "Ray starts its processes in another way than by services.ConsolePopen: see dray/cluster/ray_cluster.py"
        )
    finally:
        started.kill()
        started.wait()


def test_handler_of_sigterm_is_still_set_by_the_function_that_dray_leaves_out() -> None:
    from ray._private import node, worker

    for module in (node.Node._register_shutdown_hooks, worker.init):
        source = inspect.getsource(module)
        assert "ray._private.utils.set_sigterm_handler(" in source, "see dray/cluster/ray_cluster.py"
        assert "signal.signal(" not in source, "see dray/cluster/ray_cluster.py"


def test_print_is_pythons_own_again_after_train_has_put_its_own_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    from ray.train.v2._internal.logging.patch_print import patch_print_function

    from dray.cluster.trial_log import print_as_python_does

    before = builtins.print
    monkeypatch.setattr(builtins, "print", before)
    patch_print_function()
    assert builtins.print is not before
    print_as_python_does()
    assert builtins.print is before


def test_ray_still_says_of_a_worker_that_it_was_killed_for_its_memory() -> None:
    import ray

    from dray.cluster.failure import LOW_MEMORY

    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    assert LOW_MEMORY.encode() in raylet.read_bytes(), f"{raylet} words it otherwise, see dray/cluster/failure.py"


def test_autoscaler_is_still_told_its_file_and_its_cluster_on_its_command_line() -> None:
    from ray._private import ray_constants, services

    source = inspect.getsource(services.start_monitor)
    for given in ("--gcs-address=", "--autoscaling-config=", '"monitor.py"'):
        assert given in source, f"dray/cluster/autoscaler.py finds it by {given}"
    assert ray_constants.DEBUG_AUTOSCALING_STATUS == "__autoscaling_status"


def test_autoscaler_of_the_second_version_still_tells_what_it_starts() -> None:
    from ray.autoscaler.v2.schema import ClusterStatus, LaunchRequest, NodeInfo, Stats

    for kind, names in {
        ClusterStatus: {"stats", "pending_launches", "pending_nodes", "failed_launches"},
        LaunchRequest: {"ray_node_type_name", "count", "details", "failed_ts_s"},
        NodeInfo: {"ray_node_type_name"},
        Stats: {"autoscaler_version"},
    }.items():
        assert names <= {field.name for field in fields(kind)}, f"dray/cluster/autoscaler.py reads {names} of {kind}"
