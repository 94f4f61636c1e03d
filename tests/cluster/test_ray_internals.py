"""The private names of Ray that dray uses, all of them, and the environment variables of Ray that it sets.

Ray may change them in any release. dray runs without them: each name has the cost of its absence here, which is what
the log then says.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import ray
from packaging.requirements import Requirement

from dray.cluster import internals
from dray.errors import RAY
from tests.sources import at_import, dotted, imported, nodes

ROOT = Path(__file__).parents[2]
MAX_NAMES = 15

_INTERNALS = "dray/cluster/internals.py"
_TRAIN = "dray/groups/train_workers.py"
_SLOWER = "starting Ray takes seconds longer"

NAMES: list[tuple[str, str, str, str | None]] = [
    # our file, what its absence costs, module:attribute, and the parameters that are given; None: it is not called
    (
        _INTERNALS,
        _SLOWER,
        "ray._private.parameter:RayParams",
        "dashboard_agent_listen_port, include_log_monitor, no_monitor",
    ),
    (_INTERNALS, _SLOWER, "ray._private.services:start_api_server", None),
    (_INTERNALS, _SLOWER, "ray._private.services:get_node", "gcs_address, node_id"),
    (_INTERNALS, _SLOWER, "ray._private.utils:get_dashboard_dependency_error", None),
    (
        _INTERNALS,
        "other machines can reach the Ray that dray starts on this one, and only its token keeps them out",
        "ray._private.services:resolve_ip_for_localhost",
        None,
    ),
    (
        _INTERNALS,
        "trials do not save when their node is about to be removed",
        "ray._private.state:state.get_draining_nodes",
        "",
    ),
    (
        _INTERNALS,
        "experiments wait for nodes without knowing what the autoscaler starts",
        "ray.autoscaler.v2.sdk:get_cluster_status",
        "gcs_address, timeout",
    ),
    (_INTERNALS, "Ray prints its messages among the experiment's", "ray._private.worker:print_worker_logs", None),
    (
        _INTERNALS,
        "dray itself is not sent to the workers, so their nodes need the driver's version of it",
        "ray._private.runtime_env.working_dir:upload_working_dir_if_needed",
        "include_gitignore, logger, runtime_env, scratch_dir",
    ),
    (
        _TRAIN,
        "ray.train.get_context() does not work in trials",
        "ray.train.v2._internal.execution.context:TrainRunContext",
        "backend_config, dataset_config, run_config, scaling_config, train_loop_config",
    ),
    (
        _TRAIN,
        "ray.train.get_context() does not work in trials",
        "ray.train.v2._internal.execution.worker_group:RayTrainWorker.init_train_context",
        "controller_actor, distributed_context, storage_context, synchronization_actor, train_run_context, "
        "worker_callbacks",
    ),
    (
        "searchers/ray_tune.py",
        "the driver needs about 1 kB more memory per trial",
        "ray.air.execution._internal.actor_manager:RayActorManager",
        None,
    ),
]


def is_private(name: str) -> bool:
    """Whether a dotted name of Ray is outside its public API."""
    return any(re.fullmatch(r"_\w*[^_]", part) or part in ("v2", "generated", "v1") for part in re.split("[.:]", name))


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


@pytest.mark.parametrize(("file", "cost", "name", "given"), NAMES)
def test_ray_has_the_private_names_that_dray_uses(file: str, cost: str, name: str, given: str | None) -> None:
    module, _, path = name.partition(":")
    so = f"in Ray {ray.__version__}, so that {cost}: see {file}"
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


def test_there_are_few_private_names() -> None:
    # And one method of the head, by its name on the wire.
    assert len({name for _, _, name, _ in NAMES}) + 1 <= MAX_NAMES


def test_the_page_has_what_the_absence_of_each_name_costs() -> None:
    page = (ROOT / "docs" / "installing.md").read_text().replace("`", "")
    section = page.partition("## Versions of Ray")[2].partition("\n## ")[0]
    listed = re.findall(r"^ +- (.*)\.$", section, re.MULTILINE)
    costs = list(dict.fromkeys(cost for _, cost, _, _ in NAMES))
    assert listed == [cost if cost.startswith(("dray ", "ray.")) else cost[0].upper() + cost[1:] for cost in costs]


def test_every_private_name_of_rays_in_our_files_is_in_the_list() -> None:
    listed = {(file, name.replace(":", ".")) for file, _, name, _ in NAMES}
    for file, found in nodes().items():
        for used in sorted({name for node in found for name in private_of_ray(node)}):
            # Whether it is a module, or an attribute of one.
            assert any(
                file == ours and (f"{known}.".startswith(f"{used}.") or used.startswith(f"{known}."))
                for ours, known in listed
            ), f"{file} uses {used}, which is private to Ray"


def private_of_ray(node: ast.AST) -> Iterator[str]:
    """The dotted names of Ray that a node imports or writes out, and that are not of its public API."""
    match node:
        case ast.Attribute():
            named = [dotted(node)]
        case ast.Constant(value=str(text)) if re.fullmatch(r"ray(\.\w+)+", text):
            named = [text]
        case _:
            named = imported(node)
    yield from (name for name in named if name.startswith("ray.") and is_private(name))


def test_only_functions_import_private_names_of_rays() -> None:
    for file, [module, *_] in nodes().items():
        private = [name for node in at_import(module) for name in private_of_ray(node)]
        assert private == [], f"where one is missing, {file} can't be imported"


BLOCKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    _SLOWER: lambda: internals.quick_start(lambda: ""),
    "other machines can reach": internals.keep_loopback,
    "Ray prints its messages": lambda: internals.print_to(lambda data: None),
}
"""Blocks in which names of Ray are replaced, by the beginning of the cost of their absence."""


@pytest.mark.parametrize(
    ("begin", "name"), [(begin, name) for _, cost, name, _ in NAMES for begin in BLOCKS if cost.startswith(begin)]
)
def test_a_ray_without_a_name_starts_and_says_what_that_costs(
    begin: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray._private import services

    module, _, attribute = name.partition(":")
    monkeypatch.delattr(f"{module}.{attribute}")
    monkeypatch.setattr(internals, "_reported", set())
    for _ in range(2):
        with BLOCKS[begin]():
            if begin == _SLOWER and "start_api_server" not in name:
                assert services.start_api_server() == ("", None), "the other names are still used"
    [line] = caplog.messages
    assert re.match(f"{begin}.*, because Ray {ray.__version__} has changed an internal that dray uses: ", line)
    assert line.endswith(f"has no attribute '{attribute}'")


@pytest.mark.parametrize("name", ["context.TrainRunContext", "worker_group.RayTrainWorker"])
def test_workers_start_without_trains_internals_which_has_its_cost(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dray.groups import train_workers

    monkeypatch.delattr(f"ray.train.v2._internal.execution.{name}")
    monkeypatch.setattr(internals, "_reported", set())
    worker = train_workers._actor_class()
    assert worker().execute(int, "3") == 3
    assert train_workers._enter_train(worker, "name", [train_workers.Worker(worker(), "node")], []) == []
    assert caplog.text.count(train_workers.WITHOUT_TRAIN) == 1


def test_a_ray_with_other_parameters_starts_without_our_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray._private import parameter

    def renamed(*, without_monitor: bool = False) -> bool:
        return without_monitor

    monkeypatch.setattr(parameter, "RayParams", renamed)
    monkeypatch.setattr(internals, "_reported", set())
    with internals.quick_start(lambda: ""):
        assert parameter.RayParams(without_monitor=True)
    assert "unexpected keyword argument 'no_monitor'" in caplog.text


def test_what_a_running_cluster_lacks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dray.cluster import autoscaler

    monkeypatch.setattr(internals, "_reported", set())
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="head:1"))
    monkeypatch.setattr("ray._private.state.state", object())
    monkeypatch.delattr("ray.autoscaler.v2.sdk.get_cluster_status")
    monkeypatch.delattr("ray._private.runtime_env.working_dir.upload_working_dir_if_needed")
    assert internals.draining_nodes() == set()
    assert not autoscaler.has_state()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert autoscaler.has_state(), "there, an autoscaler may start nodes for a search that does not fit yet"
    assert internals.upload(tmp_path, tmp_path) is None
    assert [line.partition(", because")[0] for line in caplog.messages] == [
        cost for _, cost, name, _ in NAMES if re.search("draining|cluster_status|upload", name)
    ]


@pytest.mark.parametrize("error", [KeyError("working_dir"), ValueError("not a number"), AssertionError(), None])
def test_a_changed_private_function_costs_no_more_than_a_missing_one(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(*_: object, **__: object) -> dict[str, str]:
        if error is not None:
            raise error
        return {}

    monkeypatch.setattr(internals, "_reported", set())
    monkeypatch.setattr("ray._private.state.state", SimpleNamespace(get_draining_nodes=changed))
    monkeypatch.setattr("ray._private.runtime_env.working_dir.upload_working_dir_if_needed", changed)
    assert internals.draining_nodes() == set()
    assert internals.upload(tmp_path, tmp_path) is None
    assert "dray itself is not sent to the workers" in caplog.text


def test_a_head_that_does_not_answer_is_no_change_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise ray.exceptions.RaySystemError("the head is gone")

    monkeypatch.setattr("ray._private.state.state", SimpleNamespace(get_draining_nodes=lost))
    with pytest.raises(ray.exceptions.RaySystemError):
        internals.draining_nodes()


def test_ray_may_ask_for_a_loopback_address_with_more_arguments() -> None:
    from ray._private import services

    with internals.keep_loopback():
        resolve: Callable[..., str] = services.resolve_ip_for_localhost
        assert resolve("127.0.0.1", family=4) == "127.0.0.1"


def test_a_worker_of_trains_that_is_an_actor_class_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train.v2._internal.execution import worker_group

    from dray.groups.train_workers import _actor_class

    monkeypatch.setattr(worker_group, "RayTrainWorker", ray.remote(worker_group.RayTrainWorker))
    assert _actor_class()().execute(int, "3") == 3


def test_the_head_has_the_method_that_is_called_by_its_wire_name() -> None:
    from ray.core.generated.gcs_service_pb2 import DESCRIPTOR

    package, _, service = internals.NODES_METHOD.strip("/").partition("/")[0].rpartition(".")
    assert package == DESCRIPTOR.package
    assert internals.NODES_METHOD.rpartition("/")[2] in DESCRIPTOR.services_by_name[service].methods_by_name


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


def test_pinned_ray_is_allowed() -> None:
    # Without tomllib, which Python 3.10 lacks.
    [allowed] = map(Requirement, re.findall(r'^  "(ray\[.*)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert str(allowed) == str(Requirement(RAY))
    [pin] = re.findall("^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert allowed.specifier.contains(pin)
    assert allowed.specifier.contains(ray.__version__)


def test_trains_workers_need_nothing_that_dray_does_not_give() -> None:
    from ray.train.v2._internal.execution.worker_group import RayTrainWorker

    parameters = inspect.signature(RayTrainWorker.init_train_context).parameters.values()
    needed = {each.name for each in parameters if each.default is inspect.Parameter.empty} - {"self"}
    [given] = [given for _, _, name, given in NAMES if name.endswith("RayTrainWorker.init_train_context")]
    assert needed == set(str(given).split(", ")), "see dray/groups/train_workers.py"


def test_tune_still_keeps_results_of_actors_where_they_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
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


def test_tune_still_means_the_same_by_its_states_and_names() -> None:
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


def test_rays_processes_get_no_signal_of_drays_group_and_die_with_it() -> None:
    from ray._private import services

    from dray.cluster.connection import _keep_signals

    with _keep_signals():
        started = services.start_ray_process(["sleep", "600"], "sleep", fate_share=True).process
    try:
        assert os.getsid(started.pid) == started.pid
    finally:
        started.kill()
        started.wait()


def test_handler_of_sigterm_stays() -> None:
    from ray._private.utils import set_sigterm_handler

    from dray.cluster.connection import _keep_signals

    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    with _keep_signals():
        set_sigterm_handler(signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ray_still_says_of_a_worker_that_it_was_killed_for_its_memory() -> None:
    from dray.leases.failure import LOW_MEMORY

    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    assert LOW_MEMORY.encode() in raylet.read_bytes(), f"{raylet} words it otherwise, see dray/leases/failure.py"


def test_autoscalers_command_line_still_has_its_file_and_its_cluster() -> None:
    from ray._private import services

    source = inspect.getsource(services.start_monitor)
    for given in ("--gcs-address=", "--autoscaling-config=", '"monitor.py"'):
        assert given in source, f"dray/cluster/autoscaler.py finds it by {given}"


def test_autoscaler_still_says_what_it_starts() -> None:
    from ray.autoscaler.v2.schema import ClusterStatus, LaunchRequest, NodeInfo, Stats

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
    from dray.config.resources import UNUSABLE, GpuType

    makers = ("NVIDIA_", "AMD_", "INTEL_MAX_")
    theirs = {value for name, value in vars(accelerators).items() if name.startswith(makers)}
    assert theirs <= {*get_args(GpuType), *UNUSABLE}, "see resources.slot_type"
    assert (ray._raylet.RAY_NODE_ACCELERATOR_TYPE_KEY, ray._raylet.RAY_NODE_GROUP_KEY) == (GPU_TYPE, NODE_TYPE)
