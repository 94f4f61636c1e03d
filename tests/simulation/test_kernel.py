"""The simulator itself: equal seeds, equal schedules; what kills, partitions, and power failures do."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dray.rpc.calls import PeerUnreachable
from dray.rpc.connection import Connection
from dray.rpc.event_loop import EventLoop
from searchers.journal import Journal
from tests.simulation.files import Disk
from tests.simulation.kernel import Failed, Kernel, Killed
from tests.simulation.net import Net
from tests.simulation.primitives import installed


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory for a schedule's files."""
    directory = tmp_path / "disk"
    directory.mkdir()
    return directory


class Adder:
    """What listens: it adds numbers, and answers with the sum."""

    def __init__(self, kernel: Kernel) -> None:
        self.loop = EventLoop("adder")
        self.loop.listen("server")
        self.endpoint = replace(self.loop.endpoint, host="server")
        self.loop.attach(self)
        self.kernel, self.numbers, self.lost_sessions = kernel, list[int](), 0

    def take(self, call: Any) -> None:
        self.numbers.append(call.args[0])
        call.answer(sum(self.numbers))

    def lost(self, session: object) -> None:
        self.lost_sessions += 1

    def settle(self) -> None:
        """No-op."""

    def failed(self, error: BaseException) -> None:
        self.kernel.fail(repr(error))


