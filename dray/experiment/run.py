"""One run of an experiment on Ray, from its journal's state to the search's end: the driver's side of everything.

Two threads share the search under one lock. Tune's thread feeds it what the trials report and carries out what it
decides; the thread that called `run()` reads the desk's messages: it binds leases to parameters, records metrics,
counts restarts, starts groups, and shows all of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

import dray
from dray.cluster.autoscaler import limits
from dray.cluster.demand import Demand
from dray.cluster.desk import Message
from dray.cluster.elastic import Elastic
from dray.cluster.failure import Failure
from dray.cluster.lending import Slots, WorkerGroup, end_groups, start_desk, waiting
from dray.cluster.node_checks import UnfitNode
from dray.cluster.ray_cluster import Cluster, groups_in, most_slots, slot_kind, slots_now
from dray.cluster.startup_hook import HOOK, StartupHookFailed
from dray.cluster.watch import Watch
from dray.experiment.code import ByValue, FromDirectory, Sent
from dray.experiment.config import ExperimentConfig
from dray.experiment.directory import ExperimentDirectory
from dray.experiment.display import Display
from dray.experiment.errors import ConfigError, DeskLost, ExperimentError
from dray.experiment.metrics_log import MetricsLog
from dray.experiment.nodes import checked_nodes, told_of_node
from dray.experiment.observers import Observers
from dray.experiment.restarts import record, recorded, why_given_up
from dray.experiment.retention import Policy, Retention
from dray.experiment.timeline import Timeline
from dray.experiment.travel import send
from dray.hosts.ray_worker import REPORT, TOGETHER_S, Lease
from dray.hosts.ray_worker import Experiment as TrialsExperiment
from dray.storage import CheckpointStore
from dray.training.units import Batch, TrainUnit
from searchers.errors import SpaceError
from searchers.events import Started
from searchers.journal import Journal
from searchers.ray_tune import Answer, TuneDriver
from searchers.search import Search, TrialView

POLL_S = 0.25
"""How often the driver looks at signals and the display when nothing happens."""
CLUSTER_CHECK_S = 5.0
"""How often the driver looks whether the cluster has grown."""
GROUPS_CHECK_S = 1.0
"""How often the driver looks, on a cluster, which groups have what they need, and which are needed."""
REPORTS_PER_S = 300
"""Of all trials together, that nobody waits for: a third of what the desk can take (`bench/scale.py`)."""
GROUP_STARTS_IN_VAIN = 5
"""A group that starts so often without finishing one lease ends the experiment."""
IN_TURN_S = 30.0
"""How long the first group, then Tune, then further groups, are given to start in turn on a machine of our own."""
TUNE_END_S = 60.0
"""How long Tune may take to notice its end. A thread that is in Ray when that is shut down may end the process."""
GROUPS_END_S = 30.0
"""How long all groups together may take to leave a cluster that goes on without them."""
STOP_GRACE_S = 120.0
"""How long trials may take to save when the driver is told to stop."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What the run did; printed by benchmarks and looked at by tests."""

    handles_started: int = 0
    groups_started: int = 0
    groups_lost: int = 0
    groups_retired: int = 0
    restarts: Counter[int] = field(default_factory=Counter)


