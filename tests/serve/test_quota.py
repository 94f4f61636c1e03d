"""Quotas: an experiment is accepted only if they have room for all that it may spend, so that they are never exceeded,
whatever ends, dies, is extended or is deleted, and in which order."""

from __future__ import annotations

import json
import math
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dray.errors import ConfigError
from dray.leases.shares import Demand
from dray.records.directory import ExperimentDirectory
from dray.records.spending import AFTER_S, ALIVE_S, FILE
from dray.serve import tokens
from dray.serve.accounts import Meters
from dray.serve.control import Share
from dray.serve.draft import Allowance, Draft
from dray.serve.effects import Evict, ReadSpent, RemoveRun, SignalProcess, StartProcess
from dray.serve.queue import Item, Queue
from dray.serve.quota import NOTHING, OVERRUN, Quota, Use, check_room, fitted
from dray.serve.refusals import OverQuota, WrongState
from dray.serve.scheduler import ProcessEnd, Scheduler
from dray.serve.tokens import Tokens
from tests.serve.conftest import TOKEN

CONFIG = {"name": "digits", "searcher": {"name": "single"}}


def use(used: float = 0.0, reserved: float = 0.0, **fields: Any) -> Use:
    return Use(used={"slot_hours": used, "usd": 0.0}, reserved={"slot_hours": reserved, "usd": 0.0}, **fields)


def fits(quota: Quota, others: Use, slot_hours: float, spent: float = 0.0) -> str:
    """Why an experiment with this budget has no room; "" if it has."""
    try:
        check_room("agent", quota, others, {"slot_hours": slot_hours}, {"slot_hours": spent})
    except OverQuota as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------------------------- room
def test_what_is_used_and_reserved_leaves_the_rest() -> None:
    quota = Quota(slot_hours=10)
    assert fits(quota, use(2, 3), 5) == ""
    assert fits(quota, use(2, 3), 5.1) == (
        "token agent has a quota of 10 slot-hours: other experiments have used 2 and reserved 3, so 5 are left, and "
        "this one asks for 5.1; give a budget.slot_hours of at most that, or wait until one has ended, or stop one"
    )
    assert fits(quota, use(10), 0.1) == (
        "token agent has a quota of 10 slot-hours: other experiments have used 10 and reserved 0, so 0 are left, and "
        "this one asks for 0.1; ask the operator for another token"
    )
    assert "so 8 are left, and this one has spent 8.5 itself; ask the operator" in fits(quota, use(2), 3, spent=8.5)
    assert "so 10 are left; give a budget" in fits(quota, use(), math.inf)
    assert fits(quota, use(0.1 + 0.2), 9.7) == "", "sums of floats"


def test_as_many_experiments_as_the_quota_may_be_queued_or_running() -> None:
    assert fits(Quota(experiments=2), use(experiments=1), 1) == ""
    assert fits(Quota(experiments=2), use(experiments=2), 1) == (
        "token agent may have 2 experiments queued or running, and has 2; wait until one has ended, or stop one"
    )


# ----------------------------------------------------------------------------------------------------------- configs
def test_a_config_gets_the_limits_that_it_does_not_have() -> None:
    quota = Quota(slots=4, slot_hours=10, usd=5, priority=50, prices={"CPU": 0.1})
    content, fields = fitted(CONFIG, quota, use(2, 3))
    assert fields == {
        "resources.priority": 50,
        "resources.max_slots": 4,
        "budget.slot_hours": 5,
        "budget.usd": 5,
        "prices": {"CPU": 0.1},
    }
    assert content == {
        "name": "digits",
        "searcher": {"name": "single"},
        "resources": {"priority": 50, "max_slots": 4},
        "budget": {"slot_hours": 5, "usd": 5},
        "prices": {"CPU": 0.1},
    }


def test_a_config_keeps_the_limits_that_it_has_unless_they_are_higher() -> None:
    quota = Quota(slots=4, slot_hours=10, priority=30)
    own = {**CONFIG, "resources": {"max_slots": 2, "priority": 60}, "budget": {"slot_hours": 3, "time": "1h"}}
    assert fitted(own, quota, NOTHING) == (own, {})
    more = {**CONFIG, "resources": {"max_slots": 8}, "budget": {"slot_hours": 30}}
    assert fitted(more, quota, NOTHING)[1] == {"resources.max_slots": 4}, "its budget is checked later"


