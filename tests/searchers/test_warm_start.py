"""What earlier searches teach: what is kept of them, which points come first; those that mislead are dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import numpy as np
import pytest

from searchers import ASHA, Exited, RandomSampler, Reported, Search, Started, parse_space
from searchers.histories import Extension, play
from searchers.multi_fidelity import MultiFidelitySampler
from searchers.prior_mean import PriorMean
from searchers.records import event_from_json
from searchers.rung_process import Results
from searchers.search import Record
from searchers.space import Space
from searchers.unit_cube import UnitCube
from searchers.warm_start import Source, SourceTrial

X = {"type": "double", "minval": 0, "maxval": 1}
LINE = parse_space({"x": X})
RUNGS = (1, 4, 16)


def valley(at: float) -> Callable[[float], float]:
    return lambda x: (x - at) ** 2


def source(loss: Callable[[float], float], *, trials: int = 18, name: str = "x", of: str = "old") -> Source:
    """A search of random trials, of which every third came to the end."""
    kept = []
    for number in range(trials):
        x = Random(number).random()
        value = 4 * loss(x) - 1
        kept.append(SourceTrial(hparams={name: x}, values=dict.fromkeys(range(1 + (number % 3 == 0)), value)))
    return Source(name=of, lengths=(0.1, 1.0), trials=tuple(kept))


def warm(*sources: Source, space: Space = LINE, seed: int = 7) -> MultiFidelitySampler:
    return MultiFidelitySampler(space, seed=seed, rungs=RUNGS, sources=sources)


def tell(sampler: MultiFidelitySampler, loss: Callable[[float], float], *xs: float) -> None:
    """Trials that end at the first rung."""
    for trial, x in enumerate(xs):
        for event in (
            Started(trial=trial),
            Reported(trial=trial, step=1, value=loss(x)),
            Exited(trial=trial, reason="stopped"),
        ):
            sampler.tell(event, {"x": x})


def asked(sampler: MultiFidelitySampler, *trials: int) -> list[float]:
    return [float(sampler.ask(trial)["x"]) for trial in trials]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- the proposals
def test_the_first_points_are_the_sources_best_the_best_of_a_few_and_random_ones() -> None:
    sampler, random = warm(source(valley(0.3))), RandomSampler(LINE, seed=7)
    assert all(abs(x - 0.3) < 0.1 for x in asked(sampler, 0, 4, 6))
    assert all(abs(x - 0.3) < 0.2 for x in asked(sampler, 1, 3, 7))
    assert all(sampler.ask(trial) == random.ask(trial) for trial in (2, 5, 8))


def test_the_first_points_come_from_all_sources() -> None:
    first = asked(warm(source(valley(0.1)), source(valley(0.9))), *range(0, 30, 6), *range(4, 30, 6))
    assert min(first) < 0.45
    assert max(first) > 0.75


def test_after_a_few_results_the_own_optimum_is_found_near_the_sources() -> None:
    """Its own lies .08 beside the source's; six results are too few for a cold search, which proposes at random."""
    sampler = warm(source(valley(0.3)))
    tell(sampler, valley(0.38), 0.3, 0.32, 0.25, 0.9, 0.1, 0.6)
    assert all(abs(x - 0.38) < 0.06 for x in asked(sampler, 101, 102, 103))
    cold = MultiFidelitySampler(LINE, seed=7, rungs=RUNGS)
    tell(cold, valley(0.38), 0.3, 0.32, 0.25, 0.9, 0.1, 0.6)
    assert cold.ask(101) == RandomSampler(LINE, seed=7).ask(101)


def test_a_source_with_the_opposite_ranks_is_dropped() -> None:
    against = source(lambda x: -valley(0.8)(x))
    sampler = warm(against)
    assert all(abs(x - 0.8) > 0.3 for x in asked(sampler, 0, 4, 6))
    tell(sampler, valley(0.8), *np.linspace(0, 1, 13))
    assert sampler.weights() == [0.0]
    assert all(abs(x - 0.8) < 0.1 for x in asked(sampler, 101, 102, 103))


def test_weights_follow_from_how_well_sources_explain_the_results() -> None:
    """Of three sources one is right, one has nothing to do with the task, and one is the wrong way round."""
    sampler = warm(source(valley(0.2)), source(lambda x: Random(x).random()), source(lambda x: -valley(0.2)(x)))
    assert sampler.weights() == pytest.approx([1 / 3] * 3), "before the first result"
    tell(sampler, valley(0.2), *np.linspace(0, 1, 12))
    right, unrelated, wrong = sampler.weights()
    assert right > 0.7
    assert unrelated < 0.25
    assert wrong == 0


