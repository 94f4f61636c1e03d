"""Which checkpoints are kept: Determined's policy on its own example, and the registry with the thread that deletes."""

from __future__ import annotations

import json
import math
import queue
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.config.load import load_config
from dray.experiment.cleaner import Cleaner
from dray.experiment.effects import Append, Effect, Examine, Prune
from dray.experiment.retention import Policy, Retention, Saved, saved_in
from dray.leases.effects import Say
from dray.storage import CheckpointStore, Location, store_at
from dray.worker.lease import REPORT_FILE
from searchers.errors import IllegalEvent
from tests.storage.power import Disk

METRICS = {1: [None, None, 0.6, 0.5, 0.4], 2: [None, 0.2, 0.3, None, None]}
"""The metrics of checkpoints 1 to 5 (trial 1) and 6 to 10 (trial 2)."""
EXAMPLE = [
    Saved(trial=trial, batches=5 * trial - 5 + index, checkpoint=str(5 * trial - 5 + index), value=value)
    for trial, values in METRICS.items()
    for index, value in enumerate(values, start=1)
]


def kept_by(policy: Policy, saved: Iterable[Saved], needs: Mapping[int, int] | None = None) -> set[Saved]:
    """What is kept of all checkpoints of an experiment."""
    found = list(saved)
    kept = policy.best(found, lambda trial: -1)
    for trial in {each.trial for each in found}:
        kept |= policy.keeps_of([each for each in found if each.trial == trial], (needs or {}).get(trial, 0))
    return kept


@pytest.mark.parametrize(
    ("experiment_best", "trial_best", "trial_latest", "kept"),
    [
        (0, 0, 0, []),
        (2, 0, 0, [8, 7]),
        (5, 0, 0, [8, 7, 5, 4, 3]),
        (0, 1, 0, [7, 5]),
        (0, 3, 0, [8, 7, 5, 4, 3]),
        (0, 0, 1, [10, 5]),
        (0, 0, 3, [10, 9, 8, 5, 4, 3]),
        (2, 1, 0, [8, 7, 5]),
        (2, 0, 1, [10, 8, 7, 5]),
        (0, 1, 1, [10, 7, 5]),
        (2, 1, 1, [10, 8, 7, 5]),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_documented_table(
    experiment_best: int, trial_best: int, trial_latest: int, kept: list[int], sign: int
) -> None:
    """Also turned round, where greater is better."""
    policy = Policy(
        experiment_best=experiment_best, trial_best=trial_best, trial_latest=trial_latest, smaller_is_better=sign == 1
    )
    saved = [
        Saved(trial=s.trial, batches=s.batches, checkpoint=s.checkpoint, value=s.value and sign * s.value)
        for s in EXAMPLE
    ]
    assert sorted((each.batches for each in kept_by(policy, reversed(saved))), reverse=True) == kept


def test_checkpoints_that_a_trial_needs_are_kept_whatever_the_policy() -> None:
    nothing = Policy(trial_best=0, trial_latest=0)
    kept = kept_by(nothing, EXAMPLE, {2: 2})
    assert sorted(each.batches for each in kept) == [9, 10]


def test_the_first_of_equals_is_the_best_and_nan_never_is() -> None:
    values = [math.nan, 0.5, 0.5, -math.inf]
    saved = [Saved(trial=0, batches=n, checkpoint=str(n), value=value) for n, value in enumerate(values)]
    assert [each.batches for each in kept_by(Policy(trial_latest=0), saved)] == [1]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.none() | st.sampled_from([0.1, 0.2, 0.3]))),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_removing_early_changes_nothing_in_the_end(
    rows: list[tuple[int, int, float | None]], experiment_best: int, trial_best: int, trial_latest: int
) -> None:
    """What the policy drops once it never wants again: a checkpoint can go as soon as it is out."""
    policy = Policy(experiment_best=experiment_best, trial_best=trial_best, trial_latest=trial_latest)
    unique = {(trial, batches): value for trial, batches, value in rows}
    saved = [Saved(trial=t, batches=b, checkpoint=f"{t}/{b}", value=v) for (t, b), v in sorted(unique.items())]
    there: set[Saved] = set()
    for each in saved:
        there = kept_by(policy, {*there, each})
    assert there == kept_by(policy, saved)