def test_the_prices_are_those_of_the_token() -> None:
    quota = Quota(usd=5, prices={"CPU": 0.1})
    for given, expected in (({"CPU": 0.1}, {}), ({"CPU": 0.0001}, {"prices": {"CPU": 0.1}})):
        content, fields = fitted({**CONFIG, "budget": {"usd": 1}, "prices": given}, quota, NOTHING)
        assert fields == expected
        assert content["prices"] == {"CPU": 0.1}


WHOLE = "entrypoint: a:B\nsearcher: {name: random, metric: loss, max_length: {batches: 1}, max_trials: 1}\n"
SANDBOXED = Allowance(quota=Quota(sandbox=True), use=NOTHING)


def test_a_token_may_demand_sandboxes() -> None:
    read = Draft(config=WHOLE).read(SANDBOXED)
    assert (read.by_quota, read.config.isolation.is_sandbox) == ({"isolation": "sandbox"}, True)
    assert Draft(config=WHOLE + "isolation: sandbox").read(SANDBOXED).by_quota == {}


@pytest.mark.parametrize(
    "given",
    ["isolation: none", "isolation: {name: sandbox, read: [/root]}", "notify: {url: http://10.0.0.1/}",
     "loggers: [wandb]",
     "checkpoint_storage: {type: s3, bucket: b}", "checkpoint_storage: {type: directory, container_path: /etc}",
     "prices: /etc/shadow", "prices: ./prices.yaml"],
)  # fmt: skip
def test_a_config_that_reaches_beyond_the_sandboxes_of_its_token_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"The experiment config has 1 error:\n  {given.partition(':')[0]}"):
        Draft(config=WHOLE + given).read(SANDBOXED)
    free = Allowance(quota=Quota(), use=NOTHING)
    if not given.startswith("prices"):
        assert Draft(config=WHOLE + given).read(free).by_quota == {}
    else:  # of any token: an error would show what the file of the server's machine contains
        with pytest.raises(ConfigError, match="prices: must be prices by slot type"):
            Draft(config=WHOLE + given).read(free)


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "", "resources: 5", "budget: {slot_hours: lots}", "&a [*a]", "&a {a: *a}"]
)
def test_faults_of_a_config_are_faults_with_any_quota(text: str) -> None:
    for quota in (Quota(experiments=3), Quota(slots=2, slot_hours=1, sandbox=True)):
        with pytest.raises(ConfigError):
            Draft(config=text).read(Allowance(quota=quota, use=NOTHING))


# ---------------------------------------------------------------------------------------------------- submissions
def scheduler(quota: Quota) -> tuple[Scheduler, Queue]:
    queue = Queue([], lambda record: None, clock=lambda: 0.0)
    return Scheduler(queue, lambda effect: None, is_preempted=lambda demand: False, quota_of=lambda owner: quota), queue


def test_of_two_submissions_that_race_for_the_rest_of_a_quota_one_is_refused() -> None:
    server, _ = scheduler(Quota(slot_hours=10))
    lefts = [server.use("agent").left(Quota(slot_hours=10))["slot_hours"] for _ in range(2)]
    assert lefts == [10, 10], "both have read it before either was accepted"
    submitted, _ = server.submit(Path("a"), Share(), has_process=False, owner="agent", budget={"slot_hours": 10})
    assert (submitted.owner, server.use("agent").reserved["slot_hours"]) == ("agent", 10)
    with pytest.raises(OverQuota, match="used 0 and reserved 10, so 0 are left"):
        server.submit(Path("b"), Share(), has_process=False, owner="agent", budget={"slot_hours": 10})
    assert [each.name for each in server.experiments()] == ["a"]


def test_an_experiment_of_a_deleted_ones_name_does_not_give_back_what_that_has_spent() -> None:
    server, queue = scheduler(Quota(slot_hours=10))
    server.submit(Path("a"), Share(), has_process=False, owner="agent", budget={"slot_hours": 6})
    server.settle("a", {"slot_hours": 6})
    queue.move("a", "COMPLETED")
    server.submit(Path("a"), Share(), has_process=False, owner="agent", budget={"slot_hours": 4})
    found = server.use("agent")
    assert (found.used["slot_hours"], found.reserved["slot_hours"]) == (6, 4)