class Run:
    """Args:
    config, directory, journal, observers, search, metrics: of the experiment; the search has been started, and the
        config says what it was extended to.
    revived: trials that had ended, and go on as the search was extended.
    load_trial: brings the trial's class to the workers.
    cluster: where to run.
    records: of the journal until now.
    on_message: called with each of the desk's messages; for benchmarks and tests.
    """

    def __init__(
        self,
        *,
        config: ExperimentConfig,
        directory: ExperimentDirectory,
        journal: Journal,
        observers: Observers,
        search: Search,
        metrics: MetricsLog,
        load_trial: FromDirectory | ByValue,
        cluster: Cluster,
        display: Display,
        records: Sequence[Mapping[str, Any]],
        revived: Container[int] = (),
        on_message: Callable[[Message], None] | None = None,
    ) -> None:
        self.config, self.search, self.display, self.cluster = config, search, display, cluster
        self._failures = recorded(records)
        self.counts = Counts(restarts=Counter({trial: len(mine) for trial, mine in self._failures.items()}))
        self._directory, self._journal, self._metrics = directory, journal, metrics
        self._load_trial: FromDirectory | ByValue | Sent = load_trial
        self._on_message, self._revived, self._observers = on_message, revived, observers
        self._timeline = Timeline(directory.metrics)
        self._lock = threading.RLock()
        self._error: BaseException | None = None
        self._stop_signals = 0
        self._groups: dict[str, WorkerGroup] = {}
        self._booting: set[str] = set()
        self._sought_at = -math.inf
        self._starts: Counter[str] = Counter()
        self._placements: dict[str, PlacementGroup] = {}
        self._taken_away: set[Any] = set()
        self._ended_groups: list[tuple[str, BaseException | None]] = []
        self._recorded: Counter[int] = Counter()
        self._group_numbers = itertools.count()
        self._failed_groups = 0
        self._records = records
        self._retention = Retention(
            Policy.of(config.checkpoint_storage, smaller_is_better=config.searcher.smaller_is_better),
            store_of=directory.store,
            needs=lambda trial: _checkpoints_needed(search.trials[trial]),
            note=lambda record: journal.append(record, wait=False),
            say=display.say,
        )
        # On a machine of our own they share its few CPUs. While the first group imports torch, on one core, Tune may
        # start; further groups wait for `_groups_may_start`.
        self._tune_may_start = not cluster.own
        self._began = time.monotonic()
        self._first: dict[str, float] = {}
        self._few_cores = _groups_at_once() == 1
        self._slots = self._find_slots(load_trial)
        self._experiment = self._for_trials()
        # Of this run of the experiment; one that resumes it is another.
        self._name = f"{directory.path.name}-{secrets.token_hex(4)}"
        self._needs = None if cluster.own else checked_nodes(directory, self._name, gpu=self._slots.gpu)
        sizes = config.slots_per_trial
        if cluster.own:  # it does not grow
            sizes = tuple(size for size in sizes if size <= sum(self._slots_now()))
        self._elastic = Elastic(self._slots, sizes, name=self._name) if len(config.slots_per_trial) > 1 else None
        self._groups_looked_at = 0.0
        self._waiting: set[str] = set()
        self._given_up: set[str] = set()
        name = f"dray-desk-{self._name}"
        self.desk = start_desk(name, self._slots.runtime_env)
        self._tune = TuneDriver(
            search,
            lock=self._lock,
            together=journal.together,
            act=self._act,
            source=name,
            namespace=ray.get_runtime_context().namespace,
            directory=directory.ray / f"tune-{time.time_ns()}",
            path=None if cluster.own else lambda: str(ray.get(self.desk.place.remote())),
        )

    # ------------------------------------------------------------------ before anything trains
    def _find_slots(self, load_trial: FromDirectory | ByValue) -> Slots:
        asked, least = self.config.resources, self.config.slots_per_trial[0]
        grows = None if self.cluster.own else limits()
        kind = slot_kind(asked.slot, grows)
        if kind is None:
            told = f"{self.cluster.told} has an autoscaler that does not tell what it can start: say gpu, or cpu"
            raise ConfigError([("resources.slot", told)])
        most = most_slots(kind, asked.cpus_per_slot, grows)
        if most is not None and not groups_in(most, least, asked.placement_strategy):
            other = "cpu" if kind == "gpu" else "gpu"
            told = (
                f"{least} slots asked{_placed(asked.placement_strategy)}, but {self.cluster.told} has, or can grow to, "
                f"{sum(most)} {kind} slots (with {asked.cpus_per_slot} CPUs each) on {sum(map(bool, most))} nodes; ask "
                f"for fewer, or for resources.slot: {other}"
            )
            raise ConfigError([("resources.slots_per_trial", told)])
        environment: dict[str, Any] = {}
        if not self.cluster.own:
            self._load_trial, environment = send(load_trial, self._directory, self.config, self.display.say)
        slots = Slots(
            per_trial=least,
            gpu=kind == "gpu",
            cpus_per_slot=asked.cpus_per_slot,
            runtime_env=environment,
            placement_strategy=asked.placement_strategy,
        )
        self._demand = Demand(slots, grows)
        return slots

    def _for_trials(self) -> TrialsExperiment:
        searcher = self.config.searcher
        length = _unit(searcher.max_length)
        unit = type(length) if length is not None else Batch
        rungs = self.search.method.rungs
        by_time = searcher.max_time is not None
        return TrialsExperiment(
            experiment_id=1,
            config=self.config.to_dict(),
            data=self.config.data,
            secrets=self.config.secrets,
            metric=searcher.metric,
            smaller_is_better=searcher.smaller_is_better,
            max_length=length,
            rungs=() if by_time else tuple(unit(int(rung)) for rung in rungs),
            source_checkpoint=searcher.source_checkpoint_uuid,
            time_metric=searcher.time_metric if by_time else None,
            time_rungs=rungs if by_time else (),
            validation_period=_unit(self.config.min_validation_period),
            checkpoint_period=_unit(self.config.min_checkpoint_period),
            checkpoint_policy=self.config.checkpoint_policy,
        )

    # ------------------------------------------------------------------ the run
    def run(self) -> None:
        """Block until the search is done.

        Raises:
            KeyboardInterrupt: told to stop by SIGINT or SIGTERM; running trials have saved what they had.
            DeskLost: the desk died; another run goes on from the journal.
            ExperimentError, ConfigError: it cannot go on.
        """
        runnable = [trial.id for trial in self._runnable()]
        best = [t.best for t in self.search.trials.values() if t.best is not None and t.state != "INVALID_HP"]
        scores = [self._experiment.score(value) for value in best]
        ray.get(self.desk.set_best.remote(min(scores, default=None)))
        self.desk.enqueue.remote(runnable)
        started = [trial.id for trial in self.search.trials.values() if trial.hparams is not None]
        self._retention.start(self._records, started, _metric_at)
        with self._signals(), self.display:
            self._start_groups()
            tune = threading.Thread(target=self._tune.run, name="dray-tune", daemon=True)
            watch = Watch(
                ray.get_runtime_context().gcs_address,
                draining=None if self.cluster.own else self._draining,
                silent=self._head_is_silent,
            )
            try:
                self._serve(tune)
            except ray.exceptions.RayError as e:
                self._error = DeskLost(
                    f"lost the experiment's desk, or Ray itself: {str(e).splitlines()[0]}; what trials had reported "
                    f"and saved is safe, go on with: dray experiment resume {self._directory.path}"
                )
            finally:
                watch.close()
                self._close(tune)
        if isinstance(self._error, DeskLost) and self._stop_signals:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error
        if self._tune.error is not None:
            raise ExperimentError(f"the search failed: {self._tune.error}") from self._tune.error
        if self._stop_signals:
            raise KeyboardInterrupt

    def _serve(self, tune: threading.Thread) -> None:
        began = looked = time.monotonic()
        self._ask_for_mail()
        while self._error is None and self._tune.error is None and not self._stop_signals:
            self._read_mail()
            if tune.ident is None:
                if self._tune_may_start or time.monotonic() - began > IN_TURN_S:
                    tune.start()
            elif not tune.is_alive() and self.search.done is not None:
                break
            self._look_after_groups()
            self._metrics.pack()
            if time.monotonic() - looked > (CLUSTER_CHECK_S if self._groups_may_start() else IN_TURN_S):
                looked = time.monotonic()
                self._start_groups()
            self.display.update(self.search, self.counts, len(self._groups) - len(self._booting), len(self._groups))

    def _read_mail(self) -> bool:
        """Read what the desk has sent, waiting a little for it; False if there was nothing."""
        ready, _ = ray.wait([self._mail], timeout=POLL_S)
        if ready:
            self._read(ray.get(self._mail))
            self._ask_for_mail()
        return bool(ready)

    def _ask_for_mail(self) -> None:
        self._mail = self.desk.messages.remote(dict(self._recorded))
        self._recorded.clear()

    def _close(self, tune: threading.Thread) -> None:
        """End what runs, letting trials save; then end what was started."""
        self.display.closing(bool(self._stop_signals))
        with contextlib.suppress(ray.exceptions.RayError):  # there may be no desk to ask any more
            self._let_trials_save()
        self._tune.stop()
        # Tune looks at its stopping only when a handle returns.
        self.desk.finished.remote()
        if tune.ident is not None:
            tune.join(TUNE_END_S)
        lost = isinstance(self._error, DeskLost)
        self._retention.close()
        if self._elastic is not None:
            with contextlib.suppress(ray.exceptions.RayError):  # as above
                self._elastic.close()
        if not self.cluster.own and not lost:
            with contextlib.suppress(ray.exceptions.RayError):  # as above
                for name in waiting(self._groups) | self._booting:  # for nodes, or processes, that are wanted no more
                    self._give_up(name)
        # On a cluster of others its workers first give back what they hold. Without a desk they would try for ever.
        end_groups(self._groups.values(), within_s=0 if self.cluster.own or lost else GROUPS_END_S)
        if not self.cluster.own:
            ray.kill(self.desk)
        self._timeline.close()

    def _let_trials_save(self) -> None:
        self.desk.close.remote()
        deadline = time.monotonic() + (STOP_GRACE_S if self._stop_signals < 2 else 0)
        while time.monotonic() < deadline and self._stop_signals < 2:
            if ray.get(self.desk.quiet.remote()):
                break
            self._read_mail()

    def _read(self, messages: list[Message]) -> None:
        for message in messages:
            if self._on_message is not None:
                self._on_message(message)
            self._timeline.hear(message)
            self._first.setdefault(message.kind, time.monotonic())
            match message.kind:
                case "arrived":
                    self._tune_may_start = True
                    self._placements[message.group] = message.placement
                    if self._elastic is not None:
                        self._elastic.arrived()
                case "broken":
                    self._error = _told_by_worker(message.cause, self._directory.path)
                case "joined":
                    self._booting.discard(message.group)
                    self._starts[message.group] += 1
                    self.counts.groups_started += 1
                    if self._elastic is not None:
                        self._elastic.joined()
                case "vacated":
                    if self._elastic is not None:
                        self._give_up(message.group)
                case "spare":
                    self._give_up(message.group)
                case "retired":
                    self.counts.groups_retired += 1
                    if self.config.resources.reuse_workers:
                        self.display.retired(message.group, message.trial, message.error)
                case "lost":
                    self.counts.groups_lost += 1
                    if self._starts[message.group] >= GROUP_STARTS_IN_VAIN:
                        self._error = ExperimentError(
                            f"worker group {message.group} was started {self._starts[message.group]} times and never "
                            f"finished a trial; see Ray's logs, and resume with: dray experiment resume "
                            f"{self._directory.path}"
                        )
                case "handle":
                    self.counts.handles_started += 1
                case "granted":
                    self._bind(message)
                case "rows":
                    assert message.report is not None
                    self._metrics.append(message.trial, message.report["rows"])
                    self._observers.rows(message.trial, message.report["rows"])
                    self.display.rows(message.trial, message.report["rows"])
                    self._recorded[message.lease] += 1
                case "saved":
                    self._retention.saved(message.trial, message.batches, message.checkpoint, message.value)
                case "damaged":
                    self._retention.damaged(message.trial, message.checkpoint, message.error)
                case "left":
                    self._starts[message.group] = 0
                    if message.outcome != "errored":
                        self._failed_groups = 0
                    self._left(message)

    def _bind(self, message: Message) -> None:
        with self._lock:
            view = self.search.trials[message.trial]
            wanted = _is_runnable(view)
            if wanted:
                try:
                    self.search.on(Started(trial=message.trial))
                except SpaceError as error:  # no draw meets its constraint
                    self._error = ConfigError(error.faults, "The search")
                    return
            lease = Lease(
                number=message.lease,
                trial_id=message.trial,
                trial_seed=self.search.seed_of(message.trial),
                hparams=self.search.params(message.trial),
                trial_dir=self._directory.trial(message.trial),
                store=self._directory.store(message.trial),
                last_step=view.last_step,
                revived=message.trial in self._revived,
                together_s=max(TOGETHER_S, len(self._groups) / REPORTS_PER_S),
            )
        if wanted:
            self.desk.bind.remote(message.lease, {"number": message.lease, "lease": lease})
        else:
            self.desk.drop.remote(message.lease)

    def _left(self, message: Message) -> None:
        trial = message.trial
        if message.outcome not in ("errored", "invalid_hp") or self.search.trials[trial].ended:
            return
        if message.outcome == "invalid_hp":
            self.desk.finish.remote(trial, "invalid_hp")
            return
        if message.fatal:
            self.display.failure(trial, message.error)
            self._error = _config_error(message.error)
            return
        failures = self._failures.setdefault(trial, [])
        failures.append(message.failure or Failure(kind="died"))
        why = why_given_up(failures, self.config.max_restarts)
        self.display.failure(trial, message.error, why)
        told = {"trial": trial, "error": message.error, **record(failures[-1]), "time": time.time()}
        if why:
            self._journal.append({"event": "gave_up", "why": why, **told})
            self.desk.finish.remote(trial, "errored")
            return
        self._journal.append({"event": "restarted", **told})
        self.counts.restarts[trial] += 1
        with self._lock:
            # Paused meanwhile, or paused and queued again, it goes on when its turn comes.
            runs = self.search.trials[trial].state == "RUNNING"
            if runs:
                self.desk.enqueue.remote([trial], first=True)

    def _act(self, answer: Answer) -> None:
        """Carry out a decision. In Tune's thread; the journal has it already."""
        self.desk.answer.remote(answer.trial, answer.number, answer.decision)
        if answer.stops:
            self.desk.withdraw.remote(list(answer.stops))
        if answer.resumes:
            # Before new trials: the search has chosen them as what is best done next.
            self.desk.enqueue.remote(list(answer.resumes), first=True)
        if answer.creates:
            self.desk.enqueue.remote(list(answer.creates))
        if answer.decision != "continue" or answer.stops:
            self._retention.look([answer.trial, *answer.stops])
        if answer.done:
            self.desk.finished.remote()

    def _runnable(self) -> list[TrialView]:
        return [trial for trial in self.search.trials.values() if _is_runnable(trial)]

    # ------------------------------------------------------------------ groups
    def _slots_now(self) -> list[int]:
        return slots_now(self._slots.kind, self._slots.cpus_per_slot)

    def _groups_may_start(self) -> bool:
        """Groups after the first: at once on a cluster; on a machine of our own, when the first one trains.

        Where cores are few, what starts takes one from the group that trains. Whether that pays, the rest of the search
        tells, which nobody knows: so it starts when the first group has trained for as long as starting takes (ski
        rental: at most twice as long as the better of now and never; Karlin et al. 1988).
        """
        if not self.cluster.own:
            return True
        if "rows" not in self._first:
            return False
        group = self._first["joined"] - self._began
        handle = self._first.get("handle", math.inf) - self._first["arrived"]
        return not self._few_cores or time.monotonic() - self._first["rows"] > group + handle

    def _start_groups(self) -> None:
        """Start as many groups as the search has trials for and the cluster has room, or may come to have."""
        self._sought_at = time.monotonic()
        with self._lock:
            runnable = len(self._runnable())
        if runnable <= len(self._groups):  # mostly; what follows asks Ray for its nodes
            return
        room = 1 if self._elastic else self._demand.room()
        wanted = min(runnable, room) if self.cluster.own or self._elastic else self._demand.most(runnable)
        while len(self._groups) < wanted and self._another_may_start(room):
            name = f"group-{next(self._group_numbers)}"
            self._booting.add(name)
            slots = replace(self._slots, per_trial=self._elastic.start()) if self._elastic else self._slots
            self._timeline.starts(name, slots.per_trial)
            self._groups[name] = WorkerGroup(
                name=name,
                run=self._name,
                desk=self.desk,
                slots=slots,
                own_cluster=self.cluster.own,
                work={
                    "experiment": self._experiment,
                    "load_trial": self._load_trial,
                    "run": self._name,
                    "log_format": dray.LOG_FORMAT,
                    "needs": self._needs,
                },
                directory=self._directory.ray,
                on_end=lambda name, error: self._ended_groups.append((name, error)),
            )

    def _another_may_start(self, room: int) -> bool:
        starting = self._booting - self._waiting
        if len(self._groups) < room:
            return len(starting) < _groups_at_once()
        # It waits for another node: until then it takes nothing from those whose workers start, and of the driver's
        # machine, which its controller is on, one CPU for a second or two.
        return len(starting - self._placements.keys()) < max(1, (os.cpu_count() or 1) // 2)

    def _draining(self, nodes: Collection[str]) -> None:
        """These nodes are to be taken away: their groups' trials save, and go on elsewhere. In the watch's thread."""
        for group, placement in list(self._placements.items()):
            if group in self._booting:  # told in a second again, when there is something to save
                continue
            on = placement_group_table(placement).get("bundles_to_node_id", {}).values()
            if placement.id not in self._taken_away and not set(on).isdisjoint(nodes):
                self._taken_away.add(placement.id)
                self.display.say(f"a node of worker group {group} is to be taken away: what it runs goes on elsewhere")
                self.desk.vacate.remote(group)

    def _look_at_cluster(self) -> bool:
        """See which groups wait for nodes, and which should not be there: have another size, or no trial.

        False if it is not time for it.
        """
        if self.cluster.own or time.monotonic() < self._groups_looked_at + GROUPS_CHECK_S:
            return False
        self._groups_looked_at = time.monotonic()
        there = {name: group for name, group in self._groups.items() if name not in self._given_up}
        self._waiting = waiting(there)
        if self._elastic is not None:
            self._look_at_size(self._elastic, there)
        else:
            with self._lock:
                runnable = len(self._runnable())
            if spare := self._demand.too_many(len(there), runnable):
                # First those that wait for nodes, which are wanted no more. If one of them has lost its node, and no
                # other comes, its trial goes on in a group that has one.
                ends = sorted(self._waiting)[:spare]
                for name in ends:
                    self._give_up(name)
                self.desk.spare.remote(spare - len(ends))
        if told := self._demand.wait(len(self._waiting), len(there)):
            self.display.say(told)
        self.display.waits(self._demand.now)
        return True

    def _look_at_size(self, elastic: Elastic, groups: Mapping[str, WorkerGroup]) -> None:
        """Let go of an elastic group that another size would serve better; one of that size takes its place."""
        for name in groups:
            if elastic.must_shrink(name in self._waiting):
                self.display.say(f"worker group {name} has lost a part of it: what it runs goes on with fewer slots")
                self._give_up(name)
            elif name not in self._booting and (size := elastic.may_grow()):
                self.display.say(f"there are more slots than worker group {name} has: what it runs goes on with {size}")
                self.desk.vacate.remote(name)

    def _give_up(self, name: str) -> None:
        """End a group of ours, on purpose."""
        if name in self._groups and name not in self._given_up:
            self._given_up.add(name)
            self._groups[name].abandon()

    def _head_is_silent(self) -> None:
        self.display.say(
            f"the head of the Ray cluster does not answer; if it is gone, go on with: dray experiment resume "
            f"{self._directory.path}"
        )

    def _look_after_groups(self) -> None:
        looked = self._look_at_cluster()
        while self._ended_groups:
            name, error = self._ended_groups.pop()
            if self.search.done is not None:
                continue
            # Its Train run has ended: Ray's controller of it died, unless we gave it up. Another takes its place.
            if (group := self._groups.pop(name, None)) is not None:
                group.free()
            self._timeline.ends(name)
            self._placements.pop(name, None)
            self._booting.discard(name)
            self.desk.dismiss.remote(name)
            if name in self._given_up:
                continue
            self._failed_groups += 1
            self.display.say(
                f"worker group {name} ended: {str(error).strip().splitlines()[-1] if error else 'no error'}"
            )
            if self._failed_groups > GROUP_STARTS_IN_VAIN:
                self._error = ExperimentError(f"{self._failed_groups} worker groups ended, the last with: {error}")
                return
        # Not with every message: it asks Ray for its nodes, and goes through all trials.
        looks = looked or (not self._booting and time.monotonic() > self._sought_at + POLL_S)
        if looks and self._groups_may_start():
            self._start_groups()

    # ------------------------------------------------------------------ signals
    def _signals(self) -> _Signals:
        def told(number: int, frame: FrameType | None) -> None:
            self._stop_signals += 1

        return _Signals(told)


class _Signals:
    """SIGINT and SIGTERM go to a handler of ours meanwhile; in another thread than the main one nothing changes."""

    def __init__(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handler = handler
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _is_runnable(trial: TrialView) -> bool:
    """Whether the search wants it to have workers."""
    return trial.state in ("PENDING", "RUNNING")


def _checkpoints_needed(trial: TrialView) -> int:
    """How many of its latest a trial needs: one to go on from, and while it writes others, one before it."""
    return 0 if trial.ended else 2 if trial.state == "RUNNING" else 1


def _metric_at(store: CheckpointStore, batches: int) -> float | None:
    try:
        value = json.loads(store.read(batches, REPORT)).get("metric")
    except (FileNotFoundError, ValueError):  # another tool's, or damaged
        return None
    return value if isinstance(value, int | float) else None


def _groups_at_once() -> int:
    """How many groups start beside one another: starting one takes several seconds of CPU."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)) // 4)


def _placed(placement_strategy: str) -> str:
    """What it asks of nodes, for a person."""
    return {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on as many nodes"}.get(placement_strategy, "")


def _told_by_worker(cause: Exception | None, experiment: Path) -> Exception:
    """Why no trial can run, for the user."""
    match cause:
        case ConfigError():
            return cause
        case UnfitNode():
            return told_of_node(cause, experiment)
        case StartupHookFailed():
            return ConfigError([(HOOK, str(cause))], "The model's directory")
    return ExperimentError(f"a worker can't run any trial: {cause!r}")


def _config_error(error: str) -> ConfigError:
    """From a worker's message, ``field: what is wrong with it``."""
    field_path, _, what = error.partition(": ")
    return ConfigError([(field_path, what)])


def _unit(length: Any) -> TrainUnit | None:
    return None if length is None else length.to_unit()
