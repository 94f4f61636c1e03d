"""``startup-hook.sh``: run by a shell in the model's directory, once a machine; its environment is the trials'."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.code.startup_hook import StartupHookFailed, run_startup_hook, run_startup_hook_once


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, path = dict(os.environ), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(before)
    sys.path[:] = path


def model(tmp_path: Path, hook: str) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "startup-hook.sh").write_text(hook)
    return directory


def test_directory_without_a_hook_is_left_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    run_startup_hook(tmp_path)
    run_startup_hook_once(tmp_path, "run")
    assert dict(os.environ) == before
    assert list(tmp_path.iterdir()) == []


def test_hook_runs_in_the_models_directory_and_its_exports_stay(tmp_path: Path) -> None:
    os.environ["MY_OLD"] = "x"
    directory = model(
        tmp_path, 'echo "$PWD" > where\nexport MY_DATA="a=b\nc"\nunset MY_OLD\nexport PYTHONPATH=/my/place\nMINE=1\n'
    )
    run_startup_hook(directory)
    assert (directory / "where").read_text() == f"{directory}\n"
    assert os.environ["MY_DATA"] == "a=b\nc"
    assert "MY_OLD" not in os.environ
    assert "MINE" not in os.environ
    assert "/my/place" in sys.path


def test_hook_may_end_by_exit_0(tmp_path: Path) -> None:
    run_startup_hook(model(tmp_path, "export MY_DATA=here\nexit 0\n"))
    assert os.environ["MY_DATA"] == "here"


@pytest.mark.parametrize(
    ("hook", "code"), [("echo half a way\nfalse\necho on\n", 1), ("echo half a way >&2\nexit 7", 7)]
)
def test_failure_is_reported_with_the_end_of_the_output(tmp_path: Path, hook: str, code: int) -> None:
    with pytest.raises(StartupHookFailed) as caught:
        run_startup_hook(model(tmp_path, hook))
    assert str(caught.value) == f"exited with code {code}; fix the script, whose output ends with:\n    | half a way"


def test_hook_runs_once_a_run_and_all_processes_have_its_exports(tmp_path: Path) -> None:
    directory = model(tmp_path, "echo x >> count\nexport MY_DATA=there\n")
    code = (
        "import os, sys; from pathlib import Path; from dray.code.startup_hook import run_startup_hook_once;"
        "run_startup_hook_once(Path(sys.argv[1]), 'run'); print(os.environ['MY_DATA'])"
    )
    outputs: list[str] = []

    def process() -> None:
        done = subprocess.run(
            [sys.executable, "-c", code, str(directory)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        outputs.append(done.stdout)

    threads = [threading.Thread(target=process) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == ["there\n"] * 3
    assert (directory / "count").read_text() == "x\n"
    # Another run of the experiment may be on a machine that was started anew.
    run_startup_hook_once(directory, uuid.uuid4().hex)
    assert (directory / "count").read_text() == "x\nx\n"


def test_failure_of_one_process_is_that_of_all(tmp_path: Path) -> None:
    directory = model(tmp_path, "echo x >> count\nexit 2\n")
    for _ in range(2):
        with pytest.raises(StartupHookFailed, match="exited with code 2"):
            run_startup_hook_once(directory, "run")
    assert (directory / "count").read_text() == "x\n"