def test_limits_that_an_extension_would_remove_or_change_are_kept() -> None:
    quota = Quota(slot_hours=10, usd=5, prices={"CPU": 0.1})
    server, queue = scheduler(quota)
    server.submit(Path("a"), Share(), has_process=False, owner="agent", budget={"slot_hours": 6, "usd": 1})
    with pytest.raises(OverQuota):
        server.extend("a", {"budget": None}, {"slot_hours": math.inf, "usd": math.inf})
    with pytest.raises(OverQuota):
        server.extend("a", {"budget": {"slot_hours": 11}}, {"slot_hours": 11})
    with pytest.raises(ConfigError, match="prices"):
        server.extend("a", {"prices": {"CPU": 0.001}})
    server.extend("a", {"budget": {"slot_hours": 8}}, {"slot_hours": 8})
    server.extend("a", {"budget": {"usd": 5}}, {"usd": 5})
    item = queue.item("a")
    assert (item.budget, item.extension) == ({"slot_hours": 8, "usd": 5}, {"budget": {"slot_hours": 8, "usd": 5}})
    with pytest.raises(ConfigError, match="must be 50 or more"):
        scheduler(Quota(priority=50))[0].submit(Path("b"), Share(priority=49), has_process=False, owner="agent")


def test_experiments_that_wait_for_the_slots_of_their_token_take_no_places_of_others() -> None:
    effects: list[Any] = []
    queue, quota = Queue([], lambda record: None, clock=lambda: 0.0), Quota(slots=1)
    server = Scheduler(queue, effects.append, is_preempted=lambda demand: False, quota_of=lambda owner: quota)
    for name in ("a", "b", "c", "d"):
        server.submit(Path(name), Share(), has_process=False, owner="agent")
    server.submit(Path("other"), Share(), has_process=False)
    server.step({}, 2)
    assert [each.name for each in effects if isinstance(each, StartProcess)] == ["a", "b", "other"]


def test_what_was_spent_stays_reserved_until_it_is_on_the_disk() -> None:
    records: list[Mapping[str, Any]] = []
    is_full = False

    def append(record: Mapping[str, Any]) -> None:
        if is_full and record["event"] == "spent":
            raise OSError(28, "No space left on device")
        records.append(record)

    effects: list[Any] = []
    queue, quota = Queue([], append, clock=lambda: 0.0), Quota(slot_hours=10)
    server = Scheduler(queue, effects.append, is_preempted=lambda demand: False, quota_of=lambda owner: quota)
    server.submit(Path("a"), Share(), has_process=True, owner="agent", budget={"slot_hours": 6})
    server.step({}, 1)
    server.ended("a", ProcessEnd(kind="COMPLETED"))
    is_full = True
    for _ in range(2):
        effects.clear()
        server.step({}, 1)
        assert effects == [ReadSpent("a")]
        with pytest.raises(OSError, match="No space"):
            server.settle("a", {"slot_hours": 4})
        found = server.use("agent")
        assert (found.used["slot_hours"], found.reserved["slot_hours"]) == (4, 2)
    is_full = False
    server.settle("a", {"slot_hours": 4})
    effects.clear()
    server.step({}, 1)
    assert (effects, server.use("agent").reserved["slot_hours"]) == ([], 0)


# ------------------------------------------------------------------------------------------------- random histories
@dataclass
class Real:
    """An experiment as it really is.

    Attributes:
        budget: the limit that its process has applied.
        is_slow: its trials do not leave when its budget is spent.
    """

    budget: float
    spent: float = 0.0
    runs: bool = False  # it has a process
    trains: bool = False  # its trials hold slots, perhaps after the end of its process
    is_slow: bool = False


