"""Mistakes that are put into the code, one at a time, to show that schedules find them.

`python -m tests.simulation.mistakes` looks for the first seed that finds each.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import logging
import multiprocessing
import textwrap
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from dray.experiment import driver, open_search
from dray.experiment.alerts import Alerts
from dray.experiment.cleaner import Cleaner
from dray.experiment.core import RunCore
from dray.experiment.driver import ExperimentDriver
from dray.experiment.limits import Limits
from dray.experiment.notify import Notifier
from dray.experiment.request_files import RequestFiles
from dray.experiment.restarts import Reuse
from dray.experiment.results import PendingResults
from dray.experiment.retention import Retention
from dray.experiment.run import Run
from dray.groups.lender_shell import GroupsShell, LenderShell
from dray.leases.desk import Desk
from dray.leases.lease import Client, Lease
from dray.records.spending import Spending
from dray.rpc.connection import Session
from dray.rpc.event_loop import EventLoop
from dray.rpc.stream import Stream
from dray.serve import processes
from dray.serve.accounts import Accounts
from dray.serve.core import ServerCore
from dray.serve.manager import Manager
from dray.serve.processes import Spares
from dray.serve.queue import Queue
from dray.serve.scheduler import Scheduler
from dray.storage import checkpoints
from dray.storage.checkpoints import CheckpointStore
from dray.training.checkpoint.checkpointer import Saver
from dray.training.checkpoint.joint import JointCheckpoint
from dray.worker import trial as worker_trial
from dray.worker.host import RayHost
from dray.worker.link import TrialLink
from dray.worker.reports import Reports
from searchers.asha import ASHA
from searchers.journal import Journal
from searchers.rung import Rung
from searchers.search import Search
from tests.simulation.seeds import Kind, Seed, outcome_of

MOST = 100
TIMEOUT_S = 300.0
"""How long it is looked for a mistake."""


class Mistake(NamedTuple):
    """A fault in the code of a method or function: `wrong` replaces `right`. This seed finds it, if one is known."""

    owner: Any
    name: str
    right: str
    wrong: str
    seed: int | None
    kind: Kind = "whole"
    options: str = ""

    def at(self, number: int) -> Seed:
        return Seed(number=number, kind=self.kind, options=frozenset(self.options.split()))

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Put the mistake into the code within the block."""
        right = inspect.getattr_static(self.owner, self.name)
        function = right.fget if isinstance(right, property) else getattr(right, "__func__", right)
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.right) == 1, f"{self.name} has changed: adapt this mistake"
        namespace: dict[str, Any] = {}
        exec(source.replace(self.right, self.wrong), function.__globals__, namespace)
        setattr(self.owner, self.name, namespace[self.name])
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)

    def find(self, most: int = MOST) -> tuple[int, str] | None:
        """Return the first seed that finds the mistake, and the failure.

        Its own seed is tried first, but may no longer find it after changes to the code or the simulator.
        """
        with self.present():
            for number in itertools.chain([] if self.seed is None else [self.seed], range(most)):
                if why := outcome_of(self.at(number)).why:
                    return number, why
        return None


