"""Trials with code of their own: ranked with the others, and sampled from the results of the same code only."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from searchers import (
    ASHA,
    Create,
    Event,
    Exited,
    IllegalEvent,
    RandomSearch,
    Reported,
    Requested,
    Search,
    Source,
    Started,
    parse_space,
)
from searchers.named_sampler import named_sampler
from searchers.pbt import PBT
from searchers.records import action_to_json, request_from_json, request_to_json

SPACE = parse_space({"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1}, "width": 8})
LENGTH = 16


class Spy:
    """A sampler that remembers what it was asked and told."""

    def __init__(self, spies: list[Spy]) -> None:
        self.told: list[Event] = []
        self.asked: list[int] = []
        self.forks: list[tuple[int, Source]] = []
        spies.append(self)

    def ask(self, trial: int) -> dict[str, object]:
        self.asked.append(trial)
        return {"lr": 0.01, "width": 8}

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        self.told.append(event)

    def forked(self, trial: int, source: Source) -> None:
        self.forks.append((trial, source))


def asha(**given: Any) -> ASHA:
    return ASHA(max_trials=4, max_length=LENGTH, num_rungs=3, divisor=4, max_concurrent_trials=4, **given)


def spied(log: list[Any]) -> tuple[Search, list[Spy]]:
    spies: list[Spy] = []
    search = Search(
        asha(),
        SPACE,
        seed=7,
        smaller_is_better=True,
        log=log.append,
        sampler=Spy(spies),
        new_sampler=lambda: Spy(spies),
    )
    return search, spies


def test_a_trial_with_its_own_code_is_ranked_at_the_same_rungs() -> None:
    search, _ = spied([])
    search.start()
    assert search.request(Requested(hparams={"lr": 0.1}, code="c0de")) == [
        Create(trial=4, hparams={"lr": 0.1}, code="c0de")
    ]
    for trial, value in enumerate((0.5, 0.4, 0.3, 0.2, 0.1)):
        search.on(Started(trial=trial))
        search.on(Reported(trial=trial, step=1, value=value))
    assert isinstance(search.method, ASHA)
    assert dict(search.method.ranked[0])[4] == 0.1
    assert [search.code_of(trial) for trial in range(5)] == [None, None, None, None, "c0de"]


def test_each_code_has_a_sampler_that_knows_no_other_trials_and_counts_its_own_from_0() -> None:
    log: list[Any] = []
    search, spies = spied(log)
    search.start()
    search.on(Started(trial=0))
    search.request(Requested(code="a"))
    search.request(Requested(code="b", hparams={"lr": 0.5}))
    search.request(Requested(code="a", hparams={}))
    for trial in (4, 5, 6):
        search.on(Started(trial=trial))
    search.on(Reported(trial=6, step=1, value=0.1))
    search.request(Requested(source=Source(trial=6, step=1), hparams={"lr": 0.02}))
    search.on(Started(trial=7))
    own, a, b = spies
    assert [event.trial for event in own.told] == [0]
    assert a.told == [Started(trial=0), Started(trial=1), Reported(trial=1, step=1, value=0.1), Started(trial=2)]
    assert b.told == [], "0.5 is outside of the space"
    assert (own.asked, a.asked, b.asked) == ([0], [0, 1], [0])
    assert (own.forks, a.forks) == ([], [(2, Source(trial=1, step=1))])
    assert search.params(5) == {"lr": 0.5, "width": 8}

    again, spies_again = spied([])
    again.replay(log)
    assert [spy.told for spy in spies_again] == [spy.told for spy in spies]
    assert [again.code_of(trial) for trial in range(8)] == [None, None, None, None, "a", "b", "a", "a"]


def test_a_trial_from_a_checkpoint_has_the_code_of_the_checkpoint() -> None:
    log: list[Any] = []
    search, _ = spied(log)
    search.start()
    search.request(Requested(code="a"))
    for trial in (0, 4):
        search.on(Started(trial=trial))
        search.on(Reported(trial=trial, step=1, value=0.1))
    for trial, code in ((0, "a"), (4, "b")):
        records = len(log)
        with pytest.raises(IllegalEvent, match=f"from a checkpoint of trial {trial} has the code of trial {trial}"):
            search.request(Requested(source=Source(trial=trial, step=1), code=code))
        assert len(log) == records
    source = Source(trial=4, step=1)
    assert search.request(Requested(source=source, code="a"))[0] == Create(trial=5, source=source, hparams={})
    assert search.code_of(5) == "a"


@pytest.mark.parametrize("name", ["tpe", "multi_fidelity"])
def test_a_sampler_that_learns_proposes_as_if_there_were_no_other_code(name: str) -> None:
    """The best rate of one code is the worst of the other. Each search must be the one with this code alone."""

    def searched() -> Search:
        def sampler() -> Any:
            return named_sampler(name, SPACE, seed=3, rungs=[LENGTH])

        method = RandomSearch(max_trials=40, max_concurrent_trials=1, max_length=LENGTH)
        ignored: list[Any] = []
        return Search(
            method, SPACE, seed=3, smaller_is_better=True, log=ignored.append, sampler=sampler(), new_sampler=sampler
        )

    def train(search: Search, trial: int, sign: int) -> object:
        search.on(Started(trial=trial))
        lr = search.params(trial)["lr"]
        assert isinstance(lr, float)
        search.on(Reported(trial=trial, step=LENGTH, value=sign * lr))
        search.on(Exited(trial=trial, reason="completed"))
        return lr

    alone, negated, both = searched(), searched(), searched()
    for search in (alone, negated, both):
        search.start()
    mine, others, random = [0], list[int](), Random(1)
    for _ in range(30):
        if random.random() < 0.5:
            (new,) = [each for each in both.request(Requested(code="other")) if isinstance(each, Create)]
            others.append(new.trial)
            assert train(both, new.trial, -1) == train(negated, len(others) - 1, -1)
        else:
            number, before = len(mine) - 1, len(both.trials)
            assert train(both, mine[-1], 1) == train(alone, number, 1)
            mine.append(before)  # the method has created the next one


def test_population_based_training_copies_the_code_with_the_weights() -> None:
    pbt = PBT(population=4, interval=2, max_length=8, quantile=0.25, seed=1)
    ignored: list[Any] = []
    search = Search(pbt, SPACE, seed=7, smaller_is_better=True, log=ignored.append)
    search.start()
    search.request(Requested(code="best"))
    actions: list[Any] = []
    for trial in range(5):
        search.on(Started(trial=trial))
    for trial, value in ((4, 0.0), (1, 0.5), (2, 0.6), (3, 0.7), (0, 0.9)):
        actions += search.on(Reported(trial=trial, step=2, value=value))
    assert actions[-1] == Create(trial=6, source=Source(trial=4, step=2)), actions
    assert search.code_of(6) == "best"


def test_records_of_requests_have_their_code() -> None:
    request = Requested(id="1", hparams={"lr": 0.5}, code="c0de")
    assert request_from_json(request_to_json(request)) == request
    assert action_to_json(Create(trial=3, code="c0de")) == {"action": "create", "trial": 3, "code": "c0de"}
    assert repr(Create(trial=3, code="c0de")) == "Create(trial=3, code='c0de')"
    with pytest.raises(ValueError, match="code must be a name, got 3"):
        request_from_json({"event": "requested", "code": 3})
