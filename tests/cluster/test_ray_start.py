"""The start of Ray on this machine, where Ray itself may give up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from dray.cluster.connection import connect, join

TIMED_OUT = "The current node timed out during startup."


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BaseException | None]:
    """What each start of Ray raises; None: nothing."""
    outcomes: list[BaseException | None] = []

    def init(*, _temp_dir: str, **_: object) -> None:
        assert Path(_temp_dir).parent.stat().st_mode & 0o777 == 0o700, "others could replace Ray's sockets"
        if (error := outcomes.pop(0)) is not None:
            raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "new"))
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    return outcomes


def test_ray_is_started_again_if_its_node_was_too_slow(starts: list[BaseException | None]) -> None:
    starts += [Exception(TIMED_OUT), Exception(TIMED_OUT), None]
    assert connect(None).description == "a new Ray cluster on this machine, 2 CPUs"


def test_ray_that_does_not_start_is_one_error_with_what_to_do(starts: list[BaseException | None]) -> None:
    starts += [*(Exception(TIMED_OUT) for _ in range(3)), None]
    with pytest.raises(ConnectionError, match=rf"did not start .* tried three times: {TIMED_OUT} .* set RAY_ADDRESS"):
        connect(None)
    assert starts == [None]


def test_too_old_a_ray_is_one_error_with_the_versions_that_work(
    starts: list[BaseException | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("ray.runtime_context.RuntimeContext.get_session_name")
    for start in (lambda: connect(None), lambda: join("127.0.0.1:1")):
        with pytest.raises(ConnectionError, match=r"^Ray [\d.]+ is too old; dray needs ray\[.*\]>=2\.54,<3$"):
            start()
    assert not starts


@pytest.mark.parametrize("package", ["dray", "searchers"])
def test_no_worker_gets_another_dray_from_the_working_directory(
    package: str, starts: list[BaseException | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    clone = tmp_path / package
    clone.mkdir()
    starts.append(None)
    assert connect(None).own  # any directory may have this name
    (clone / "__init__.py").touch()
    for start in (lambda: connect(None), lambda: join("127.0.0.1:1")):
        with pytest.raises(
            ConnectionError, match=f"would import {package} from {clone}/__init__.py, since .* start in"
        ):
            start()
    assert not starts


@pytest.fixture
def processes() -> Iterator[list[socket.socket]]:
    """The head and the node of each cluster that is started, as far as connecting to them goes."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]


@pytest.fixture
def clusters(
    starts: list[BaseException | None], processes: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """The number of each cluster that was started, 0 once it has been shut down."""
    head, node = (process.getsockname()[1] for process in processes)
    started: list[int] = []
    starts += [None] * 9

    def init(**_: object) -> None:
        started.append(len(started) + 1)

    def shutdown() -> None:
        started[-1] = 0

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", shutdown)
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(started and started[-1]))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=f"127.0.0.1:{head}"))
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": node}])
    return started


def test_the_next_run_of_a_process_has_the_same_cluster(clusters: list[int]) -> None:
    for description in ("a new Ray cluster on this machine", "the Ray cluster of the run before"):
        with connect(None) as cluster:
            assert (cluster.own, cluster.local) == (True, True)
            assert cluster.description == f"{description}, 2 CPUs"
    assert clusters == [1]


def test_a_cluster_that_a_run_failed_on_is_not_kept(clusters: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), connect(None):
        raise KeyboardInterrupt
    assert clusters == [0]


@pytest.mark.parametrize("dead", [0, 1])
def test_a_cluster_that_has_lost_a_process_is_not_kept(
    clusters: list[int], processes: list[socket.socket], dead: int
) -> None:
    with connect(None):
        pass
    processes[dead].close()
    with connect(None) as cluster:
        assert cluster.description == "a new Ray cluster on this machine, 2 CPUs"
    assert clusters == [0, 2]


def test_processes_of_a_kept_cluster_never_have_an_old_environment(
    clusters: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with connect(None):
        pass
    monkeypatch.setenv("HF_TOKEN", "new")
    with connect(None):
        assert clusters == [0, 2]
    monkeypatch.chdir(tmp_path)
    with connect(None):
        assert clusters == [0, 0, 3]