def test_the_best_trials_checkpoint_is_kept_as_the_deciding_rung_rises() -> None:
    emitted: list[Effect] = []
    needs, reached = dict.fromkeys(range(5), 1), dict.fromkeys(range(5), -1)
    policy = Policy(experiment_best=1, trial_best=0, trial_latest=0)
    retention = Retention(policy, needs=needs.__getitem__, reached=reached.__getitem__, emit=emitted.append)
    # Trial 0 is lucky and short. Trial 1 is the best of the long ones, before its curve rises.
    for trial, values in enumerate([[0.1], [0.3, 0.8], [0.2, 0.9], [0.6, 0.5], [0.7, 0.4]]):
        for batches, value in enumerate(values, start=1):
            retention.saved(trial, batches, f"{trial}/{batches}", value)
        retention.examined(Examine(trial, ()))
    for trial, rungs in ((0, 1), (2, 1), (1, 3), (3, 3), (4, 3)):
        needs[trial], reached[trial] = 0, rungs
        retention.changed([trial])
    deleted = {each.checkpoint for effect in emitted if isinstance(effect, Prune) for each in effect.delete}
    assert deleted == {"1/2", "2/1", "2/2", "3/1", "3/2", "4/1", "4/2"}


def test_with_repeats_each_finalist_keeps_its_best_checkpoint_and_so_does_each_repeat() -> None:
    emitted: list[Effect] = []
    needs, reached = dict.fromkeys(range(6), 1), dict.fromkeys(range(6), -1)
    retention = Retention(
        Policy(experiment_best=1, trial_best=0, trial_latest=0, finalists=2),
        needs=needs.__getitem__,
        reached=reached.__getitem__,
        is_repeat=lambda trial: trial > 3,
        emit=emitted.append,
    )
    for trial, values in enumerate([[0.1, 0.2], [0.3, 0.8], [0.4, 0.35], [0.1], [0.7, 0.6], [0.9, 0.5]]):
        for batches, value in enumerate(values, start=1):
            retention.saved(trial, batches, f"{trial}/{batches}", value)
        retention.examined(Examine(trial, ()))
    for trial, rungs in ((0, 2), (1, 2), (2, 2), (3, 1), (4, -1), (5, -1)):
        needs[trial], reached[trial] = 0, rungs
        retention.changed([trial])
    deleted = {each.checkpoint for effect in emitted if isinstance(effect, Prune) for each in effect.delete}
    # Trial 3 is as good as trial 0, and short.
    assert deleted == {"0/2", "1/2", "2/1", "2/2", "4/1", "5/1"}


class Experiment:
    """A registry over the checkpoints of trials below a place, and the journal that it writes."""

    def __init__(self, path: Path, place: str) -> None:
        self.path, self.place = path, Location.of(place)
        self.trials: set[int] = set()
        self.records: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.needs: dict[int, int] = {}
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def store(self, trial: int) -> CheckpointStore:
        return store_at(self.place.child(f"trial_{trial}"), self.path / f"trial_{trial}")

    def begin(self, policy: Policy, trials: list[int] | None = None) -> None:
        self.retention = Retention(policy, needs=lambda trial: self.needs.get(trial, 0), emit=self._perform)
        self._cleaner = Cleaner(self.retention, store_of=self.store, post=self._posted.put)
        started = [{"event": "started", "trial": trial} for trial in trials or []]
        self.retention.recover([*self.records, *started])

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Append(record):
                self.records.append(json.loads(json.dumps(record, allow_nan=False)))
            case Say(line):
                self.said.append(line)
            case Prune() | Examine():
                self._cleaner.put(effect)

    def settle(self) -> None:
        """Have the thread do all that it is to do, and take its answers."""
        while self.retention.unanswered:
            self._posted.get(timeout=30)()

    def save(self, trial: int, batches: int, value: float | None, *, tell: bool = True) -> None:
        store = self.store(trial)
        self.trials.add(trial)
        staging = store.stage(batches)
        (staging / REPORT_FILE).write_text(json.dumps({"metric": value}))
        checkpoint = store.commit(staging, batches)
        if tell:
            self.retention.saved(trial, batches, checkpoint, value)

    def end(self) -> dict[int, list[int]]:
        """What is there when all is done, by trial."""
        self.settle()
        return {trial: [batches for batches, _ in self.store(trial).listed()] for trial in sorted(self.trials)}


@pytest.fixture(params=["directory", "object store"])
def experiment(request: pytest.FixtureRequest, tmp_path: Path) -> Experiment:
    place = str(tmp_path) if request.param == "directory" else f"memory://results{tmp_path}"
    return Experiment(tmp_path, place)