MISTAKES = {
    # ------------------------------------------------------------------ what decides
    "a lease for a start that has ended": Mistake(
        Desk, "next_lease", "client is None or start in self._ended_starts", "client is None", None, "alone"
    ),
    "a request read twice": Mistake(
        ExperimentDriver, "request", "if request.id in self._requested or", "if", 10, "alone", "requests"
    ),
    "a drained trial lost that another rank has left alone": Mistake(
        Desk,
        "leave",
        "departure.is_failure or departure.alone or rank == 0",
        "departure.is_failure or rank == 0",
        None,
        "alone",
    ),
    "a failure that an earlier trial in its process has caused counts": Mistake(
        Reuse, "withhold", "if not left.reused", "if True", 0, options="once"
    ),
    "a used group for a trial that needs a new one": Mistake(
        Desk, "_match", "if group.used and trial in client.new:", "if False:", 0, options="once"
    ),
    "a trial queued that has ended": Mistake(
        ExperimentDriver, "_granted", "if view.state not in RUNNABLE or self._closing", "if self._closing", None
    ),
    "a drained trial lost": Mistake(
        Desk, "group_ended", 'lease.state in ("granted", "bound", "moving")', 'lease.state == "granted"', 120
    ),
    "a trial lost that has let another one have its group": Mistake(
        Lease,
        "goes_on",
        'was_moved or (self.state != "leaving" and outcome == "yielded")',
        "was_moved",
        0,
        "alone",
    ),
    "a lease that outlives its group": Mistake(
        Desk, "group_ended", "(state.writing, state.lease)", "(state.lease,)", 25, "alone"
    ),
    "a group taken from the trial that trains": Mistake(
        Desk, "_end", "group.writing = None", "group.lease = group.writing = None", 39, "alone"
    ),
    "a trial completed that has let another one have its group": Mistake(
        Reports, "complete", 'if goes_on and self.life.state == "fitting":', "if False:", 5
    ),
    "a closed terminal that hung": Mistake(
        ExperimentDriver, "close", 'self._answer_all(lease, "interrupt")', "pass", None
    ),
    "an acknowledgement before the flush": Mistake(
        ExperimentDriver, "_append", "Append(record, wait)", "Append(record, False)", 0
    ),
    "a lease granted twice": Mistake(
        Client, "next_trial", "if not self._is_held(trial)", "if True", 98, options="requests"
    ),
    "a lost wakeup: the parameters of a lease": Mistake(Desk, "bind", "self._answer_ranks(state.group)", "pass", 0),
    "a lost wakeup: a trial that is queued": Mistake(Desk, "enqueue", "    self._match()\n", "", 18),
    "a retry of a trial that has ended": Mistake(
        ExperimentDriver,
        "_left",
        "has_ended = self.search.trials[trial].ended or self._results.ends(trial)",
        "has_ended = False",
        69,
        "alone",
        "requests",
    ),
    "retention deletes what a paused trial needs": Mistake(
        driver,
        "checkpoints_needed",
        '2 if trial.state == "RUNNING" else 1',
        '2 if trial.state == "RUNNING" else 0',
        29,
        "alone",
    ),
    "a drained trial lost that has saved": Mistake(
        Lease, "goes_on", 'self.state == "moving" and outcome == "interrupted"', "False", 33
    ),
    "a trial that restarted, and waits for what was decided": Mistake(
        ExperimentDriver, "_act", 'if lease is not None and answer.decision == "stop":', "if False:", None
    ),
    "a fork's source deleted": Mistake(
        Retention, "_prune", "(trial, each.batches) in sources", "False", 1, options="requests"
    ),
    "a fork's source kept only until its own checkpoint is written": Mistake(
        Retention, "saved", "self._prune()", "self.unpin(trial); self._prune()", 1, options="requests"
    ),
    "a canceled trial that was stopped by the method": Mistake(
        open_search,
        "_end_stopped",
        '"canceled" if trial in canceled else "stopped"',
        '"stopped"',
        None,
        options="requests",
    ),
    "a budget that is exceeded": Mistake(
        Limits, "spend", "self.share >= 1:", "self.share >= 1.5:", 0, options="budgets"
    ),
    "an alert sent again by each driver": Mistake(
        Alerts, "_take", 'self.pending.pop(record["id"], None)', "pass", 0, options="alerts"
    ),
    "an alert forgotten that a killed driver was sending": Mistake(
        Alerts, "_take", 'self.pending[record["id"]] = record', "pass", 2, options="alerts"
    ),
    "an alert raised again by another driver": Mistake(
        Alerts, "_take", 'self._raised.add(record["key"])', "pass", 0, options="alerts"
    ),
    "an alert that is not on the disk with its cause": Mistake(
        RunCore, "_carry_out_all", "self._write(records + alerts)", "self._write(records)", 1, options="alerts"
    ),
    "a killed run that counts up to the next": Mistake(
        Spending,
        "add",
        'if name == "opened":\n',
        'if name == "opened":\n        self._advance(event["time"])\n',
        1,
        options="budgets",
    ),
    "one trial too many goes on from a rung": Mistake(
        Rung, "rank", "self.order.equals_one_of(trial, self._count())", "True", 0
    ),
    "NaN goes on from a rung": Mistake(
        ASHA, "_report", "not (continues and value != math.inf)", "not continues", 129, "alone", "requests"
    ),
    "a failed trial is not ranked": Mistake(
        ASHA, "_exit", "self._rank_exit(exited, next_rung=self._next.pop(exited.trial, 0))", "pass", 0
    ),
    "results decided without their number": Mistake(
        PendingResults, "awaits", " and self._of[trial][0].number == number", "", None
    ),
    "a fork with other code": Mistake(Search, "code_of", "self._origin(trial)", "trial", 4, options="requests"),
    # ------------------------------------------------------------------ what carries a driver's decisions out
    "decisions carried out before they are written": Mistake(
        RunCore,
        "_carry_out_all",
        "self._write(records + alerts)\n        for each in decided:\n            self.carry_out(each)",
        "pass\n        for each in decided:\n            self.carry_out(each)\n        if records:\n"
        "            self._write(records + alerts)",
        0,
    ),
    "a record that nobody waits for": Mistake(Run, "_write", "if any(each.wait for each in records):", "if False:", 0),
    "trials that may not save at the end of a run": Mistake(
        Run, "_close", "self._loop.post(self.driver.close)", "pass", 95
    ),
    "an answered request that stays": Mistake(
        Run, "_perform", "self._requests.remove(request_id)", "pass", 0, options="requests"
    ),
    "a request that is read only once": Mistake(RequestFiles, "waiting", "*.json", "*.none", 0, options="requests"),
    "a failure whose logs are never read": Mistake(Run, "_read_logs", "self._logs.submit(read)", "pass", 0),
    "an alert that is not noted": Mistake(
        Notifier, "told", "found, self._told = self._told or [], []", "found, self._told = [], []", 3, options="alerts"
    ),
    "checkpoints deleted before the others are on the disk": Mistake(
        Cleaner, "_prune", "self._store_of(each.trial).force_to_disk(each.batches)", "pass", 0
    ),
    "checkpoints deleted that are needed again": Mistake(
        Cleaner, "_prune", "if self._retention.is_pruning(each, prune):", "if True:", None
    ),
    "deletions that nobody hears of": Mistake(
        Cleaner,
        "_prune",
        "self._post(lambda: self._retention.pruned(prune, deleted, missing, failed=failed))",
        "pass",
        None,
    ),
    "a checkpoint that a killed driver has not noted is never found": Mistake(
        Cleaner, "_examine", "if store.find(batches) is not None:", "if False:", None
    ),
    "a group's death that nobody hears of": Mistake(LenderShell, "_heard", "self._lender.on(owner, event)", "pass", 0),
    "groups that are not ended": Mistake(GroupsShell, "_act", "group.end()", "pass", 5),
    "groups that do not end with the run": Mistake(GroupsShell, "close", "group.end()", "pass", 0),
    "a call that comes before the decider is lost": Mistake(EventLoop, "_take", "self._early.append(call)", "pass", 38),
    "a burst that is not settled": Mistake(EventLoop, "call", "self._loop.call_soon(self._settle)", "pass", 0),
    # ------------------------------------------------------------------ the path of a commit
    "a commit without permission": Mistake(CheckpointStore, "commit", "    confirm()\n", "", 0, "commit"),
    "a permission that outlives a reconnect": Mistake(
        TrialLink, "confirm_commit", "while time.monotonic() > asked_at + FRESH_S:", "if True:", 32, "commit"
    ),
    "a report under an old lease counts": Mistake(ExperimentDriver, "report", '"fenced"', '"continue"', None),
    "a lost driver hides how a trial left": Mistake(
        RayHost, "close", "with contextlib.suppress(DriverLost):", "if True:", 5, "commit"
    ),
    "a report before its checkpoint is committed": Mistake(
        Saver,
        "publish",
        "if not (report.decides or self._frees) or (writing := self._writing) is None:",
        "if (writing := self._writing) is None or True:",
        9,
        "commit",
    ),
    "an answer that is not awaited": Mistake(Saver, "answer", "answer is not None and answer.result()", "False", None),
    "a checkpoint that is renamed before its manifest": Mistake(
        CheckpointStore, "commit", "write_manifest(staging, known or {})\n", "pass\n", 0, "commit"
    ),
    "a manifest that lists nothing": Mistake(
        checkpoints, "write_manifest", "for name, each in listed}", "for name, each in listed[:0]}", 0, "commit"
    ),
    "checkpoints of killed writers stay": Mistake(RayHost, "resume", "self._store.sweep()", "pass", None, "commit"),
    "a carried report is not sent": Mistake(
        RayHost, "resume", 'return self.reports.resume(report, carried["decides"])', "return None", 5, "commit"
    ),
    "a commit that nobody hears of": Mistake(
        RayHost,
        "commit",
        "self._link.saved(checkpoint, report.batches, metric, seconds)",
        "pass",
        0,
        "commit",
    ),
    "rows without a checkpoint are forgotten": Mistake(
        RayHost, "commit", "[*staged.rows, *message.rows]", "list(message.rows)", None, "commit"
    ),
    "kept rows are not sent with a report": Mistake(
        TrialLink, "send", "rows=[*self._kept, *report.rows]", "rows=[*report.rows]", 0, "commit"
    ),
    "a request to stop that is not heard": Mistake(
        TrialLink, "stop_requested", "self._stop.done() and self._stop.result()", "False", None, "commit"
    ),
    "a driver that is lost fails the trial": Mistake(
        worker_trial,
        "lost_driver",
        'Failure(kind="node", batches=batches)',
        'Failure(kind="error", batches=batches)',
        None,
    ),
    "a message that comes twice": Mistake(
        Stream, "_confirm", "for _ in range(count - self._confirmed):", "for _ in range(0):", 1, "commit"
    ),
    "a message that is lost with its connection": Mistake(
        Stream, "resume", "for message in self._kept:", "for message in ():", 37, "commit"
    ),
    "a session that forgets its client at once": Mistake(
        Session, "expire", "if attempt == self.attempt:", "if True:", 105, "commit"
    ),
    "a staged part that stays after an error": Mistake(
        JointCheckpoint, "writing", "if self.owns_staging", "if False", None, "commit"
    ),
    "a record that is not forced to the disk": Mistake(Journal, "_write", "os.fsync(self._file)", "pass", 0),
    "half a record that stays after a full disk": Mistake(
        Journal, "_write", "os.ftruncate(self._file, self._size)", "pass", None
    ),
    # ------------------------------------------------------------------ the server
    "an experiment whose process dies again and again is not given up": Mistake(
        Scheduler, "ended", "item.restarts >= MAX_DEATHS", "False", None
    ),
    "a process while the trials of the last one have yet to leave": Mistake(
        Scheduler, "_is_up", "or is_leaving", "", None, options="token"
    ),
    "a process that starts on a full disk": Mistake(Scheduler, "_why_no_process", "if self.full:", "if False:", None),
    "more processes than slots": Mistake(
        Scheduler, "_why_no_process", "if len(those) > slots and", "if False and", None
    ),
    "a full disk counts as a death": Mistake(Scheduler, "ended", "elif process.met_full_disk:", "elif False:", None),
    "an experiment activated that its token can't pay": Mistake(
        Scheduler, "act", "self.accounts.admit(item)", "pass", None
    ),
    "a pause that no process hears of": Mistake(
        Scheduler, "act", "if name in self._processes:", "if False:", None, options="token"
    ),
    "a server's end that no process hears of": Mistake(
        Scheduler, "close", "self._emit(SignalProcess(name, signal.SIGTERM))", "pass", None, options="token"
    ),
    "what an experiment has spent is not recorded": Mistake(
        Accounts, "settle", "self._queue.spent(name, spent)", "pass", None
    ),
    "a budget is not reserved": Mistake(Accounts, "use", "if is_live else 0.0", "if False else 0.0", None),
    "an overrun that only counts what is spent": Mistake(
        Accounts, "overrun", "use.used[unit] + use.reserved[unit] > limit", "use.used[unit] > limit", None
    ),
    "the desk does not know of a token's slots": Mistake(
        ServerCore, "_add", "{**share, **self.scheduler.claim(run)}", "dict(share)", 2, options="token"
    ),
    "a user's request that is not on the disk": Mistake(
        Queue, "_note", "self._append(record)", "pass", 2, options="token"
    ),
    "deaths count in a row though it trained between them": Mistake(
        Queue, "_apply", '1 if record["has_trained"] else item.restarts + 1', "item.restarts + 1", None
    ),
    "an extension that is applied at each start": Mistake(
        Queue, "opened", "if self._items[name].extension:", "if False:", None
    ),
    "deleting an experiment gives its token its money back": Mistake(
        Queue, "_forget", "item is not None and item.owner", "False", None
    ),
    "what was spent before the server died is forgotten": Mistake(
        Manager, "__init__", "if item.owner:", "if False:", None
    ),
    "a process that ended before it was assigned": Mistake(
        Manager, "_start", "if process.exit_code is not None:", "if False:", None, options="token"
    ),
    "a process that created an experiment waits for ever": Mistake(
        Manager, "_accept", "process.signal(signal.SIGKILL)", "pass", None, options="token"
    ),
    "the end of a process is told before the disk is looked at": Mistake(
        Manager, "_note_end", "self._scheduler.disk(why_full(self._results))", "pass", None, options="token"
    ),
    "a spare process that has ended": Mistake(
        Spares,
        "take",
        "self._waiting if self._waiting.exit_code is None else self._start()",
        "self._waiting",
        None,
        options="token",
    ),
    "an experiment's process outlives its server": Mistake(
        processes, "_receive", "os.kill(os.getpid(), signal.SIGKILL)", "return", 204, options="token"
    ),
    "a damaged checkpoint comes back": Mistake(
        Retention, "_add_listed", "each.checkpoint not in self._damaged and ", "", None
    ),
    "a damaged checkpoint comes back after a restart": Mistake(
        Retention, "recover", 'if record.get("event") == "damaged"', "if False", None
    ),
}