def test_slopes_are_the_smallest_squares_shrunk_to_equal_shares() -> None:
    """With one source: (1 + s.y) / (1 + s.s), where s is what it expects and y the results, each less its mean."""
    cube = UnitCube(LINE)
    mean = PriorMean(cube, [source(valley(0.3))], RUNGS)
    rows, rungs = np.random.default_rng(0).random((9, 1)), np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    values = np.random.default_rng(1).normal(size=9) + mean.expected(rows, rungs)[:, 0]
    s, y = (each - np.repeat(each.reshape(3, 3).mean(axis=1), 3) for each in (mean.expected(rows, rungs)[:, 0], values))
    slopes = mean.slopes(Results(rows=rows, rungs=rungs, trials=np.arange(9), values=values))
    assert slopes == pytest.approx([(1 + s @ y) / (1 + s @ s)])


def test_the_nearest_rung_of_a_source_is_compared_with() -> None:
    """It knows a tenth of the length and the whole: of this search's rungs the first is nearest to the tenth."""
    kept = [SourceTrial(hparams={"x": i / 12}, values={0: i / 12, 1: -i / 12}) for i in range(13)]
    mean = PriorMean(UnitCube(LINE), [Source(name="old", lengths=(0.1, 1.0), trials=tuple(kept))], RUNGS)
    rows = np.array([[0.1], [0.9]])
    rising = [np.diff(mean.expected(rows, np.full(2, rung))[:, 0])[0] > 0 for rung in range(3)]
    assert rising == [True, True, False]  # shares 1/16 and 1/4 of the length, and all of it


def test_the_constraint_holds_for_the_first_points() -> None:
    space = Space(root=LINE.root, constraint=lambda point: point["x"] > 0.5)  # type: ignore[operator]
    assert all(x > 0.5 for x in asked(warm(source(valley(0.3)), space=space), *range(8)))


# -------------------------------------------------------------------------------------------------------- other spaces
def test_what_a_source_lacks_is_searched_and_what_it_shares_is_known() -> None:
    space = parse_space({"x": X, "y": X})
    first = [warm(source(valley(0.3)), space=space).ask(trial) for trial in (0, 4, 6, 10, 12, 16, 18, 22)]
    assert all(abs(float(point["x"]) - 0.3) < 0.15 for point in first)  # type: ignore[arg-type]
    ys = [float(point["y"]) for point in first]  # type: ignore[arg-type]
    assert max(ys) - min(ys) > 0.3


def test_only_trials_within_the_ranges_count() -> None:
    space = parse_space(
        {
            "x": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
            "n": {"type": "int", "minval": 2, "maxval": 8, "step": 2},
            "act": {"type": "categorical", "vals": ["relu", "tanh"]},
            "batch": 64,
            "opt": {"lr": {"type": "double", "minval": 0, "maxval": 1}},
        }
    )
    points: dict[str, Mapping[str, Any]] = {
        "of all": {"x": 0.01, "n": 3, "act": "relu", "batch": 32, "opt": {"lr": 0.5}, "other": 1},
        "of some": {"n": 8},
        "too large": {"x": 0.2, "n": 3},
        "too small": {"x": 0.01, "n": 1},
        "no such category": {"act": "gelu"},
        "no number": {"x": "auto"},
        "nested": {"opt": {"lr": 2.0}},
        "nothing shared": {"batch": 64, "other": 1},
    }
    kept = Source(
        name="old",
        lengths=(1.0,),
        trials=tuple(SourceTrial(hparams=point, values={0: 0.0}) for point in points.values()),
    )
    assert [trial.hparams for trial in kept.within(space)] == [points["of all"], points["of some"]]
    assert kept.shares_with(space)
    assert not kept.shares_with(parse_space({"batch": 64, "layers": [1, 2], "y": X}))


