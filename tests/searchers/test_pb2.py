"""The model-based exploration of population-based training, on losses whose best hyperparameters are known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from searchers import Exited, Reported, Search, Source, Space, Started, parse_space
from searchers.pb2 import PB2
from searchers.pbt import PBT, Explorer
from searchers.search import Record
from searchers.testing import Extension, play, repeat
from tests.searchers.helpers import new_search
from tests.searchers.test_sampler_contract import MIXED

LR = {"type": "log", "base": 10, "minval": -4, "maxval": 0}
SPACE = parse_space({"lr": LR, "kind": {"type": "categorical", "vals": ["a", "b", "c"]}})
SEEDS = range(20)


def place(hparams: dict[str, Any]) -> float:
    return 1 + math.log10(hparams["lr"]) / 4


def optimum(step: float) -> float:
    """The best learning rate drifts from 0.2 to 0.5 of its range."""
    return 0.2 + 0.1 * step


def slope(step: float, at: float) -> float:
    """Per unit of length; about -1 at the optimum."""
    return -math.exp(-(((at - optimum(step)) / 0.2) ** 2))


def diverging(step: float, at: float) -> float:
    return math.inf if at > 0.5 else -at


def told(sampler: PB2 | Explorer, seed: int, slope: Callable[[float, float], float] = slope) -> int:
    """Tell the sampler of 8 trials that have trained for 3 intervals. Returns the best of them."""
    values = dict.fromkeys(range(8), 5.0)
    for step in range(4):
        for trial in values:
            hparams = sampler.ask(trial)
            if step == 0:
                sampler.tell(Started(trial=trial), hparams)
            elif values[trial] < math.inf:
                values[trial] += slope(step - 1, place(hparams))
                sampler.tell(Reported(trial=trial, step=step, value=values[trial]), hparams)
    return min(values, key=lambda trial: values[trial])


def fork(sampler: PB2, trial: int, source: int, step: float = 3) -> dict[str, Any]:
    sampler.forked(trial, Source(trial=source, step=step))
    return sampler.explore(trial, sampler.ask(source))


def test_its_proposals_are_nearer_to_a_drifting_optimum_than_the_explorers() -> None:
    ours, theirs = 0.0, 0.0
    for seed in SEEDS:
        sampler, explorer = PB2(SPACE, seed=seed), Explorer(SPACE, seed)
        best = told(sampler, seed)
        ours += abs(place(fork(sampler, 8, best)) - optimum(3)) / len(SEEDS)
        theirs += abs(place(explorer.explore(8, explorer.ask(best))) - optimum(3)) / len(SEEDS)
    assert ours < theirs / 2


def test_a_concurrent_proposal_is_further_from_the_first() -> None:
    apart = {False: 0.0, True: 0.0}
    for is_started in apart:
        for seed in range(5):
            sampler = PB2(SPACE, seed=seed)
            best = told(sampler, seed)
            first = fork(sampler, 8, best)
            if is_started:
                sampler.tell(Started(trial=8), first)
            apart[is_started] += abs(place(fork(sampler, 9, best)) - place(first))
    assert apart[True] > 2 * apart[False]


def test_it_learns_where_trials_diverge() -> None:
    places = []
    for seed in SEEDS:
        sampler = PB2(SPACE, seed=seed)
        places.append(place(fork(sampler, 8, told(sampler, seed, diverging))))
    assert sum(each > 0.5 for each in places) <= 3, "random draws: half of 20"
    assert sum(0.4 < each <= 0.5 for each in places) >= 10, "the best are just below"


def test_it_explores_like_the_explorer_until_enough_is_known() -> None:
    sampler, explorer = PB2(SPACE, seed=3), Explorer(SPACE, 3)
    best = told(sampler, 3)
    source = sampler.ask(best)
    assert sampler.explore(8, source) == explorer.explore(8, source), "the source's metric is unknown"
    assert fork(sampler, 9, best, step=2) == explorer.explore(9, source), "the checkpoint is an older one"
    older = PB2(SPACE, seed=3)
    told(older, 3)
    fork(older, 9, best, step=2)
    for each in (sampler, older):  # nor is anything learned from its first interval
        each.tell(Started(trial=9), source)
    older.tell(Reported(trial=9, step=4, value=0.0), source)
    assert fork(sampler, 10, best) == fork(older, 10, best)
    found = fork(sampler, 10, best)
    assert found == sampler.explore(10, source), "asking changes nothing"
    assert found["kind"] == explorer.explore(10, source)["kind"]
    assert found["lr"] != explorer.explore(10, source)["lr"]
    new = PB2(SPACE, seed=3)
    new.tell(Started(trial=0), source)
    new.tell(Reported(trial=0, step=3, value=1.0), source)
    assert fork(new, 8, 0) == explorer.explore(8, new.ask(0))


def test_its_proposals_keep_the_constraint() -> None:
    space = Space(root=SPACE.root, constraint=lambda point: place(dict(point)) < 0.4)
    for seed in range(5):
        sampler = PB2(space, seed=seed)
        assert place(fork(sampler, 8, told(sampler, seed))) < 0.4


def test_a_replayed_search_gets_the_same_proposals() -> None:
    """The history is cut in the middle, and has failures, non-finite values and an extension."""

    def search(records: list[Record], log: list[Record]) -> Search:
        method = PBT(max_length=16, population=4, interval=2, quantile=0.5)
        return new_search(method, MIXED, log, sampler=PB2(MIXED, seed=7)).replay(records)

    log: list[Record] = []
    play(search([], log), 4, extensions=[Extension(max_length=24)])
    actions: list[Any] = [action for record in log for action in record["actions"]]  # type: ignore[attr-defined]
    assert sum("source" in action for action in actions) > 5
    records: list[Record] = json.loads(json.dumps(log))
    rest: list[Record] = []
    again = search(records[: len(records) // 2], rest)
    for record in records[len(records) // 2 :]:
        repeat(again, record)
    assert json.loads(json.dumps(rest)) == records[len(records) // 2 :]


def test_a_size_that_does_not_fit_in_memory_is_not_proposed_again() -> None:
    space = parse_space({"size": {"type": "int", "minval": 8, "maxval": 1024, "log": True}})
    sampler = PB2(space, seed=7)
    for trial, size in enumerate((8, 16, 32, 64, 128, 8, 16, 32)):
        sampler.tell(Started(trial=trial), {"size": size})
        sampler.tell(Reported(trial=trial, step=1, value=1 / size), {"size": size})  # larger is better
    failed = 0
    for trial in range(8, 16):
        sampler.forked(trial, Source(trial=4, step=1))
        found = sampler.explore(trial, {"size": 128})
        sampler.tell(Started(trial=trial), found)
        if int(str(found["size"])) > 200:
            failed += 1
            sampler.tell(Exited(trial=trial, reason="out_of_memory"), found)
    assert 0 < failed <= 4