def test_checkpoints_that_the_policy_drops_are_removed_and_recorded(experiment: Experiment) -> None:
    experiment.begin(Policy())
    for batches, value in ((10, 0.5), (20, 0.25), (30, 0.75), (40, math.nan)):
        experiment.save(7, batches, value)
    assert experiment.end() == {7: [40, 20]}
    events = [(record["event"], record["batches"]) for record in experiment.records]
    assert {each for each in events if each[0] == "deleted"} == {("deleted", 10), ("deleted", 30)}
    assert [each for each in events if each[0] == "saved"] == [("saved", batches) for batches in (10, 20, 30, 40)]
    assert [each.batches for each in saved_in(experiment.records)] == [20, 40]
    assert [record["value"] for record in experiment.records if record["event"] == "saved"] == [0.5, 0.25, 0.75, None]


def test_a_deletion_that_is_no_longer_wanted_is_not_carried_out(tmp_path: Path) -> None:
    posted, store = queue.SimpleQueue[Callable[[], None]](), CheckpointStore(tmp_path)
    retention = Retention(Policy(), needs=lambda trial: 0, emit=lambda effect: None)
    cleaner = Cleaner(retention, store_of=lambda trial: store, post=posted.put)
    checkpoint = store.commit(store.stage(10), 10)
    cleaner.put(Prune([], [Saved(trial=0, batches=10, checkpoint=checkpoint)]))
    posted.get(timeout=30)
    assert dict(store.listed()) == {10: checkpoint}


def test_an_ended_trial_needs_no_checkpoint(experiment: Experiment) -> None:
    experiment.needs[0] = 2
    experiment.begin(Policy(trial_best=0, trial_latest=0))
    for batches in (10, 20, 30):
        experiment.save(0, batches, 0.5)
    assert experiment.end() == {0: [30, 20]}
    experiment.needs[0] = 0
    experiment.begin(Policy(trial_best=0, trial_latest=0), trials=[0])
    assert experiment.end() == {0: []}


@pytest.mark.parametrize("source_ends", [False, True])
def test_a_pinned_checkpoint_is_deleted_only_once_each_trial_that_begins_from_it_has_its_own(
    experiment: Experiment, source_ends: bool
) -> None:
    experiment.needs = {0: 1, 1: 1, 2: 1}
    experiment.begin(Policy(trial_best=0, trial_latest=0))
    experiment.save(0, 10, 0.5)
    for child in (1, 2):
        experiment.retention.pin(child, (0, 10))
    experiment.save(0, 20, 0.5)
    if source_ends:
        experiment.needs[0] = 0
        experiment.retention.changed([0])
    source = [10] if source_ends else [20, 10]
    assert experiment.end() == {0: source}
    experiment.save(1, 15, 0.5)
    assert experiment.end() == {0: source, 1: [15]}, "trial 2 begins from it, too"
    experiment.retention.unpin(2)
    experiment.retention.changed([2])
    assert experiment.end() == {0: source[:-1], 1: [15]}


def test_a_pinned_checkpoint_is_kept_until_the_childs_own_is_forced_to_the_disk() -> None:
    emitted: list[Any] = []
    retention = Retention(Policy(trial_best=0, trial_latest=0), needs=lambda trial: 1, emit=emitted.append)
    for trial, batches in ((0, 10), (0, 20), (1, 15)):
        if batches == 20:
            retention.pin(1, (0, 10))
        retention.saved(trial, batches, str(batches), None)
        for examine in [each for each in emitted if isinstance(each, Examine)]:
            emitted.remove(examine)
            retention.examined(examine)
    prunes = [each for each in emitted if isinstance(each, Prune)]
    assert [each.batches for prune in prunes for each in prune.delete] == []
    retention.pruned(prunes[-1], [], [], failed=True)
    retention.changed([0])
    prunes = [each for each in emitted if isinstance(each, Prune)]
    assert [each.batches for each in prunes[-1].delete] == []
    retention.changed([1])
    retention.pruned(emitted[-1], [], [], failed=False)
    assert [each.batches for each in emitted[-1].delete] == [10]