class World:
    """A server that adds, and clients that call it."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.kernel = Kernel(seed, **options)
        self.net = Net(self.kernel)
        self.sums: list[int] = []
        self.errors: list[str] = []
        self.adder: Adder
        self.server = self.kernel.process("server", self._serve)

    def _serve(self) -> None:
        self.adder = Adder(self.kernel)
        time.sleep(1e6)

    def client(self, name: str, calls: int, every_s: float = 1.0) -> Any:
        def main() -> None:
            while not hasattr(self, "adder"):
                time.sleep(0.1)
            connection = Connection(self.adder.endpoint)
            try:
                for _ in range(calls):
                    self.sums.append(connection.add(1).result())
                    time.sleep(every_s)
            except PeerUnreachable as error:
                self.errors.append(str(error))

        return self.kernel.process(name, main)

    def run(self, until: float) -> World:
        self.kernel.at(until, self.kernel.stop)
        with installed(self.kernel):
            self.kernel.run()
        return self


def threads_and_messages(seed: int) -> str:
    """Run threads of all kinds, and return what has happened."""
    world, seen = World(seed, lines=[]), list[Any]()

    def many() -> None:
        items: queue.SimpleQueue[int] = queue.SimpleQueue()
        lock, condition, full = threading.Lock(), threading.Condition(), threading.Event()

        def put(number: int) -> int:
            with lock:
                items.put(number)
            with condition:
                condition.notify()
            return number

        with ThreadPoolExecutor(4) as pool:
            seen.append(sorted(pool.map(put, range(10))))
        seen.extend(items.get() for _ in range(10))
        if not full.wait(0.5):
            full.set()
        seen.append((full.is_set(), round(time.monotonic(), 6), os.urandom(4).hex()))

    for number in range(3):
        world.client(f"client-{number}", 20, every_s=0.01)
    world.kernel.process("many", many)
    world.run(until=60)
    return f"{world.kernel.digest} {world.kernel.now:.9f} {world.sums} {seen}"


def test_a_seed_determines_the_schedule_and_others_differ() -> None:
    digests = [threads_and_messages(seed) for seed in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.slow
def test_a_seed_determines_the_schedule_in_each_process() -> None:
    command = "from tests.simulation.test_kernel import threads_and_messages; print(threads_and_messages(1))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert other.strip() == threads_and_messages(1)


def test_an_idle_schedule_is_stuck_and_an_exception_of_a_thread_is_raised() -> None:
    with pytest.raises(Failed, match="server/main"):
        kernel = Kernel(0)
        kernel.process("server", lambda: threading.Event().wait())
        with installed(kernel):
            kernel.run()
    with pytest.raises(ZeroDivisionError):
        kernel = Kernel(0)
        kernel.process("server", lambda: 1 // 0)
        with installed(kernel):
            kernel.run()


def test_a_killed_process_runs_its_finally_blocks_without_effect() -> None:
    kernel, done = Kernel(0), list[str]()

    def victim() -> None:
        try:
            time.sleep(100)
        finally:
            done.append("finally")
            threading.Event().wait(0.1)
            done.append("after an operation")

    process = kernel.process("victim", victim)
    kernel.at(1.0, process.kill)
    kernel.at(5.0, kernel.stop)
    with installed(kernel):
        kernel.run()
    assert (process.exit_code, done) == (-9, ["finally"])


def test_a_thread_that_gave_up_waiting_takes_nobodys_wakeup() -> None:
    kernel, got = Kernel(0), list[object]()

    def main() -> None:
        items: queue.SimpleQueue[str] = queue.SimpleQueue()
        with pytest.raises(queue.Empty):
            items.get(timeout=1.0)
        kernel.spawn(kernel.processes[0], "putting", lambda: (time.sleep(1.0), items.put("item")))
        got.append(items.get(timeout=5.0))

    kernel.process("main", main).on_end.append(kernel.stop)
    with installed(kernel):
        kernel.run()
    assert got == ["item"]


def test_a_signal_interrupts_the_main_thread_and_a_wait_goes_on() -> None:
    kernel, got = Kernel(0), list[object]()

    def main() -> None:
        signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
        time.sleep(10)
        got.append(round(time.monotonic()))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        time.sleep(10)

    process = kernel.process("main", main)
    for second in (3.0, 15.0):
        kernel.at(second, kernel.deliver, process, signal.SIGINT)
    kernel.at(16.0, kernel.stop)
    with installed(kernel):
        kernel.run()
    assert got == [signal.SIGINT, 10]
    assert process.exit_code == -signal.SIGINT


def test_a_partition_delays_messages() -> None:
    world = World(3)
    world.client("client", 200)
    world.kernel.at(20.0, world.net.cut, "server", "client", 100.0)
    world.run(until=400)
    assert (world.sums, world.errors) == (list(range(1, 201)), [])


def test_a_long_partition_ends_the_session_on_both_sides() -> None:
    world = World(3)
    world.client("client", 200)
    world.kernel.at(20.0, world.net.cut, "server", "client", 500.0)
    world.run(until=900)
    assert len(world.errors) == world.adder.lost_sessions == 1
    assert len(world.sums) <= 20


def test_each_call_arrives_once_whatever_connection_is_lost() -> None:
    for seed in range(20):
        world, random = World(seed), Random(seed)
        client = world.client("client", 50)
        for _ in range(3):
            world.kernel.at(random.uniform(1.0, 60.0), world.net.reset, client)
        world.run(until=600)
        assert (world.sums, world.errors) == (list(range(1, 51)), []), seed


# ---------------------------------------------------------------------------------------------------------- files
def write_journal(root: Path, acknowledged: list[int], first: int = 0) -> None:
    with Journal(root / "journal.jsonl") as journal:
        for number in range(first, first + 5):
            journal.append({"number": number})
            acknowledged.append(number)


def run_on(root: Path, seed: int, main: Callable[[], object], *, kill_at: int = 0, power: bool = False) -> Kernel:
    """Run a process on this disk, and perhaps let the power fail at the end."""
    kernel = Kernel(seed)
    disk = Disk(kernel, root, forgets=power)
    process = kernel.process("writer", main)
    process.kill_at = kill_at
    process.on_end.append(lambda: kernel.at(0.0, kernel.stop))
    if power:
        process.on_end.append(disk.lose_power)
    with installed(kernel, disk):
        kernel.run()
    return kernel


def numbers_in(root: Path) -> list[Any]:
    return [record["number"] for record in Journal.read(root / "journal.jsonl")]


@pytest.mark.parametrize("power", [False, True])
def test_acknowledged_records_survive_a_kill_at_any_file_operation(root: Path, power: bool) -> None:
    path, torn = root / "journal.jsonl", 0
    for kill_at in range(1, 40):
        acknowledged = list[int]()
        run_on(root, kill_at, partial(write_journal, root, acknowledged), kill_at=kill_at, power=power)
        if not path.exists():
            assert not acknowledged
            continue
        torn += path.read_bytes()[-1:] not in (b"\n", b"")
        found = numbers_in(root)
        assert found[: len(acknowledged)] == acknowledged
        assert found == list(range(len(found)))
        run_on(root, kill_at, partial(write_journal, root, [], 100))
        assert numbers_in(root) == [*found, *range(100, 105)]
        path.unlink()
        Path(f"{path}.lock").unlink(missing_ok=True)
    assert torn
    assert acknowledged == list(range(5))


def test_what_was_not_synced_may_be_lost_when_the_power_fails(root: Path) -> None:
    def main() -> None:
        (root / "a").mkdir()
        (root / "a" / "file").write_text("first")
        with (root / "a" / "file").open("a") as file:
            file.write(", second")
        (root / "a").rename(root / "b")

    found = set[tuple[str, ...]]()
    for seed in range(60):
        run_on(root, seed, main, power=True)
        found.add(tuple(f"{path.name}: {path.read_text() if path.is_file() else ''}" for path in root.rglob("*")))
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert {(), ("a: ",), ("a: ", "file: "), ("b: ", "file: first, second")} <= found
    assert any(each[-1:] not in ((), ("a: ",), ("b: ",), ("file: ",), ("file: first, second",)) for each in found)


def test_a_full_disk_refuses_data_and_the_journal_stays_whole(root: Path) -> None:
    acknowledged, errors = list[int](), list[int | None]()

    def main() -> None:
        with Journal(root / "journal.jsonl") as journal:
            for number in range(10):
                try:
                    journal.append({"number": number})
                    acknowledged.append(number)
                except OSError as error:
                    errors.append(error.errno)
                time.sleep(1.0)

    kernel = Kernel(0)
    kernel.process("writer", main).on_end.append(kernel.stop)
    kernel.at(2.5, lambda: setattr(kernel.machine("writer"), "full_until", 6.0))
    with installed(kernel, Disk(kernel, root)):
        kernel.run()
    assert len(errors) == 3
    assert numbers_in(root) == acknowledged
    assert acknowledged[-1] == 9


def test_a_killed_process_holds_no_lock_and_closes_no_other_file(root: Path) -> None:
    kernel, opened = Kernel(0), list[object]()

    def holder() -> None:
        try:
            with Journal(root / "journal.jsonl"):
                time.sleep(100)
        except Killed:
            opened.append("unwound")
            raise

    def next_one() -> None:
        time.sleep(2)
        with Journal(root / "journal.jsonl") as journal:
            journal.append({"number": 1})
            opened.append("opened")

    process = kernel.process("holder", holder)
    kernel.at(1.0, process.kill)
    kernel.process("next", next_one).on_end.append(kernel.stop)
    with installed(kernel, Disk(kernel, root)):
        kernel.run()
    assert sorted(map(str, opened)) == ["opened", "unwound"]
