"""What dray uses of Ray that is not in Ray's public API. Ray may change it in any release, so pyproject.toml allows
only the minor version that the tests have run with.

To allow another one:

1. Install it, and run this file. Each failure names what Ray has no more, our file that uses it, and what for.
2. Put the version into pyproject.toml (the bound) and constraints.txt (the pin; `cluster.yaml` and `clusters/` install
   from both), and run `make test-all` and, as root, `make test-cluster`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import ray
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


USES = """
dray/cluster/connection.py: start Ray on one machine without autoscaler, log monitor and dashboard, which cost seconds
    ray._private.parameter: RayParams(dashboard_agent_listen_port, include_log_monitor, no_monitor)
    ray._private.node: Node.start_api_server(include_dashboard, raise_on_failure)
    ray._private.utils: get_dashboard_dependency_error()
dray/cluster/connection.py: see at once when the node of a new cluster is up
    ray._private.services: get_node(gcs_address, node_id); _get_gcs_client_options(gcs_server_address)
    ray._private.state: GlobalState._initialize_global_state(gcs_options); GlobalState.node_table();
        GlobalState.get_node(node_id)
dray/cluster/connection.py: keep signals to the driver's group from Ray's processes, and the driver's own handlers
    ray._private.services: ConsolePopen
    ray._private.utils: set_sigterm_handler(sigterm_handler)
dray/cluster/connection.py: have Ray listen at 127.0.0.1 alone, and join such a cluster
    ray._private.services: resolve_ip_for_localhost(host)
dray/cluster/connection.py: find out whether a cluster that it has kept still has all its processes
    ray._private.worker: global_worker
    ray._private.node: Node.dead_processes()
dray/cluster/connection.py: have Ray's files in a directory of this user's, on the disk where Ray would have them
    ray._common.utils: get_default_system_temp_dir()
dray/cluster/autoscaler.py: find out how large the cluster may become, and what its autoscaler starts or can't start
    ray._private.state: GlobalState.get_cluster_config()
    ray.autoscaler.v2.sdk: GcsClient
    ray.autoscaler.v2.utils: ClusterStatusParser.from_get_cluster_status_reply(proto, stats)
    ray.autoscaler.v2.schema: Stats()
    ray.core.generated.autoscaler_pb2: GetClusterStatusReply
dray/cluster/watch.py: see which nodes are about to be taken away, so that their trials save
    ray._private.state: GlobalState.get_draining_nodes()
dray/code/packages.py: upload the model's code and dray's own to the cluster
    ray._private.runtime_env.working_dir: upload_working_dir_if_needed(include_gitignore, logger, runtime_env,
        scratch_dir)
dray/cluster/checks/launcher_file.py: check a cluster's file as `ray up` does (`dray cluster validate`)
    ray.autoscaler._private.util: prepare_config(config); validate_config(config)
dray/cluster/ray_output.py: send what Ray prints in the driver to ray.log
    ray._private.worker: print_to_stdstream(data, ignore_prefix); global_worker_stdstream_dispatcher.handlers;
        global_worker_stdstream_dispatcher.add_handler(handler, name);
        global_worker_stdstream_dispatcher.remove_handler(name)
searchers/ray_tune.py: free the results of trials that Tune keeps until its handle ends
    ray.air.execution._internal.actor_manager: RayActorManager
dray/groups/train_workers.py: make ray.train.get_context() work in trials
    ray.train.v2._internal.execution.context: TrainRunContext(backend_config, dataset_config, run_config,
        scaling_config, train_loop_config)
    ray.train.v2._internal.execution.worker_group: RayTrainWorker.init_train_context(controller_actor,
        distributed_context, storage_context, synchronization_actor, train_run_context, worker_callbacks)
dray/cluster/token.py: tell within milliseconds that a cluster refuses this process's token
    ray._private.authentication.authentication_utils: is_token_auth_enabled()
    ray._private.grpc_utils: init_grpc_channel(address)
    ray._private.utils: read_ray_address()
    ray.core.generated.gcs_service_pb2: GetClusterIdRequest
    ray.core.generated.gcs_service_pb2_grpc: NodeInfoGcsServiceStub(channel)
dray/cluster/checks/node.py: check nodes on which dray is not installed, or another version of it
    ray.cloudpickle: register_pickle_by_value(module); unregister_pickle_by_value(module)