def test_a_checkpoint_at_the_latest_report_is_kept_because_another_trial_may_begin_there() -> None:
    emitted: list[Effect] = []
    policy = Policy(trial_best=0, trial_latest=0)
    retention = Retention(policy, needs=lambda trial: 1, reported=lambda trial: 2, emit=emitted.append)
    for batches in range(1, 6):
        retention.saved(0, batches, f"checkpoint_{batches}", None)
        if batches == 1:
            retention.examined(Examine(0, ()))
    deleted = [each.batches for effect in emitted if isinstance(effect, Prune) for each in effect.delete]
    assert deleted == [1, 3, 4]


def test_a_checkpoint_that_is_being_deleted_is_not_offered_to_forks() -> None:
    retention = Retention(Policy(trial_best=0, trial_latest=0), needs=lambda trial: 1, emit=lambda effect: None)
    for batches in (10, 20):
        retention.saved(0, batches, str(batches), None)
    retention.examined(Examine(0, ()))
    retention.check(0, 20)
    with pytest.raises(IllegalEvent, match="trial 0's checkpoint at batch 10 is being deleted"):
        retention.check(0, 10)


def test_checkpoints_that_a_killed_run_left_are_removed_on_resume(experiment: Experiment) -> None:
    """Nothing of it is in the journal, as of a driver that died before the records came to the disk."""
    for batches, value in ((10, 0.5), (20, 0.25), (30, math.nan), (40, 1.0)):
        experiment.save(3, batches, value, tell=False)
    experiment.save(3, 50, 1.0, tell=False)
    filesystem, path = experiment.store(3).filesystem_of(experiment.store(3).id_of(50))
    filesystem.delete_file(f"{path}/manifest.json")  # half deleted
    experiment.begin(Policy(), trials=[3])
    assert experiment.end() == {3: [40, 20]}
    assert sorted(each.batches for each in saved_in(experiment.records)) == [20, 40]


def test_a_damaged_checkpoint_is_reported_once_and_no_longer_counts(experiment: Experiment) -> None:
    experiment.begin(Policy(trial_best=0, trial_latest=2))
    for batches in (10, 20):
        experiment.save(0, batches, None)
        experiment.settle()  # else one that is half written while its store is listed would be removed
    damaged = experiment.store(0).id_of(20)
    for _ in range(2):
        experiment.retention.damaged(0, damaged, f"{damaged} is damaged: v is missing")
    experiment.end()
    experiment.begin(Policy(trial_best=0, trial_latest=2), trials=[0])
    experiment.settle()
    experiment.retention.damaged(0, damaged, "again, by another run")
    experiment.save(0, 30, None)
    assert experiment.end() == {0: [30, 20, 10]}, "and it is left where it is"
    assert [record["event"] for record in experiment.records].count("damaged") == 1
    assert len(experiment.said) == 1
    assert "trial 0 skipped a checkpoint" in experiment.said[0]


@pytest.mark.parametrize("is_finished", ["before the answer", "after it"])
def test_a_checkpoint_that_was_being_written_when_its_store_was_examined_is_not_deleted(is_finished: str) -> None:
    emitted: list[Any] = []
    retention = Retention(Policy(trial_latest=3), needs=lambda trial: 0, emit=emitted.append)
    retention.saved(0, 10, "10", None)
    examine = next(each for each in emitted if isinstance(each, Examine))
    unfinished = Saved(trial=0, batches=20, checkpoint="")
    if is_finished == "before the answer":
        retention.saved(0, 20, "20", 0.5)
    retention.examined(examine, unfinished=[unfinished])
    prunes = [each for each in emitted if isinstance(each, Prune)]
    assert any(retention.is_pruning(unfinished, each) for each in prunes) == (is_finished == "after it")
    retention.saved(0, 20, "20", 0.5)
    assert not any(retention.is_pruning(unfinished, each) for each in prunes)


def test_only_the_newest_decision_deletes_a_checkpoint() -> None:
    emitted: list[Any] = []
    retention = Retention(Policy(trial_best=0, trial_latest=0), needs=lambda trial: 1, emit=emitted.append)
    for batches in (10, 20):
        retention.saved(0, batches, str(batches), None)
        retention.examined(Examine(0, ()))
    first = next(each for each in emitted if isinstance(each, Prune) and each.delete)
    # The trial resumes from batch 10, and saves 20 again, which is not on the disk yet.
    retention.damaged(0, "20", "it is damaged")
    retention.saved(0, 10, "10", None)
    retention.saved(0, 20, "20", None)
    ten, newest = first.delete[0], emitted[-1]
    assert isinstance(newest, Prune)
    assert [retention.is_pruning(ten, each) for each in (first, newest)] == [False, True]


