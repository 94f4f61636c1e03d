"""Runs a trial with ``isolation: sandbox`` in a child process of its worker, in a sandbox (`dray.cluster.bubblewrap`).

The worker itself loads none of the experiment's code. The child (`dray.worker.sandbox_child`) has no network: it calls
the driver and the desk through this process, over a Unix socket with a key of its own. Only calls about its own lease
are passed on. Nothing that comes from the child is unpickled, and it can't change or replace the log that this process
writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dray.cluster import bubblewrap
from dray.cluster.node_check import kills_of_kernel
from dray.code.factory import FromDirectory
from dray.leases.failure import LOW_MEMORY, Failure, failure_printed
from dray.leases.messages import Departure, DeskReport, Unfit
from dray.rpc.calls import Call, PeerUnreachable, Session
from dray.rpc.connection import Connection, Endpoint
from dray.rpc.event_loop import EventLoop
from dray.rpc.wire import Malformed, checked
from dray.storage.disk import scratch
from dray.worker.lease import TrialLease
from dray.worker.log.tail import last_output, with_log_tail
from dray.worker.log.trial_log import log_writer
from dray.worker.log.writer import ENDING
from dray.worker.ranks import Place
from dray.worker.spec import ExperimentSpec
from dray.worker.trial import log_path, lost_driver

LEAVE_S = 30.0
"""How long a child may take to end after it has left its lease."""
END_S = 10.0
"""How long the processes of a sandbox may take to end after they are killed."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What the child gets, after its environment variables: as pickles on its standard input."""

    calls: Endpoint
    group: str
    code: Path | None
    lease: TrialLease
    experiment: ExperimentSpec
    place: Place