# ------------------------------------------------------------------------------------------------------- what is kept
def journal(loss: Callable[[float], float], trials: int, *, smaller_is_better: bool = True) -> list[Record]:
    """Of a random search with three rungs: the better half of each rung goes on."""
    log: list[Record] = []
    method = ASHA(max_trials=trials, max_length=16, num_rungs=3, divisor=4, max_concurrent_trials=1)
    search = Search(method, LINE, seed=3, smaller_is_better=smaller_is_better, log=log.append)
    search.start()
    sign = 1 if smaller_is_better else -1
    for trial in range(trials):
        search.on(Started(trial=trial))
        x = float(search.params(trial)["x"])  # type: ignore[arg-type]
        for step in RUNGS:
            search.on(Reported(trial=trial, step=step, value=sign * (loss(x) + 1 / step)))
            if search.trials[trial].stop_requested:
                break
        search.on(Exited(trial=trial, reason="stopped" if search.trials[trial].stop_requested else "completed"))
    return [{"event": "opened"}, *json.loads(json.dumps(log))]


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_the_results_of_a_journal_are_kept_by_rung_and_rank(smaller_is_better: bool) -> None:
    records = journal(valley(0.3), 20, smaller_is_better=smaller_is_better)
    learned = Source.of_records(records, rungs=RUNGS, name="old")
    assert learned.lengths == (1 / 16, 1 / 4, 1)
    assert len(learned.trials) == 20
    started = [record["hparams"] for record in records if record["event"] == "started"]
    assert [trial.hparams for trial in learned.trials] == started
    assert sum(len(trial.values) for trial in learned.trials) == sum(r["event"] == "reported" for r in records)
    lowest = sorted(learned.trials, key=lambda trial: trial.values[0])
    off = [abs(float(trial.hparams["x"]) - 0.3) for trial in lowest]  # type: ignore[arg-type]
    assert off == sorted(off), "smaller is better"


def test_what_is_kept_of_a_large_search_is_bounded() -> None:
    sizes = []
    for trials in (160, 400):
        learned = Source.of_records(journal(valley(0.3), trials), rungs=RUNGS, name="old")
        assert sum(len(trial.values) for trial in learned.trials) <= 240
        sizes.append(len(json.dumps(learned.to_json(), allow_nan=False)))
    assert sizes[1] < 1.2 * sizes[0] < 20_000, "bytes of JSON"


def test_results_after_an_extension_count_at_the_new_rungs() -> None:
    log: list[Record] = []
    method = ASHA(max_trials=12, max_length=4, num_rungs=1, divisor=4, max_concurrent_trials=2)
    play(
        Search(method, LINE, seed=3, smaller_is_better=True, log=log.append),
        0,
        length=4,
        extensions=[Extension(max_length=16)],
    )
    learned = Source.of_records(json.loads(json.dumps(log)), rungs=method.rungs, name="old")
    assert learned.lengths == (0.25, 1.0), method.rungs
    assert {rung for trial in learned.trials for rung in trial.values} == {0, 1}


def test_a_search_without_results_has_no_trials() -> None:
    assert Source.of_records([], rungs=RUNGS, name="old").trials == ()


def test_a_source_survives_json() -> None:
    kept = Source(name="old", lengths=(0.5, 1.0), trials=(SourceTrial(hparams={"a": float("inf")}, values={1: 0.5}),))
    assert Source.from_json(json.loads(json.dumps(kept.to_json(), allow_nan=False))) == kept
    with pytest.raises(ValueError, match="not a source of a warm start"):
        Source.from_json({"name": "old"})


# ------------------------------------------------------------------------------------------------------------- replays
@pytest.mark.parametrize("seed", range(2))
def test_a_replayed_search_gets_the_same_proposals_from_the_sources_that_it_kept(seed: int) -> None:
    sources = [source(valley(0.3)), source(valley(0.7), trials=9)]

    def method() -> ASHA:
        return ASHA(max_trials=12, max_length=16, num_rungs=3, max_concurrent_trials=4)

    log: list[Record] = []
    whole = Search(method(), LINE, seed=7, smaller_is_better=True, log=log.append, sampler=warm(*sources))
    play(whole, seed, length=16, normalised=False, extensions=[Extension(max_trials=14), Extension(max_length=64)])
    records: list[Record] = json.loads(json.dumps(log))
    cut, rest = Random(seed).randrange(len(records)), []
    kept = [Source.from_json(json.loads(json.dumps(each.to_json()))) for each in sources]
    again = Search.replay(
        records[:cut], method(), LINE, seed=7, smaller_is_better=True, log=rest.append, sampler=warm(*kept)
    )
    for record in records[cut:]:
        if record["event"] == "start":
            again.start()
        elif record["event"] == "extended":
            again.extend(max_trials=record["max_trials"], max_length=record["max_length"])  # type: ignore[arg-type]
        else:
            again.on(event_from_json(record))
    assert json.loads(json.dumps(rest)) == records[cut:]