def test_a_checkpoint_is_forced_to_the_disk_once_or_again_after_an_error() -> None:
    emitted: list[Any] = []
    retention = Retention(Policy(trial_best=0, trial_latest=3), needs=lambda trial: 1, emit=emitted.append)
    retention.saved(0, 10, "10", None)
    retention.examined(next(each for each in emitted if isinstance(each, Examine)))
    retention.changed([0])
    [first] = (each for each in emitted if isinstance(each, Prune))
    assert [each.batches for each in first.keep] == [10]
    retention.pruned(first, [], [], failed=True)
    retention.changed([0])
    assert emitted[-1] == first
    retention.pruned(first, [], [], failed=False)
    retention.saved(0, 20, "20", None)
    assert [each.batches for each in emitted[-1].keep] == [20]


class Away:
    """A store where deleting, or another method, fails while it is away."""

    def __init__(self, kind: type[CheckpointStore], monkeypatch: pytest.MonkeyPatch, method: str = "delete") -> None:
        self.away, real = True, getattr(kind, method)

        def tried(store: CheckpointStore, *arguments: Any) -> Any:
            if self.away:
                raise OSError("away")
            return real(store, *arguments)

        monkeypatch.setattr(kind, method, tried)


FAILS = "can't delete old checkpoints; will retry when there are new ones: away"
WORKS = "old checkpoints are deleted again, and none is left over"


def test_each_outage_is_reported_once_and_its_end(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Away(type(experiment.store(0)), monkeypatch)
    experiment.begin(Policy(trial_best=0))
    batches = iter(range(10, 100, 10))
    for away in (False, True, False, True, False):
        store.away = away
        for _ in range(2):
            experiment.save(0, next(batches, 100), None)
            experiment.settle()
    assert experiment.end() == {0: [100]}
    assert [record.getMessage() for record in caplog.records] == [FAILS, WORKS, FAILS, WORKS]


@pytest.mark.parametrize("policy", [Policy(trial_best=0), Policy(experiment_best=1, trial_best=0, trial_latest=0)])
def test_a_power_failure_at_any_removal_leaves_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    disk = Disk(monkeypatch)
    experiment = Experiment(tmp_path / "experiment", str(tmp_path / "experiment"))
    experiment.path.mkdir()
    real = CheckpointStore.delete
    removed: list[tuple[str, int, set[tuple[str, int]]]] = []

    def whole() -> set[tuple[str, int]]:
        """Trials and batches of what a power failure would leave."""
        stores = [
            CheckpointStore(path) for path in disk.leaves(experiment.path, tmp_path / f"{len(removed)}").iterdir()
        ]
        return {(store.trial_dir.name, at) for store in stores for at, _ in store.listed() if store.find(at)}

    def delete(store: CheckpointStore, batches: int) -> None:
        removed.append((store.trial_dir.name, batches, whole()))
        real(store, batches)

    monkeypatch.setattr(CheckpointStore, "delete", delete)
    experiment.begin(policy)
    for number, trial in enumerate((0, 1, 2, 0, 0, 1)):
        experiment.save(trial, 10 + number, 1 - number / 10)
    left = {(f"trial_{trial}", at) for trial, saved in experiment.end().items() for at in saved}
    assert len(removed) == 6 - len(left) > 0
    for trial, batches, found in removed:
        # Later ones are better.
        assert any(at > batches and (policy.experiment_best or trial == other) for other, at in found)
    removed.append(("", 0, set()))
    assert left <= whole()


def test_the_configs_numbers_are_determineds() -> None:
    raw = {"entrypoint": "m:T", "searcher": {"name": "single", "metric": "m", "max_length": {"batches": 1}}}
    storage = load_config(raw).checkpoint_storage
    assert Policy.of(storage, smaller_is_better=True) == Policy()
    assert Policy() == Policy(experiment_best=0, trial_best=1, trial_latest=1)
    fields = {"save_experiment_best": 3, "save_trial_best": 2, "save_trial_latest": 0}
    storage = load_config({**raw, "checkpoint_storage": fields}).checkpoint_storage
    expected = Policy(experiment_best=3, trial_best=2, trial_latest=0, smaller_is_better=False)
    assert Policy.of(storage, smaller_is_better=False) == expected