def run_in_sandbox(
    group: str,
    code: Path | None,
    lease: TrialLease,
    driver: Connection,
    desk: Connection,
    experiment: ExperimentSpec,
    place: Place,
) -> Departure:
    """Run one lease, as `dray.worker.trial.run_trial` does. No process of the trial outlives this call."""
    log = log_path(lease, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    kills = kills_of_kernel()
    with scratch("sandbox") as directory, contextlib.closing(EventLoop("dray-sandbox")) as loop:
        loop.listen(str(directory / "calls"))
        relay = Relay(loop, driver, desk, group, lease, place)
        loop.attach(relay)
        inside = Inside(
            calls=loop.endpoint,
            group=group,
            code=code,
            lease=lease,
            experiment=_for_child(experiment, code),
            place=place,
        )
        output = log_writer.pipe_to(log, experiment.settings.secrets)
        try:
            status = _run(_command(inside, directory), inside, output, relay)
            if relay.departure is None:
                _note(log, output, _ending(status))
        finally:
            os.close(output)
            log_writer.flush(is_over=True)
            remove_links(lease.trial_dir)
    if relay.departure is not None:
        return relay.departure
    if relay.unreachable is not None:
        return lost_driver(relay.unreachable)
    is_killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return _death(lease, log, place.node, is_oom=is_killed and kills_of_kernel() > kills)


def _for_child(experiment: ExperimentSpec, code: Path | None) -> ExperimentSpec:
    """The experiment without what only this process needs: the code as an archive, and the texts that it masks."""
    load = experiment.load_trial
    if isinstance(load, FromDirectory):
        load = replace(load, directory=str(code))
    return replace(experiment, load_trial=load, needs=None, settings=replace(experiment.settings, secrets=()))


def _command(inside: Inside, directory: Path) -> list[str]:
    """The command of the child, without the file descriptor for information."""
    lease, settings = inside.lease, inside.experiment.settings
    experiment = lease.trial_dir.parent
    sources = [_source(Path(each)) for each in (lease.source, settings.source_checkpoint) if each is not None]
    code = [] if inside.code is None else [inside.code]
    return bubblewrap.command(
        [sys.executable, "-m", "dray.worker.sandbox_child"],
        own=[lease.trial_dir],
        read=[*settings.readable, *code, *filter(Path.exists, sources), lease.trial_dir / "logs", directory],
        hidden=[each for each in (experiment.parent, experiment) if each != Path("/")],
        gpu=bool(inside.place.gpus),
    )


def _source(checkpoint: Path) -> Path:
    """What to mount for a checkpoint that a trial begins from. If it is another trial's, that one may run, and put a
    link in its place at any time, which must not be followed outside: so its whole directory."""
    return checkpoint.parent if checkpoint.parent.name.startswith("trial_") else checkpoint


def _run(command: list[str], inside: Inside, output: int, relay: Relay) -> int:
    """Run the child to its end, and that of all its processes. Returns its exit status, as a shell has it."""
    told, tells = os.pipe()
    with open(told, "rb") as info:
        try:
            process = subprocess.Popen(
                bubblewrap.with_info(command, tells),
                env=bubblewrap.variables(os.environ),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[tells],
            )
        finally:
            os.close(tells)
        with process, _first_process(info.read()) as first:
            try:
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    pickle.dump(dict(inside.experiment.settings.environment), stdin)
                    pickle.dump(inside, stdin)
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(POLL_S)
                    if relay.left_at is not None and time.monotonic() > relay.left_at + LEAVE_S:
                        process.kill()
            finally:
                process.kill()  # with it, the first process of the sandbox, and with that all others
                if first is not None:
                    select.select([first], [], [], END_S)


@contextlib.contextmanager
def _first_process(info: bytes) -> Iterator[int | None]:
    """A file descriptor of the sandbox's first process, with which all others end; None if there is none (any more)."""
    try:
        descriptor = os.pidfd_open(json.loads(info)["child-pid"])
    except (ValueError, KeyError, OSError):
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _ending(status: int) -> str:
    number = -status if status < 0 else status - 128
    if number in set(signal.Signals):
        return f"killed by {signal.Signals(number).name}"
    return f"exited with code {status}"


def _note(log: Path, output: int, ending: str) -> None:
    """Write how the child ended as the last line of its log."""
    log_writer.flush()
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_in_line = file.read(1) not in (b"", b"\n")
    os.write(output, (b"\n" if is_in_line else b"") + f"{ENDING}{ending}\n".encode())


def _death(lease: TrialLease, log: Path, node: str, *, is_oom: bool) -> Departure:
    error = f"the sandbox of trial {lease.trial_id} died"
    failure = failure_printed(last_output(log), node) or Failure(kind="died")
    if is_oom:
        failure = Failure(kind="host_oom")
        error += f": meanwhile the kernel has killed a process of {os.uname().nodename}, which was {LOW_MEMORY}"
    return Departure(outcome="errored", error=with_log_tail(error, log), failure=failure)


def remove_links(directory: Path) -> None:
    """Remove links that lead out of a directory that a sandbox could write to, and what is neither a file, a directory
    nor a link: others could be led elsewhere by a link, and blocked by a pipe."""
    root, left = Path(os.path.realpath(directory)), [str(directory)]
    while left:
        folder = left.pop()
        with contextlib.suppress(OSError):
            os.chmod(folder, os.stat(folder).st_mode | stat.S_IRWXU)  # a trial may have forbidden it
            for entry in list(os.scandir(folder)):
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                elif entry.is_symlink():
                    if not Path(os.path.realpath(entry.path)).is_relative_to(root):
                        os.unlink(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)


class Relay:
    """Passes the child's calls on to the driver and the desk, as far as they are about its own lease.

    Attributes:
        departure: how the child has left, or None.
        left_at: when, by `time.monotonic`.
        unreachable: why the driver or the desk can't be called any more, or None.
    """

    METHODS = frozenset(
        ("report", "may_commit", "improves", "best", "saved", "damaged", "stop_wanted", "leave", "broken", "flush")
    )

    def __init__(
        self, loop: EventLoop, driver: Connection, desk: Connection, group: str, lease: TrialLease, place: Place
    ) -> None:
        self._loop, self._driver, self._desk = loop, driver, desk
        self._group, self._lease, self._place = group, lease, place
        self.departure: Departure | None = None
        self.left_at: float | None = None
        self.unreachable: PeerUnreachable | None = None

    # ------------------------------------------------------------------ `dray.rpc.event_loop.Decider`
    def take(self, call: Call) -> None:
        """Handle a call of the child; `Malformed`, which ends the connection, if it has no business to make it."""
        if call.method not in self.METHODS:
            raise Malformed(f"the method {call.method!r:.80}")
        checked(getattr(self, call.method), call, *call.args)

    def lost(self, session: Session) -> None:
        """No-op: the child ends."""

    def settle(self) -> None:
        """No-op."""

    def failed(self, error: BaseException) -> None:
        raise error

    # ------------------------------------------------------------------ calls to the driver
    def report(self, call: Any, lease: int, report: DeskReport, decides: bool) -> None:
        # An invalid one would end this process's connection to the driver.
        self._ask(call, self._driver, its_own=lease == self._lease.number and report.is_valid)

    def may_commit(self, call: Any, lease: int) -> None:
        self._ask(call, self._driver, its_own=lease == self._lease.number)

    def improves(self, call: Any, lease: int, score: float) -> None:
        self._ask(call, self._driver, its_own=lease == self._lease.number)

    def best(self, call: Any) -> None:
        self._ask(call, self._driver, its_own=True)

    def saved(
        self, call: Any, trial: int, checkpoint: str, batches: int, value: float | None, seconds: float | None = None
    ) -> None:
        self._tell(call, its_own=trial == self._lease.trial_id and checkpoint == self._lease.store.id_of(batches))

    def damaged(self, call: Any, trial: int, checkpoint: str, why: str) -> None:
        is_in_store = Path(checkpoint).parent == self._lease.trial_dir
        self._tell(call, its_own=trial == self._lease.trial_id and is_in_store)

    # ------------------------------------------------------------------ calls to the desk
    def stop_wanted(self, call: Any, lease: int) -> None:
        self._ask(call, self._desk, its_own=lease == self._lease.number)

    def broken(self, call: Any, client: str, group: str, why: Unfit) -> None:
        self._ask(call, self._desk, its_own=(client, group) == (self._lease.client, self._group))

    # ------------------------------------------------------------------ calls to this process
    def leave(self, call: Any, lease: int, rank: int, departure: Departure) -> None:
        """Keep how the child has left: the first departure counts. The worker tells the desk when it has ended."""
        # It has a process of its own, so it can't blame an earlier trial.
        self._check(call, lease == self._lease.number and departure.outcome != "unloaded")
        if self.departure is None:
            failure = departure.failure
            if failure is not None and failure.node:  # it can't blame another node
                failure = replace(failure, node=self._place.node)
            self.departure, self.left_at = replace(departure, stale="", reused=False, failure=failure), time.monotonic()
        call.answer()

    def flush(self, call: Any) -> None:
        """Answer when all output is in the log."""
        log_writer.flush()
        call.answer()

    def _ask(self, call: Call, callee: Connection, *, its_own: bool) -> None:
        self._check(call, its_own)
        answer: Future[Any] = getattr(callee, call.method)(*call.args)
        answer.add_done_callback(lambda answered: self._loop.post(self._answer, call, answered))

    def _tell(self, call: Call, *, its_own: bool) -> None:
        self._check(call, its_own)
        self._driver.tell(call.method, *call.args)

    def _answer(self, call: Call, answered: Future[Any]) -> None:
        try:
            call.answer(answered.result())
        except PeerUnreachable as error:
            self.unreachable = error
            call.session.end()
        except RuntimeError as error:
            call.fail(str(error))

    def _check(self, call: Call, its_own: bool) -> None:
        if not its_own:
            raise Malformed(f"{call.method} of trial {self._lease.trial_id} about another lease: {call.args!r:.80}")