def _found(name: str, most: int, sends: Any) -> None:
    logging.disable()
    try:
        found = MISTAKES[name].find(most)
    except Exception as error:
        sends.send(repr(error))
    else:
        sends.send("alive" if found is None else f"{found[0]}: {found[1][:150]}")


def main() -> None:
    """Print the first seed that finds each mistake."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mistakes")
    parser.add_argument("words", nargs="*", help="only mistakes with one of these in their name")
    parser.add_argument("--most", type=int, default=MOST, help="seeds to try for each")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    names = [name for name in MISTAKES if not arguments.words or any(word in name for word in arguments.words)]
    context, running = multiprocessing.get_context("fork"), dict[Any, tuple[str, Any, float]]()
    while names or running:
        # Each in a process of its own: a schedule whose threads wait for each other would not end.
        while names and len(running) < arguments.processes:
            receives, sends = context.Pipe(duplex=False)
            process = context.Process(target=_found, args=(name := names.pop(0), arguments.most, sends))
            process.start()
            running[receives] = name, process, time.monotonic()
        is_found = wait([*running], timeout=1.0)
        for receives, (name, process, began) in [*running.items()]:
            if receives in is_found or time.monotonic() > began + TIMEOUT_S:
                print(f"{name}: {receives.recv() if receives in is_found else 'alive, or it hangs'}", flush=True)
                process.kill()
                process.join()
                del running[receives]


if __name__ == "__main__":
    main()