"""
"""A file of ours and what it uses Ray's names for ("uses it to"); below, of each module of Ray its attributes,
separated by semicolons, with the parameters that are given if they are called."""


def _names() -> Iterator[tuple[str, str, str, str | None]]:
    """Our file, why, ``module:attribute``, and the parameters that are given; None if it is not called."""
    for file, why, uses in re.findall(r"^(\S+): (.*)\n((?: .*\n)+)", USES, re.MULTILINE):
        for module, attributes in re.findall(r"^    (\S+): ((?:.*\n)(?: {8}.*\n)*)", uses, re.MULTILINE):
            for attribute in " ".join(attributes.split()).split("; "):
                path, is_called, given = attribute.partition("(")
                yield file, why, f"{module}:{path}", given.rstrip(")") if is_called else None


NAMES = list(_names())

VARIABLES = {
    # The variable, and Ray's module that reads it: what we set it for.
    "RAY_AUTOSCALER_RECONCILE_REQUEST_STATUS_TIMEOUT_S": (
        "ray.autoscaler.v2.instance_manager.config",
        "notice that Google Cloud is out of machines",
    ),
    "RAY_AUTOSCALER_RECONCILE_MAX_NUM_RETRY_REQUEST_TO_ALLOCATE": (
        "ray.autoscaler.v2.instance_manager.config",
        "notice that Google Cloud is out of machines",
    ),
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": ("ray.tune.utils.callback", "leave out Tune's own loggers"),
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": ("ray.tune.execution.tune_controller", "report results without a metric"),
    "TUNE_GLOBAL_CHECKPOINT_S": ("ray.tune.execution.tune_controller", "leave saving to our own journal"),
    "TUNE_PRINT_ALL_TRIAL_ERRORS": ("ray.tune.execution.tune_controller", "log the handle's error only once"),
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": (
        "ray.tune.execution.experiment_state",
        "silence a warning about Tune's checkpoints, of which there are none",
    ),
    "RAY_TRAIN_ENABLE_PRINT_PATCH": (
        "ray.train.v2._internal.constants",
        "keep print() as it is in workers, so that a trial's output is logged once",
    ),
    "RAY_AIR_NEW_OUTPUT": ("ray.tune.experimental.output", "leave out Tune's progress tables"),
}


@pytest.mark.parametrize(("file", "why", "name", "given"), NAMES)
def test_ray_has_what_dray_uses_of_its_inside(file: str, why: str, name: str, given: str | None) -> None:
    module, _, path = name.partition(":")
    so = f"in Ray {ray.__version__}; {file} uses it to {why}"
    try:
        found: object = importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"there is no {module} {so} ({error})")
    for part in path.split("."):
        found = getattr(found, part, None)
        assert found is not None, f"there is no {module}.{path} {so}"
    if given is not None:
        assert callable(found)
        missing = set(filter(None, given.split(", "))) - set(inspect.signature(found).parameters)
        assert not missing, f"{module}.{path} does not take {', '.join(sorted(missing))} {so}"


def test_every_private_name_of_rays_that_our_files_name_is_checked_here() -> None:
    checked = {(file, name.partition(":")[0]) for file, _, name, _ in NAMES}
    for path in [*(ROOT / "dray").rglob("*.py"), *(ROOT / "searchers").rglob("*.py")]:
        file = str(path.relative_to(ROOT))
        for module in sorted(set(private_of_ray(ast.parse(path.read_text())))):
            assert any(
                file == ours and (module.startswith(known) or known.startswith(module)) for ours, known in checked
            ), f"{file} uses {module}, which is private to Ray: add it to USES"


def private_of_ray(tree: ast.Module) -> Iterator[str]:
    """The dotted names of Ray that a file imports or writes out, and that are not of its public API."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0):
                # A submodule may be imported as a name: from ray._private import node.
                named = [f"{module}.{alias.name}" for alias in names]
            case ast.Import(names=names):
                named = [alias.name for alias in names]
            case ast.Attribute():
                named = [ast.unparse(node)]
            case _:
                continue
        for name in named:
            first, *inner = name.split(".")
            if first == "ray" and any(
                re.fullmatch(r"_\w*[^_]", part) or part in ("v2", "generated", "v1") for part in inner
            ):
                yield name


@pytest.mark.parametrize("variable", VARIABLES)
def test_ray_still_reads_the_environment_variables_that_dray_sets(variable: str) -> None:
    module, why = VARIABLES[variable]
    ours = [*(ROOT / "dray").rglob("*.py"), *(ROOT / "searchers").rglob("*.py"), ROOT / "clusters" / "gcp.yaml"]
    setting = [str(path.relative_to(ROOT)) for path in ours if variable in path.read_text()]
    assert setting, f"nothing here sets {variable} any more: take it out of VARIABLES"
    so = f"in Ray {ray.__version__}; {' and '.join(setting)} sets it to {why}"
    try:
        source = inspect.getsource(importlib.import_module(module))
    except ImportError as error:
        pytest.fail(f"there is no {module}, which read {variable}, {so} ({error})")
    assert variable in source, f"{module} does not read {variable} {so}"


