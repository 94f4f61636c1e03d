"""The process that waits for the next experiment; real ones are in `tests.ray.test_server`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ray

from dray.errors import ConfigError, ExperimentError, Fault
from dray.serve.draft import Draft
from dray.serve.processes import MAX_SPARES, Create, Failed, Opened, Spares, skip_ids
from tests.serve.test_api import CONFIG

CREATE = Create(read=Draft(config=CONFIG).read(), code=Path("code"), link=Path("link"))


@dataclass(eq=False)
class FakeDriver:
    """As `dray.serve.processes.ExperimentProcess`; `ends` and `fails`: before, and after it has the experiment."""

    ends: bool = False
    fails: Failed | None = None
    exit_code: int | None = None
    has_begun: bool = False
    how_ended: str = "killed by signal 9"
    signals: list[int] = field(default_factory=list)
    path: Path | None = None
    opened: Opened | None = None
    failure: Failed | None = None

    def send(self, command: object) -> None:
        self.has_begun = not self.ends

    def wait_until_opened(self) -> Failed | None:
        return Failed("it ended") if self.ends else self.fails

    def signal(self, number: int) -> None:
        self.signals.append(number)


def spares(*drivers: FakeDriver) -> Spares:
    """Which start these, in turn."""
    return Spares(iter([*drivers, *(FakeDriver() for _ in range(9))]).__next__)  # type: ignore[arg-type]


def test_a_spare_that_ends_as_it_gets_the_experiment_is_replaced() -> None:
    dies, works = FakeDriver(ends=True), FakeDriver()
    assert spares(dies, works).create(CREATE) is works


@pytest.mark.parametrize("looks", [True, False])
def test_a_spare_that_has_ended_is_replaced(looks: bool) -> None:
    dead, works = FakeDriver(), FakeDriver()
    kept = spares(dead, works)
    kept.replace_ended()
    dead.exit_code = -9
    if looks:
        kept.replace_ended()  # before it is needed
    assert kept.take() is works


def test_the_config_is_not_blamed_for_processes_that_can_not_start() -> None:
    with pytest.raises(ExperimentError, match=f"{MAX_SPARES} processes in a row ended .killed by signal 9."):
        spares(*(FakeDriver(ends=True) for _ in range(MAX_SPARES))).create(CREATE)


def test_faults_of_an_experiment_are_told_at_once() -> None:
    fault = Fault("entrypoint", "exit code 3")
    with pytest.raises(ConfigError) as error:
        spares(FakeDriver(fails=Failed("", (fault,)))).create(CREATE)
    assert error.value.faults == (fault,)
    with pytest.raises(ExperimentError, match="the disk is full"):
        spares(FakeDriver(fails=Failed("the disk is full"))).create(CREATE)


def test_closing_ends_the_process_that_waits() -> None:
    waits = FakeDriver()
    spares(waits).close()
    assert waits.signals == [9]


def drawn_in_a_fork(number: int) -> bytes:
    """Ray's next random id in a process with this number."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            skip_ids(number)
            os.write(write, ray.ObjectRef.from_random().binary())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        return file.read()


def test_processes_of_one_template_draw_other_ids() -> None:
    again, once, other = map(drawn_in_a_fork, (7, 7, 8))
    assert again == once, "or Ray gives forks ids of their own now, and none need to be skipped"
    assert once != other