class World:
    """A server whose processes die at any time, and an owner that tries to spend more than it may."""

    OWNER, STEP = "agent", 0.02

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.quota = Quota(slot_hours=10.0, experiments=4)
        self.records: list[Mapping[str, Any]] = []
        self.real: dict[str, Real] = {}
        self.deleted = 0.0
        self.accepted = self.refused = self.evicted = 0
        self._names = iter(range(10**6))
        self.start()

    def start(self) -> None:
        """A new server, perhaps after the last one was killed with all its processes."""
        self.effects: list[Any] = []
        self.demands: dict[str, Demand] = {}
        self.queue = Queue(list(self.records), self.records.append, clock=lambda: 0.0)
        self.scheduler = Scheduler(
            self.queue, self.effects.append, is_preempted=lambda demand: False, quota_of=lambda owner: self.quota
        )
        for name, real in self.real.items():
            real.runs = real.trains = False
            self.scheduler.settle(name, {"slot_hours": real.spent})

    @property
    def spent(self) -> float:
        return self.deleted + sum(each.spent for each in self.real.values())

    def act(self) -> None:
        """One thing happens."""
        names = list(self.real)
        some = [self.submit, self.spend, self.die, self.end, self.leave, self.ask, self.delete, self.kill]
        verb = self.random.choices(some, weights=[4, 12, 1, 1, 4, 4, 2, 0.2])[0]
        try:
            verb(self.random.choice(names)) if names else self.submit("")
        except WrongState:
            self.refused += 1
        self.carry_out()

    def carry_out(self) -> None:
        self.scheduler.step(self.demands, 4)
        while self.effects:
            match self.effects.pop(0):
                case StartProcess(name, _, extension):
                    real = self.real[name]
                    real.runs = True
                    if self.random.random() < 0.4:  # it can't apply the extension
                        self.end_process(name, "failed")
                    elif self.random.random() < 0.8:  # else it dies before it applies the extension
                        real.budget = extension.get("budget", {}).get("slot_hours", real.budget)
                        self.demands[f"{name}-run"] = Demand(name=f"{name}-run", groups=1)
                        real.trains = True
                case SignalProcess(name, number):
                    if number == signal.SIGKILL or self.random.random() < 0.9:
                        self.end_process(name, "died" if number == signal.SIGKILL else "stopped")
                case RemoveRun(run):
                    if self.random.random() < 0.5:
                        self.leave(run.rpartition("-")[0])
                case Evict(run):
                    self.evicted += 1
                    self.real[run.rpartition("-")[0]].trains = False
                case ReadSpent(name):
                    self.scheduler.settle(name, {"slot_hours": self.real[name].spent})

    def submit(self, _: str) -> None:
        name = f"a-{next(self._names)}"
        left = self.scheduler.use(self.OWNER).left(self.quota)["slot_hours"] or 0.0
        budget = self.random.choices([left, self.random.uniform(0.1, 2.0), 1e9], weights=[1, 8, 1])[0]
        _, runs = self.scheduler.submit(
            Path(name), Share(), has_process=True, owner=self.OWNER, budget={"slot_hours": budget}
        )
        self.accepted += 1
        self.real[name] = Real(budget=budget, runs=runs, is_slow=self.random.random() < 0.3)
        if runs:
            self.demands[f"{name}-run"] = Demand(name=f"{name}-run", groups=1, has=1)
            self.real[name].trains = True

    def spend(self, _: str) -> None:
        """Time passes."""
        for real in self.real.values():
            if real.trains:
                left, more = max(real.budget - real.spent, 0.0), self.random.choice([self.STEP, 0.2])
                real.spent += min(more, max(left, self.STEP)) if real.is_slow else min(more, left)

    def look(self, _: str = "") -> None:
        """The server reads what they have spent."""
        self.scheduler.spends(
            {item.name: {"slot_hours": self.real[item.name].spent} for item in self.scheduler.spending()}
        )

    def end_process(self, name: str, kind: Any) -> None:
        if self.real[name].runs:
            self.real[name].runs = False
            self.scheduler.ended(name, ProcessEnd(kind=kind))

    def die(self, name: str) -> None:
        self.end_process(name, "died")

    def end(self, name: str) -> None:
        self.end_process(name, self.random.choice(["COMPLETED", "ERROR", "failed"]))

    def leave(self, name: str) -> None:
        """The trials of an experiment whose process has ended have left."""
        if not self.real[name].runs:
            self.real[name].trains = False
            self.demands.pop(f"{name}-run", None)
            self.scheduler.left(f"{name}-run")

    def ask(self, name: str) -> None:
        """Its owner changes it."""
        total = self.random.choice([0.1, self.random.uniform(0.1, 12.0)])
        match self.random.choice(["extend", "activate", "activate", "pause", "stop", "kill"]):
            case "extend":
                budget = self.random.choice([None, math.inf, total])
                changed = {"max_trials": 8} if budget is None else {"budget": {"slot_hours": budget}}
                self.scheduler.extend(name, changed, None if budget is None else {"slot_hours": budget})
            case verb:
                self.scheduler.act(name, verb)  # type: ignore[arg-type]

    def delete(self, name: str) -> None:
        if self.scheduler.experiment(name).state in ("PAUSED", "STOPPED", "COMPLETED", "ERROR"):
            self.scheduler.deleted([name])
            if not any(item.name == name for item in self.queue.items()):
                self.deleted += self.real.pop(name).spent

    def kill(self, _: str) -> None:
        self.start()


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (20, 40, 60, 80))])
def test_no_history_spends_more_than_the_quota(first: int) -> None:
    accepted = refused = evicted = 0
    for seed in range(first, first + 20):
        world = World(seed)
        for _ in range(300):
            world.act()
            world.look()
            world.carry_out()
            assert world.scheduler.use(world.OWNER).experiments <= 4, seed
            late = 5 * world.STEP  # what the four spend until the server looks, and ends them
            assert world.spent <= 10 * (1 + OVERRUN) + late, (seed, world.spent)
        known = world.scheduler.use(world.OWNER).used["slot_hours"]
        assert known == pytest.approx(world.spent)
        accepted, refused, evicted = accepted + world.accepted, refused + world.refused, evicted + world.evicted
    assert min(accepted, refused, evicted) > 20, "the histories were worth it"