def test_pinned_ray_is_the_one_minor_version_that_is_allowed() -> None:
    # Without tomllib, which Python 3.10 lacks.
    [allowed] = map(Requirement, re.findall(r'^  "(ray\[.*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    [pin] = [
        line.removeprefix("ray==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("ray==")
    ]
    major, minor, _ = map(int, pin.split("."))
    assert allowed.specifier == Requirement(f"ray>={major}.{minor},<{major}.{minor + 1}").specifier
    assert allowed.specifier.contains(ray.__version__)


def test_trains_workers_need_nothing_that_dray_does_not_give() -> None:
    from ray.train.v2._internal.execution.worker_group import RayTrainWorker

    parameters = inspect.signature(RayTrainWorker.init_train_context).parameters.values()
    needed = {each.name for each in parameters if each.default is inspect.Parameter.empty} - {"self"}
    [given] = [given for _, _, name, given in NAMES if name.endswith("RayTrainWorker.init_train_context")]
    assert needed == set(str(given).split(", ")), "see dray/groups/train_workers.py"


def test_tune_still_keeps_the_results_of_an_actor_where_they_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    from ray.air.execution._internal.actor_manager import RayActorManager
    from ray.tune.execution.tune_controller import TuneController

    from searchers.ray_tune import _drop_results

    controller = TuneController.__new__(TuneController)
    so = "see searchers/ray_tune.py:_drop_results"
    assert "self._actor_manager = RayActorManager(" in inspect.getsource(TuneController.__init__), so
    manager = controller._actor_manager = RayActorManager(resource_manager=None)
    manager._tracked_actors_to_task_futures["handle"].add(ray.ObjectRef.from_random())
    _drop_results(controller)
    assert manager._tracked_actors_to_task_futures == {"handle": set()}, so
    del controller._actor_manager
    _drop_results(controller)
    assert "the driver needs about 1 kB more memory per trial" in caplog.text


def test_tune_still_means_the_same_by_what_its_searchers_and_trials_say() -> None:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial
    from ray.tune.integration.ray_train import CHECKPOINT_PATH_KEY
    from ray.tune.schedulers import TrialScheduler

    from searchers import tune_trials

    for status in ("PENDING", "PAUSED", "TERMINATED", "ERROR"):
        assert getattr(Trial, status) == getattr(tune_trials, status), "see searchers/tune_trials.py"
    assert CHECKPOINT_PATH_KEY == "checkpoint_path", "see searchers/tune_trials.py:_has_checkpoint"
    assert TrialScheduler().supports_buffered_results, "searchers/tune.py:Scheduler sets it to False"
    # A trial's status is set in on_trial_add, after Tune.restore: before Tune sorts it by its status.
    source = inspect.getsource(TuneController.add_trial)
    assert source.index(".on_trial_add(") < source.index("status_str_map[trial.status]"), "see searchers/tune_trials.py"


def test_processes_of_a_cluster_that_dray_starts_get_no_signal_of_its_group_and_die_with_it() -> None:
    from ray._private import services

    from dray.cluster.connection import _without_needless_processes

    with _without_needless_processes():
        started = services.start_ray_process(["sleep", "600"], "sleep", fate_share=True).process
    try:
        assert os.getsid(started.pid) == started.pid, (
            "Ray starts its processes in another way than by services.ConsolePopen: see dray/cluster/connection.py"
        )
    finally:
        started.kill()
        started.wait()


def test_handler_of_sigterm_is_still_set_by_the_function_that_dray_leaves_out() -> None:
    from ray._private import node, worker

    for module in (node.Node._register_shutdown_hooks, worker.init):
        source = inspect.getsource(module)
        assert "ray._private.utils.set_sigterm_handler(" in source, "see dray/cluster/connection.py"
        assert "signal.signal(" not in source, "see dray/cluster/connection.py"


def test_ray_still_says_of_a_worker_that_it_was_killed_for_its_memory() -> None:
    from dray.desk.failure import LOW_MEMORY

    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    assert LOW_MEMORY.encode() in raylet.read_bytes(), f"{raylet} words it otherwise, see dray/desk/failure.py"


def test_autoscalers_command_line_still_has_its_file_and_its_cluster() -> None:
    from ray._private import services

    source = inspect.getsource(services.start_monitor)
    for given in ("--gcs-address=", "--autoscaling-config=", '"monitor.py"'):
        assert given in source, f"dray/cluster/autoscaler.py finds it by {given}"


def test_autoscaler_still_says_what_it_starts() -> None:
    from ray.autoscaler.v2.schema import ClusterStatus, LaunchRequest, NodeInfo, Stats
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    assert "cluster_resource_state" in GetClusterStatusReply.DESCRIPTOR.fields_by_name, "it is left out, as it is long"
    for kind, names in {
        ClusterStatus: {"stats", "pending_launches", "pending_nodes", "failed_launches"},
        LaunchRequest: {"ray_node_type_name", "count", "details", "failed_ts_s"},
        NodeInfo: {"ray_node_type_name"},
        Stats: {"autoscaler_version"},
    }.items():
        assert names <= {field.name for field in fields(kind)}, f"dray/cluster/autoscaler.py reads {names} of {kind}"


def test_rays_names_of_gpus_and_labels_are_ours() -> None:
    import ray._raylet
    from ray.util.accelerators import accelerators

    from dray.cluster.view import GPU_TYPE, NODE_TYPE
    from dray.config.resources import GpuType

    makers = ("NVIDIA_", "AMD_", "INTEL_MAX_")
    theirs = {value for name, value in vars(accelerators).items() if name.startswith(makers)}
    assert set(get_args(GpuType)) == theirs, "see resources.slot_type"
    assert (ray._raylet.RAY_NODE_ACCELERATOR_TYPE_KEY, ray._raylet.RAY_NODE_GROUP_KEY) == (GPU_TYPE, NODE_TYPE)
