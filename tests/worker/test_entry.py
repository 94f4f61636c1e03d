"""The entry of a group's processes: what they see of their machine, and what they import."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dray.desk.messages import Unfit
from dray.worker import entry
from dray.worker.ranks import Place, assign
from tests.workers import connected, worker_spec


class Desk:
    """Keeps why groups are broken, and on which nodes their processes arrive."""

    def __init__(self) -> None:
        self.causes: list[str] = []
        self.arrivals: list[tuple[object, ...]] = []

    def broken(self, owner: str, group: str, why: Unfit) -> None:
        self.causes.append(why.message)

    def arrived(self, *arrival: object) -> None:
        self.arrivals.append(arrival)


def enter(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str | None], *gpus: str) -> list[str]:
    """Enter a worker that can't import what it runs; returns the errors that it reports."""
    labels = {"ray.io/accelerator-type": "L4", "ray.io/market-type": "spot"}
    here = SimpleNamespace(get_node_id=lambda: "node-7", get_node_labels=lambda: labels)
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
    monkeypatch.setattr(entry, "name_of_this_node", lambda: "10.0.0.7 (gpu-1)")
    monkeypatch.setattr(entry, "skip_rays_exit_handlers", lambda: None)
    monkeypatch.setitem(sys.modules, "dray.worker.serve", None)  # as if it were not there
    desk = Desk()
    monkeypatch.setattr(entry, "Connection", connected)
    [ranks] = assign([Place("node-7", "10.0.0.7", gpus)])
    entry.serve_leases(worker_spec(desk, SimpleNamespace(environment=environment)), ranks)
    assert desk.arrivals == [("run", "group-0", 1, "node-7", "L4", "L4-spot" if gpus else "CPU-spot")]
    return desk.causes


def test_a_worker_that_can_not_import_what_it_runs_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Ray would start it again and again."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert enter(monkeypatch, {}, "0") == [
        "node 10.0.0.7 (gpu-1) can't import what workers run: ModuleNotFoundError: import of dray.worker.serve "
        "halted; None in sys.modules; install the driver's packages there"
    ]


@pytest.mark.parametrize(
    ("gpus", "environment", "visible"),
    [
        (["3", "2"], {}, "2,3"),
        ([], {}, ""),
        ([], {"CUDA_VISIBLE_DEVICES": "1"}, "1"),  # the config's environment_variables
    ],
)
def test_a_worker_sees_the_gpus_of_its_group_and_on_a_cpu_slot_none(
    gpus: list[str], environment: dict[str, str | None], visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")  # as Ray does on a node of AMD's
    enter(monkeypatch, environment, *gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert os.environ["HIP_VISIBLE_DEVICES"] == ("" if environment else visible)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "without"),
    [
        # Each worker before it comes to its own code.
        ("dray.worker.entry, dray.worker.lease", {"ray.tune", "rich", "searchers.search", "torch"}),
        ("dray.worker.serve", {"ray.tune", "rich", "searchers.search", "ray.train.v2._internal.execution.controller"}),
    ],
    ids=["before its code", "worker"],
)
def test_processes_of_a_group_import_little(modules: str, without: set[str]) -> None:
    """Every import delays the first batch."""
    program = f"import sys, {modules}; print({without} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=240)
    assert done.stdout == "set()\n"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's on_exit")
def test_a_worker_ends_although_an_exit_handler_of_ray_hangs_and_later_ones_run() -> None:
    code = """
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
libc["__cxa_atexit"](libc.pause, None, None)  # as Ray does
from dray.worker.entry import skip_rays_exit_handlers
skip_rays_exit_handlers()
libc.strdup.restype = ctypes.c_void_p  # Python's own memory is freed by then
libc["__cxa_atexit"](libc.puts, ctypes.c_void_p(libc.strdup(b"a library's")), None)
atexit.register(print, "Python's", flush=True)
libc.puts(b"buffered")
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["Python's", "a library's", "buffered"]
