"""The best trial is the one with the best mean over new seeds; the answer says how certain that is."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from dray.errors import ExperimentError
from dray.records.listing import StoredExperiment
from dray.records.reader import ExperimentReader
from dray.records.repeats import compared, summary
from dray.records.result import Result
from dray.records.standing import standing
from dray.records.trial_record import TrialRecord
from searchers.objectives import Metric, Objectives
from tests.records.repeated import Outcome, repeated

VALUES = (0.5, 0.1, 0.2, 0.3, 0.4)
"""Of five trials; the best three are 1, 2 and 3."""
LUCK = (0.0, 0.5, -0.2)
"""What each seed adds to every trial."""


def runs(means: dict[int, float], noise: float = 0.0) -> dict[tuple[int, int], Outcome]:
    """Repeats with these means, the luck of their seeds, and some noise without a mean."""
    return {
        (trial, seed): mean + LUCK[seed - 1] + noise * (-1, 2, -1)[(seed + trial) % 3]
        for trial, mean in means.items()
        for seed in (1, 2, 3)
    }


def read(path: Path, again: dict[tuple[int, int], Outcome], **fields: Any) -> ExperimentReader:
    return StoredExperiment.here(repeated(path / "experiment", VALUES, again, **fields)).read()


def order(reader: ExperimentReader) -> list[int]:
    return [each.trial for each in reader.finalists()]


def test_best_trial_has_the_best_mean_over_new_seeds(tmp_path: Path) -> None:
    reader = read(tmp_path, runs({1: 0.45, 2: 0.40, 3: 0.35}))
    assert order(reader) == [3, 2, 1]
    best = reader.best()
    assert best is not None
    assert (best.id, best.best_metric) == (3, 0.3)
    overview = reader.overview()
    assert overview.best_trial == 3
    assert overview.best_metric == pytest.approx(0.35 + sum(LUCK) / 3)
    assert [trial.id for trial in reader.ranked()[:5]] == [3, 2, 1, 4, 0], "the others follow by their own values"
    assert len(reader.ranked()) == 5 + 9
    assert len(reader.eligible()) == 5, "a repeat is never the best"


MEANS = {1: 0.45, 2: 0.40, 3: 0.35}
"""Of seeds whose luck is 0.1 on average, so that trial 3 has 0.45."""


@pytest.mark.parametrize("source", [0, None])
def test_trial_added_after_repeats_may_be_best_by_one_seed(source: int | None, tmp_path: Path) -> None:
    reader = read(tmp_path, runs(MEANS), later=[(source, 0.44, "completed"), (source, 0.47, "completed")])
    assert [trial.id for trial in reader.ranked()[:6]] == [14, 3, 15, 2, 1, 4], "behind it are those passed over"
    seen = reader.overview()
    assert (seen.best_trial, seen.best_metric, seen.best_by) == (14, 0.44, "one seed")
    assert reader.repeats_summary().startswith("trial 3 is the best of 3 over 3 seeds")
    assert reader.repeats_summary().endswith("; trial 14, not trained again, is ahead with 0.44 from one seed")


@pytest.mark.parametrize("reason", ["stopped", "errored", "canceled"])
def test_value_of_a_later_trial_counts_only_if_it_has_completed(reason: Any, tmp_path: Path) -> None:
    reader = read(tmp_path, runs(MEANS), later=[(0, -1.0, reason)])
    assert (reader.overview().best_trial, reader.overview().best_by) == (3, "mean of 3 seeds")
    assert "one seed" not in reader.repeats_summary()


def test_every_answer_has_the_same_best_value(tmp_path: Path) -> None:
    reader = read(tmp_path, runs(MEANS))
    best = Result(tmp_path / "experiment").best_trial
    overview = reader.overview()
    assert (overview.best_trial, overview.best_metric, overview.best_by) == (best.trial_id, best.metric, best.best_by)
    assert (best.metric, best.best_by) == (pytest.approx(0.45), "mean of 3 seeds")
    assert best.metrics == {"error": pytest.approx(0.15)}, "at the checkpoint, of the best run"
    assert standing(overview, reader).sentence.endswith(
        "best error 0.45 of trial 3 (mean of 3 seeds), lowest 0.1 of trial 1"
    )
    alone = read(tmp_path / "alone", {})
    assert (alone.overview().best_metric, alone.overview().best_by) == (0.1, "one seed")


def test_larger_may_be_better(tmp_path: Path) -> None:
    reader = read(tmp_path, runs({0: 0.45, 4: 0.40, 3: 0.50}), smaller_is_better=False)
    assert order(reader) == [3, 0, 4]


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    """The luck of the seeds, ten times the noise, cancels out."""
    reader = read(tmp_path, runs({1: 0.45, 2: 0.40, 3: 0.10}, noise=0.01))
    [best, second, third] = reader.finalists()
    assert (best.trial, best.difference) == (3, None)
    assert second.difference is not None
    assert (second.difference.mean, second.difference.runs) == (pytest.approx(0.3), 3)
    assert second.difference.low == pytest.approx(0.3 - 4.302652730 * 0.03 / 3**0.5)
    assert third.difference is not None
    assert third.difference.excludes_zero
    assert (
        summary([best, second, third]) == "trial 3 is the best of 3 over 3 seeds, and distinguishable from the others"
    )


def test_row_of_a_finalist_as_json(tmp_path: Path) -> None:
    reader = read(tmp_path, runs({1: 1.0, 2: 2.0, 3: 3.0}))
    [best, second, _] = [each.to_json() for each in reader.finalists()]
    half = 4.302652730 * (0.39 / 3) ** 0.5 / 3**0.5
    expected = {"trial": 1, "seeds": 3, "of": 3, "failed": 0, "mean": 1.1, "low": 1.1 - half, "high": 1.1 + half}
    assert {name: best[name] for name in expected} == pytest.approx(expected)
    assert (best["difference"], best["distinguishable"], best["trials"]) == (None, None, [5, 8, 11])
    assert (second["difference"], second["difference_low"], second["distinguishable"]) == (
        pytest.approx(1),
        pytest.approx(1),
        True,
    )


def test_finalist_with_a_failed_or_diverged_repeat_comes_last(tmp_path: Path) -> None:
    again = runs({1: 0.1, 2: 0.2, 3: 0.3})
    for outcome in ("errored", "diverged"):
        reader = read(tmp_path / outcome, {**again, (1, 2): outcome})
        assert order(reader) == [2, 3, 1]
        assert (reader.finalists()[-1].failed, len(reader.finalists()[-1].values)) == (1, 2)
        what = "trial 2 is the best of 3 over 3 seeds, and distinguishable from the others; repeats of trial 1 failed"
        assert summary(reader.finalists()) == what


def test_best_is_not_distinguished_from_one_with_failed_repeats(tmp_path: Path) -> None:
    again = runs({1: 0.1, 2: 0.2, 3: 0.3})
    reader = read(tmp_path, {run: "errored" if run[0] != 3 else value for run, value in again.items()})
    what = "trial 3 is the best of 3 over 3 seeds; repeats of trials 1, 2 failed"
    assert summary(reader.finalists()) == what


def test_finalists_are_compared_by_the_seeds_that_all_have(tmp_path: Path) -> None:
    """Seed 2 is unlucky for all; a person stopped it, or the budget ended before it, for the worst one."""
    again = runs({1: 0.1, 2: 0.2, 3: 0.3})
    for outcome in ("canceled", "runs"):
        reader = read(tmp_path / outcome, {**again, (3, 2): outcome})
        assert order(reader) == [1, 2, 3]
        assert reader.finalists()[0].is_compared
        assert [len(each.values) for each in reader.finalists()] == [3, 3, 2]


def test_lowest_has_its_own_value_also_if_it_is_the_best(tmp_path: Path) -> None:
    again = {(trial, seed): 0.3 + 0.1 * trial for trial in (0, 1) for seed in (1, 2)}
    result = Result(repeated(tmp_path / "experiment", [0.1, 0.2], again, seeds=2, top=2).path)  # type: ignore[arg-type]
    best, lowest = result.best_trial, result.lowest
    assert (best.trial_id, best.metric, best.best_by) == (0, 0.3, "mean of 2 seeds")
    assert (lowest.trial_id, lowest.metric, lowest.best_by, lowest.repeated) == (0, 0.1, "one seed", None)


def test_best_trial_is_the_searchs_until_a_seed_is_complete(tmp_path: Path) -> None:
    reader = read(tmp_path, {(1, 1): 0.9, (2, 1): 0.8})
    assert (reader.overview().best_trial, reader.overview().best_metric) == (1, 0.1)
    assert (reader.overview().trials, reader.overview().total) == (14, 14)
    assert summary(reader.finalists()) == "2 of 9 repeats of trials 2, 1, 3 ended"
    reader = read(tmp_path / "more", {(1, 1): 0.9, (2, 1): 0.8, (3, 1): 1.0})
    assert reader.overview().best_trial == 2
    assert (
        summary(reader.finalists()) == "trial 2 is the best of 3 over 1 seed, but not distinguishable from trials 1, 3"
    )


def test_finalist_whose_repeats_were_stopped_is_not_waited_for(tmp_path: Path) -> None:
    again = {**runs({1: 0.3, 2: 0.2}), **dict.fromkeys([(3, 1), (3, 2), (3, 3)], "canceled")}
    assert read(tmp_path, again).overview().best_trial == 2  # type: ignore[arg-type]


def test_later_finalist_is_not_waited_for(tmp_path: Path) -> None:
    """An extension, or a request, has made trial 9 a finalist; its first seed alone says little."""

    def record(number: int, value: float | None) -> TrialRecord:
        made = TrialRecord(number, Objectives((Metric(name="error"),)))
        if value is not None:
            made.validated("error", 1, None, value, 0.0)
            made.exit("completed", 0.0)
        return made

    earlier = {1: {1: record(5, 0.5), 2: record(7, 0.1)}, 2: {1: record(6, 0.3), 2: record(8, 0.5)}}
    for last, order, places in ((None, [1, 2, 9], [True, True, False]), (0.4, [9, 1, 2], [True, True, True])):
        found = compared({**earlier, 9: {1: record(10, 0.1), 2: record(11, last)}}, 1)
        assert [each.trial for each in found] == order
        assert [each.is_compared for each in found] == places


def test_result_names_the_best_and_its_estimate(tmp_path: Path) -> None:
    directory = repeated(tmp_path / "experiment", VALUES, runs({1: 0.45, 2: 0.40, 3: 0.35}))
    best = Result(directory.path).best_trial
    assert (best.trial_id, best.metrics) == (3, {"error": pytest.approx(0.35 - 0.2)}), "the third seed was lucky"
    assert best.checkpoint.path.endswith("trial_13/checkpoint_20")
    assert best.repeated is not None
    assert (best.repeated.mean, best.repeated.runs) == (pytest.approx(0.45), 3)
    table = Result(directory.path).trials.set_index("trial_id")
    assert (table.loc[5, "repeat_of"], table.loc[5, "repeat"]) == (1, 1)
    assert table.loc[:4, "repeat_of"].isna().all()


def test_result_compares_two_trials(tmp_path: Path) -> None:
    result = Result(repeated(tmp_path / "experiment", VALUES, runs({1: 0.45, 2: 0.40, 3: 0.10}, noise=0.01)).path)
    found = result.compare(1, 3)
    assert (found.better, found.seeds, found.paired) == (3, 3, True)
    assert str(found) == "trial 3 is better than trial 1 by 0.350 (0.275 .. 0.425), 3 seeds"
    found = result.compare(3, 2)
    assert found.difference == pytest.approx(-0.3)
    assert str(found) == "trial 3 is better than trial 2 by 0.300 (0.225 .. 0.375), 3 seeds"
    assert found.better == 3
    found = result.compare(2, 1)
    assert str(found) == "trial 2 is not distinguishable from trial 1: ahead by 0.050 (-0.025 .. 0.125), 3 seeds"
    assert found.better is None


def test_trials_without_repeats_have_no_interval(tmp_path: Path) -> None:
    result = Result(repeated(tmp_path / "experiment", VALUES, runs({1: 0.45, 2: 0.40, 3: 0.10})).path)
    found = result.compare(0, 4)
    assert (found.difference, found.low, found.better, found.paired) == (pytest.approx(0.1), None, None, False)
    what = "trial 4 is ahead of trial 0 by 0.1 in 1 run, too few to tell whether it is better"
    assert str(found) == f"{what}; repeat them with other seeds"


def test_results_of_two_experiments_are_compared_by_their_bests(tmp_path: Path) -> None:
    one = Result(repeated(tmp_path / "one", VALUES, runs({1: 0.45, 2: 0.40, 3: 0.10})).path)
    other = Result(repeated(tmp_path / "other", VALUES, runs({1: 0.45, 2: 0.05, 3: 0.10}, noise=0.001)).path)
    assert (
        str(one.compare(other))
        == "trial 2 of other is better than trial 3 of one by 0.0500 (0.0457 .. 0.0543), 3 seeds"
    )
    unpaired = Result(repeated(tmp_path / "third", VALUES, runs({1: 0.45, 2: 0.05, 3: 0.10}), experiment_seed=2).path)
    found = one.compare(unpaired)
    assert (found.paired, found.better, found.seeds) == (False, None, 3), "their seeds differ, whose luck is large"


def test_what_can_not_be_compared_is_an_error(tmp_path: Path) -> None:
    result = Result(repeated(tmp_path / "one", VALUES, {}).path)
    other = Result(repeated(tmp_path / "other", VALUES, {}, metric="loss").path)
    for problem, args in {
        "trial 1 can't be compared with itself": (1, 1),
        "there is no trial 99; the experiment has 14 trials": (1, 99),
        "trial 5 has not validated yet": (1, 5),
        r"different metrics, error \(smaller is better\) and loss": (other,),
    }.items():
        with pytest.raises(ExperimentError, match=problem):
            result.compare(*args)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes two trials' numbers, or another Result"):
        result.compare(1)


@pytest.mark.parametrize("means", [(0.0, 0.0, 9.0, 9.0), (0.0, 0.3, 9.0, 9.0)])
def test_best_is_wrongly_distinguished_in_5_percent_at_most(
    means: tuple[float, ...],
) -> None:
    """Also where chance chooses between two that are equally good, the worst case."""
    rng, wrong, lost, searches = Random(1), 0, 0, 500
    objectives = Objectives((Metric(name="error"),))
    for _ in range(searches):
        luck = {seed: rng.gauss(0, 2) for seed in (1, 2, 3)}
        repeats: dict[int, dict[int, TrialRecord]] = {}
        for trial, mean in enumerate(means):
            for seed, shift in luck.items():
                record = repeats.setdefault(trial, {})[seed] = TrialRecord(10 * trial + seed, objectives)
                record.validated("error", 1, None, mean + shift + rng.gauss(0, 1), 0.0)
                record.exit("completed", 0.0)
        best, *rest = compared(repeats, 1)
        near = [each.trial for each in rest if each.difference is None or not each.difference.excludes_zero]
        wrong += not near and any(means[each.trial] <= means[best.trial] for each in rest)
        lost += best.trial != 0 and 0 not in near and means[best.trial] > means[0]
    assert wrong / searches <= 0.05 + 4 * (0.05 * 0.95 / searches) ** 0.5
    assert lost / searches <= 0.05