RUN: list[dict[str, Any]] = [
    {"event": "opened", "time": 100.0, "lent": True},
    {"event": "starts", "time": 110.0, "group": "a", "slots": 2},
    {"event": "granted", "time": 110.0, "group": "a", "trial": 0, "slot_type": "CPU"},
    {"event": "alive", "time": 120.0},
]


def item(path: Path, events: list[dict[str, Any]], budget: Mapping[str, float], *, torn: str = "") -> Item:
    """An experiment of a token, with this timeline."""
    metrics = ExperimentDirectory(path).metrics
    metrics.mkdir(parents=True)
    (metrics / FILE).write_text("".join(json.dumps(event) + "\n" for event in events) + torn)
    return Item(name=path.name, path=path, submitted=0.0, share=Share(), owner="agent", budget=dict(budget))


@pytest.fixture
def meters(tmp_path: Path) -> Meters:
    tokens.create(tmp_path, "agent", "submit", Quota(usd=5, prices={"CPU": 1.8}))
    return Meters(Tokens(tmp_path, TOKEN))


def slot_s(spent: Mapping[str, float]) -> float:
    return spent["slot_hours"] * 3600


def test_slots_count_until_now_by_the_prices_of_the_token(meters: Meters, tmp_path: Path) -> None:
    experiment = item(tmp_path / "a", RUN, {"slot_hours": 1})
    for now, expected in ((120.0, 20), (130.0, 40), (125.0, 30)):
        found = meters.read([experiment], now)["a"]
        assert slot_s(found) == pytest.approx(expected)
        assert found["usd"] == pytest.approx(expected * 1.8 / 3600)


@pytest.mark.parametrize("torn", ["", '{"event": "ali'])
def test_after_the_death_of_its_process_slots_count_until_the_last_trial_has_left(
    meters: Meters, tmp_path: Path, torn: str
) -> None:
    experiment = item(tmp_path / "a", RUN, {"slot_hours": 1}, torn=torn)
    assert slot_s(meters.close(experiment, 150.0)) == pytest.approx(80)
    # The next process of the experiment, or of the server, knows it too.
    assert slot_s(meters.read([experiment], 500.0)["a"]) == pytest.approx(80)
    assert slot_s(meters.close(experiment)) == pytest.approx(80)


@pytest.mark.parametrize(("budget_slot_s", "lost_s"), [(1e6, ALIVE_S), (1000, 1.0)])
def test_after_the_death_of_the_server_the_last_seconds_are_added(
    meters: Meters, tmp_path: Path, budget_slot_s: float, lost_s: float
) -> None:
    experiment = item(tmp_path / "a", RUN, {"slot_hours": budget_slot_s / 3600})
    assert slot_s(meters.close(experiment)) == pytest.approx(20 + 2 * (lost_s + AFTER_S))


@pytest.mark.parametrize("timeline", ["[]\n", "{}\n", "no json\n", '{"event": "starts", "time": "x"}\n'])
def test_a_timeline_that_the_trials_code_has_changed_harms_no_other(
    meters: Meters, tmp_path: Path, timeline: str
) -> None:
    good, bad = item(tmp_path / "a", RUN, {"slot_hours": 1}), item(tmp_path / "b", [], {}, torn=timeline)
    assert slot_s(meters.read([bad, good], 130.0)["a"]) == pytest.approx(40)
    assert slot_s(meters.close(bad, 130.0)) == 0


def test_a_deleted_experiment_has_spent_what_was_last_read(meters: Meters, tmp_path: Path) -> None:
    experiment = item(tmp_path / "a", RUN, {"slot_hours": 1})
    meters.read([experiment], 130.0)
    (ExperimentDirectory(experiment.path).metrics / FILE).unlink()
    assert slot_s(meters.close(experiment, 150.0)) == pytest.approx(80)
