"""Random searches with several objectives by the multi-fidelity sampler, each replayed from a random place.

Trials report late, out of order, repeatedly, NaN, infinities or nothing, fail, and are extended and requested, as in
`searchers.testing`. No event may raise, each proposal must be in its space, and a replay must propose the same.

    python -m tests.searchers.fuzz [--histories 5000] [--first-seed 0]
"""

from __future__ import annotations

import argparse
import json
import warnings
from random import Random

from searchers import ASHA, Metric, Objectives, PromotionASHA, Search, parse_space
from searchers.named_sampler import named_sampler
from searchers.search import Record
from searchers.testing import OBJECTIVES, Extension, play, repeat

LOSS, SIZE, TIME = (Metric(name=name) for name in ("loss", "size", "time"))
SEVERAL = (
    OBJECTIVES,
    Objectives((LOSS, SIZE, TIME)),
    Objectives((LOSS, Metric(name="size", at_most=0.5), Metric(name="time", at_least=0.2, at_most=0.8))),
    Objectives((SIZE, LOSS, Metric(name="size", at_least=0.3))),
)
SPACES = tuple(
    parse_space(root)
    for root in (
        {"x": {"type": "double", "minval": 0, "maxval": 1}},
        {
            "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1},
            "n": {"type": "int", "minval": 1, "maxval": 3},
            "x": {"type": "categorical", "vals": [{"a": {"type": "double", "minval": 0, "maxval": 1}}, {"b": 1}]},
        },
        {"x": {"type": "categorical", "vals": ["relu", None]}, "batch": 64},
        {"x": 1},
    )
)


def check_history(seed: int) -> int:
    """Check one random search; returns its number of proposals."""
    rng = Random(f"{seed}:several")
    space, objectives, kind = rng.choice(SPACES), rng.choice(SEVERAL), rng.choice((PromotionASHA, PromotionASHA, ASHA))
    concurrent, divisor = rng.choice((1, 4, 16)), rng.choice((2, 4))
    extensions = rng.sample([Extension(max_length=64), Extension(max_trials=24)], rng.randrange(3))

    def search(log: list[Record]) -> Search:
        method = kind(
            max_trials=16,
            max_length=16,
            num_rungs=3,
            divisor=divisor,
            max_concurrent_trials=concurrent,
            pareto=True,
        )
        sampler = named_sampler("multi_fidelity", space, seed=seed, rungs=method.rungs, objectives=objectives)
        return Search(
            method, space, seed=seed, smaller_is_better=True, log=log.append, sampler=sampler, objectives=objectives
        )

    log: list[Record] = []
    play(search(log), seed, extensions=extensions)
    records: list[Record] = json.loads(json.dumps(log))
    rest: list[Record] = []
    cut = rng.randrange(len(records))
    again = search(rest).replay(records[:cut])
    for record in records[cut:]:
        repeat(again, record)
    assert json.loads(json.dumps(rest)) == records[cut:], f"seed {seed}: the replay of {cut} records proposes otherwise"
    return sum("hparams" in record for record in records)


def main() -> None:
    """Read the command line and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=5000, help="number of searches (default 5000)")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed (default 0)")
    options = parser.parse_args()
    warnings.simplefilter("error")
    proposals = 0
    for number in range(options.histories):
        proposals += check_history(options.first_seed + number)
        if number % 100 == 99:
            print(f"{number + 1} searches, {proposals} proposals", flush=True)


if __name__ == "__main__":
    main()
