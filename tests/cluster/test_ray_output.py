"""Within the block, what Ray prints and logs in the driver goes to a file, and before and after it to the terminal."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray._private.worker as rays

from dray.cluster.ray_output import redirect_ray_output

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ "


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What Ray prints, as in a driver that is connected with `log_to_driver`."""
    lines: list[str] = []

    def print_worker_logs(data: dict[str, Any], print_file: object, ignore_prefix: bool = False) -> None:
        lines.extend(data["lines"])

    monkeypatch.setattr(rays, "print_worker_logs", print_worker_logs)
    rays.global_worker_stdstream_dispatcher.add_handler(
        "ray_print_logs", functools.partial(rays.print_to_stdstream, ignore_prefix=False)
    )
    yield lines
    rays.global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")


def says(text: str) -> None:
    """Report a worker's death, forward a worker's output, and log, each as Ray does."""
    rays.print_to_stdstream({"lines": [f"{text}, died"], "pid": "raylet", "is_err": False}, ignore_prefix=False)
    rays.global_worker_stdstream_dispatcher.emit({"lines": [f"{text}, printed\n"], "pid": 7, "is_err": True})
    logging.getLogger("ray.tune.anything").error("%s, logged", text)


def test_rays_output_goes_to_the_file_alone(
    tmp_path: Path, printed: list[str], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    handlers = list(logging.getLogger("ray").handlers)
    says("before")
    with redirect_ray_output(tmp_path / "ray.log"):
        says("meanwhile")
    says("after")
    logged = [re.sub(f"^{STAMP}", "", line) for line in (tmp_path / "ray.log").read_text().splitlines()]
    assert logged == ["(raylet) meanwhile, died", "(7) meanwhile, printed", "meanwhile, logged"]
    assert [line.strip() for line in printed] == ["before, died", "before, printed", "after, died", "after, printed"]
    assert "meanwhile" not in "".join(capfd.readouterr())
    assert logging.getLogger("ray").handlers == handlers


def test_no_file_is_made_without_output(tmp_path: Path) -> None:
    with pytest.raises(KeyError), redirect_ray_output(tmp_path / "ray.log"):
        raise KeyError
    assert not (tmp_path / "ray.log").exists()


def test_a_full_disk_shows_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with redirect_ray_output(Path("/dev/full")):
        says("meanwhile")
    assert capfd.readouterr() == ("", "")
