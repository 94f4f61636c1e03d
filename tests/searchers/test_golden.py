"""Numbers derived by hand from the formulas; the derivation is next to each case.

Rungs and brackets with L = max_length, N = max_trials, d = divisor, R = rungs, m = max_concurrent_trials:

    length of rung r      max(floor(L / d ** (R - 1 - r)), 1)
    rungs of a bracket    min(max_rungs, floor(log L / log d) + 1, floor(log N / log d) + 1)
    brackets              aggressive: R; standard: R down to floor((R - 1) / 2) + 1; conservative: R down to 1
    trials of a bracket   floor(N * weight / sum of weights), at least 1, the rest to the first; for b rungs the weight
                          is d ** (b - 1) / b
    places of a bracket   m > 0: max(m, brackets) evenly, the first ones get the rest; m = 0: max(trials of the last
                          bracket, floor(d))
    preview               of n trials at a rung max(floor(n / d), 1) continue
"""

from __future__ import annotations

import pytest

from searchers import ASHA, AdaptiveASHA, Grid, PromotionASHA, RandomSearch, Single, parse_space, preview, rung_lengths
from searchers.adaptive_asha import Mode, bracket_rungs_of, bracket_slots, bracket_trials, bracket_weights, extra_trials
from searchers.rung import longer_rungs, rungs_that_fit
from searchers.samplers import GridSampler

# ---------------------------------------------------------------------------------------------------------------- rungs

LENGTHS = [
    # L, R, d, lengths                                    derivation, from the top
    (1000, 4, 10, (1, 10, 100, 1000)),  # 1000 / 10, / 100, / 1000 = 10^0
    (9000, 3, 3, (1000, 3000, 9000)),  # 9000 / 3 = 3000, / 9 = 1000
    (100, 5, 4, (1, 1, 6, 25, 100)),  # 25, 6.25, 1.5625, 0.39 -> 1
    (256, 5, 4, (1, 4, 16, 64, 256)),  # exact powers
    (255, 5, 4, (1, 3, 15, 63, 255)),  # 63.75, 15.9, 3.98, 0.996 -> 1
    (937, 4, 5, (7, 37, 187, 937)),  # 187.4, 37.48, 7.496
    (10, 3, 1.5, (4, 6, 10)),  # 10 / 1.5 = 6.67, / 2.25 = 4.44
    (10, 4, 2.5, (1, 1, 4, 10)),  # 4, 1.6, 0.64 -> 1
    (121, 3, 1.1, (100, 110, 121)),  # 121 / 1.1 = 110, / 1.21 = 100; in floats 99.99... -> 99
    (1331, 4, 1.1, (1000, 1100, 1210, 1331)),  # 1331 = 11^3, so 1210, 1100, 1000
    (343, 3, 3.5, (28, 98, 343)),  # 343 / 3.5 = 98, / 12.25 = 28
    (1, 3, 4, (1, 1, 1)),  # nothing is shorter than 1
    (17, 1, 4, (17,)),  # one rung is the top
]


@pytest.mark.parametrize(("length", "rungs", "divisor", "lengths"), LENGTHS)
def test_lengths_of_rungs(length: int, rungs: int, divisor: float, lengths: tuple[int, ...]) -> None:
    assert rung_lengths(max_length=length, num_rungs=rungs, divisor=divisor) == lengths
    for cls in (ASHA, PromotionASHA):
        assert cls(max_trials=1, max_length=length, num_rungs=rungs, divisor=divisor).rungs == lengths


FITTING = [
    # length, d, rungs       derivation
    (1000, 10, 4),  # 10^3 <= 1000 < 10^4; floats: log(1000) / log(10) = 2.9999999999999996 -> 3
    (999, 10, 3),  # 10^2 <= 999 < 10^3
    (243, 3, 6),  # 3^5 = 243; floats: 4.999999999999999 -> 5
    (242, 3, 5),  # 3^4 = 81 <= 242
    (125, 5, 4),  # 5^3 = 125; floats: 3.0000000000000004
    (1024, 4, 6),  # 4^5 = 1024
    (1023, 4, 5),  # 4^4 = 256 <= 1023
    (1, 4, 1),  # 4^0 = 1
    (3, 4, 1),  # 3 < 4
    (10, 2.5, 3),  # 2.5^2 = 6.25 <= 10 < 15.625
    (3, 1.5, 3),  # 1.5^2 = 2.25 <= 3 < 3.375
    (10**15, 10, 16),  # 10^15
]


@pytest.mark.parametrize(("length", "divisor", "rungs"), FITTING)
def test_rungs_that_fit(length: int, divisor: float, rungs: int) -> None:
    assert rungs_that_fit(length=length, divisor=divisor) == rungs


LONGER = [
    # rungs, new L, d, rungs                                   derivation, from the new top down to the old one
    ((1, 4, 16), 64, 4, (1, 4, 16, 64)),  # 64; 64 / 4 = 16 is the old top
    ((1, 4, 16), 256, 4, (1, 4, 16, 64, 256)),  # 256, 64, 16
    ((1, 4, 16), 40, 4, (1, 4, 16, 40)),  # 40; 10 < 16
    ((1, 4, 16), 100, 4, (1, 4, 16, 25, 100)),  # 100, 25; 6.25 < 16
    ((16, 40, 100), 625, 2.5, (16, 40, 100, 250, 625)),  # 625, 250, 100
    ((7,), 8, 10, (7, 8)),  # 8; 0.8 < 7
]


@pytest.mark.parametrize(("rungs", "length", "divisor", "longer"), LONGER)
def test_rungs_of_a_longer_search(rungs: tuple[int, ...], length: int, divisor: float, longer: tuple[int, ...]) -> None:
    assert longer_rungs(rungs, max_length=length, divisor=divisor) == longer


# ------------------------------------------------------------------------------------------------------------- brackets

MODES: list[tuple[Mode, int, list[int]]] = [
    # mode, R, brackets      floor((R - 1) / 2) + 1
    ("aggressive", 5, [5]),
    ("standard", 5, [5, 4, 3]),  # 4 / 2 + 1 = 3
    ("conservative", 5, [5, 4, 3, 2, 1]),
    ("standard", 4, [4, 3, 2]),  # floor(1.5) + 1 = 2
    ("standard", 1, [1]),  # 0 + 1 = 1
    ("standard", 2, [2, 1]),  # floor(0.5) + 1 = 1
]


@pytest.mark.parametrize(("mode", "most", "brackets"), MODES)
def test_brackets_of_a_mode(mode: Mode, most: int, brackets: list[int]) -> None:
    assert bracket_rungs_of(mode, most) == brackets


TRIALS = [
    # N, brackets, d, trials         weights d^(b-1)/b; shares
    (64, [4, 3, 2], 4, [45, 14, 5]),  # 16, 16/3, 2 of 70/3: 43.9, 14.6, 5.5 -> 43 + 14 + 5 = 62, and 2 to the first
    (100, [5, 4, 3], 4, [71, 22, 7]),  # 51.2, 16, 16/3 of 72.53: 70.6, 22.06, 7.35 -> 70 + 22 + 7 = 99, 1 to the first
    (100, [3, 2, 1], 3, [55, 27, 18]),  # 3, 1.5, 1 of 5.5: 54.5, 27.3, 18.2 -> 54 + 27 + 18 = 99, 1 to the first
    (12, [2, 1], 4, [8, 4]),  # 2, 1 of 3: 8, 4
    (11, [2, 1], 4, [8, 3]),  # 7.33, 3.67 -> 7 + 3, 1 to the first
    (10, [2, 2], 4, [5, 5]),  # 2, 2
    (11, [2, 2], 4, [6, 5]),  # 5.5 each, 1 to the first
    (30, [2, 1], 2.5, [17, 13]),  # 1.25, 1 of 2.25: 16.67, 13.33 -> 16 + 13, 1 to the first
    (27, [2, 1], 1.5, [12, 15]),  # 0.75, 1 of 1.75: 11.57, 15.43 -> 11 + 15, 1 to the first
    (7, [1], 4, [7]),  # one bracket
    (1, [4], 4, [1]),  # one trial
    (2, [3, 2, 1], 4, [1, 1, 0]),  # 1 each is 3 for 2 trials, so the last bracket gives up its trial
    (4, [3, 2, 1], 4, [2, 1, 1]),  # 16/3, 2, 1 of 8.33: 2.56, 0.96, 0.48 -> 2 + 1 + 1
    (5, [4, 3, 2], 4, [3, 1, 1]),  # 3.43, 1.14, 0.43 -> 3 + 1 + 1
]


@pytest.mark.parametrize(("max_trials", "brackets", "divisor", "trials"), TRIALS)
def test_trials_of_brackets(max_trials: int, brackets: list[int], divisor: float, trials: list[int]) -> None:
    assert bracket_trials(max_trials, bracket_weights(brackets, divisor=divisor)) == trials


EXTRA = [
    # more, brackets, d, trials
    (6, [2, 1], 4, [4, 2]),  # two thirds and one third
    (1, [2, 1], 4, [1, 0]),  # 0.67, 0.33: the first gets it
    (10, [3, 2, 1], 3, [7, 2, 1]),  # 5.45, 2.73, 1.82 -> 5 + 2 + 1, 2 to the first
]


@pytest.mark.parametrize(("more", "brackets", "divisor", "trials"), EXTRA)
def test_further_trials_of_brackets(more: int, brackets: list[int], divisor: float, trials: list[int]) -> None:
    assert extra_trials(more, bracket_weights(brackets, divisor=divisor)) == trials


PLACES = [
    # m, trials, d, places
    (16, [45, 14, 5], 4, [6, 5, 5]),  # 16 = 5 * 3 + 1
    (17, [45, 14, 5], 4, [6, 6, 5]),  # 17 = 5 * 3 + 2
    (2, [45, 14, 5], 4, [1, 1, 1]),  # one each at least
    (0, [45, 14, 5], 4, [5, 5, 5]),  # max(5, 4)
    (0, [45, 14, 3], 4, [4, 4, 4]),  # max(3, 4)
    (0, [20, 2], 3.9, [3, 3]),  # max(2, floor(3.9))
]


@pytest.mark.parametrize(("m", "trials", "divisor", "places"), PLACES)
def test_slots_of_brackets(m: int, trials: list[int], divisor: float, places: list[int]) -> None:
    assert bracket_slots(m, trials, divisor=divisor) == places


ADAPTIVE = [
    # N, L, d, max_rungs, mode, [(rungs, trials)]
    # min(5, 4^3 = 64: 4, 4^3 = 64: 4) = 4 rungs; standard 4, 3, 2; trials as above
    (64, 64, 4, 5, "standard", [((1, 4, 16, 64), 45), ((4, 16, 64), 14), ((16, 64), 5)]),
    # min(5, 10^3: 4, 10^3: 4) = 4
    (1000, 1000, 10, 5, "aggressive", [((1, 10, 100, 1000), 1000)]),
    # min(5, 10^3: 4, 10^2 <= 999: 3) = 3
    (999, 1000, 10, 5, "aggressive", [((10, 100, 1000), 999)]),
    # min(2, 4, 4) = 2; conservative 2, 1; weights 4/2 and 1: 42.67, 21.33 -> 42 + 21, 1 to the first
    (64, 64, 4, 2, "conservative", [((16, 64), 43), ((64,), 21)]),
    # N = 3 < 4: one rung, so one bracket
    (3, 64, 4, 5, "standard", [((64,), 3)]),
    # 2.5^2 = 6.25 <= 10: min(5, 3, 2.5^3 <= 30: 4) = 3; standard 3, 2; weights 6.25/3, 1.25: 18.75, 11.25 -> 18 + 11, 1
    (30, 10, 2.5, 5, "standard", [((1, 4, 10), 19), ((4, 10), 11)]),
]


@pytest.mark.parametrize(("max_trials", "max_length", "divisor", "max_rungs", "mode", "brackets"), ADAPTIVE)
def test_adaptive_searches(
    max_trials: int, max_length: int, divisor: float, max_rungs: int, mode: Mode, brackets: list[tuple[object, int]]
) -> None:
    method = AdaptiveASHA(max_trials=max_trials, max_length=max_length, divisor=divisor, max_rungs=max_rungs, mode=mode)
    assert [(bracket.rungs, bracket.max_trials) for bracket in method.brackets] == brackets


CONCURRENCY = [
    # N, R, d, m, first trials
    (64, 3, 4, 16, 16),  # m
    (5, 3, 4, 16, 5),  # no more than N
    (500, 5, 3, 0, 81),  # 3^4
    (64, 3, 2.5, 0, 6),  # floor(6.25)
    (64, 1, 4, 0, 1),  # 4^0
    (10, 3, 4, 0, 10),  # 16, but no more than N
    (2000, 4, 10, 0, 1000),  # 10^3
]


@pytest.mark.parametrize(("max_trials", "rungs", "divisor", "m", "first"), CONCURRENCY)
def test_first_trials(max_trials: int, rungs: int, divisor: float, m: int, first: int) -> None:
    for cls in (ASHA, PromotionASHA):
        method = cls(
            max_trials=max_trials, max_length=10_000, num_rungs=rungs, divisor=divisor, max_concurrent_trials=m
        )
        assert len(method.start()) == first


# ----------------------------------------------------------------------------------------------------------------- grid


def test_grid_is_the_product_and_trials_take_it_from_the_end() -> None:
    space = parse_space(
        {"b": {"type": "categorical", "vals": ["x", "y"]}, "a": {"type": "int", "minval": 1, "maxval": 2, "count": 2}}
    )
    points = [(1, "x"), (1, "y"), (2, "x"), (2, "y")]  # names are sorted: a is the first
    assert [(point["a"], point["b"]) for point in space.grid()] == points
    sampler = GridSampler(space)
    assert len(sampler) == 4
    drawn = [sampler.ask(trial) for trial in range(4)]
    assert [(point["a"], point["b"]) for point in drawn] == points[::-1]


# -------------------------------------------------------------------------------------------------------------- preview

PREVIEWS = [
    # method, [[(length, trials, trials that go no further)]], total length
    # 64 -> 16 -> 4: 48 * 1 + 12 * 4 + 4 * 16 = 160
    (ASHA(max_trials=64, max_length=16, num_rungs=3), [[(1, 64, 48), (4, 16, 12), (16, 4, 4)]], 160),
    # 5 -> max(1, 1) = 1 -> 1: 4 * 1 + 0 * 4 + 1 * 16 = 20
    (PromotionASHA(max_trials=5, max_length=16, num_rungs=3), [[(1, 5, 4), (4, 1, 0), (16, 1, 1)]], 20),
    # 3 -> max(0, 1) = 1: 2 * 4 + 16 = 24
    (ASHA(max_trials=3, max_length=16, num_rungs=2), [[(4, 3, 2), (16, 1, 1)]], 24),
    # 33 / 1.1 = 30 (in floats 29.99...), 30 / 1.1 = 27.27: 3 * 100 + 3 * 110 + 27 * 121 = 3897
    (
        ASHA(max_trials=33, max_length=121, num_rungs=3, divisor=1.1),
        [[(100, 33, 3), (110, 30, 3), (121, 27, 27)]],
        3897,
    ),
    # 10 / 2.5 = 4, 4 / 2.5 = 1.6: 6 * 16 + 3 * 40 + 100 = 316
    (ASHA(max_trials=10, max_length=100, num_rungs=3, divisor=2.5), [[(16, 10, 6), (40, 4, 3), (100, 1, 1)]], 316),
    # 1000 -> 100 -> 10 -> 1: 900 + 90 * 10 + 9 * 100 + 1000 = 3700
    (
        ASHA(max_trials=1000, max_length=1000, num_rungs=4, divisor=10),
        [[(1, 1000, 900), (10, 100, 90), (100, 10, 9), (1000, 1, 1)]],
        3700,
    ),
    # 45 -> 11 -> 2 -> 1: 34 + 9 * 4 + 16 + 64 = 150; 14 -> 3 -> 1: 11 * 4 + 2 * 16 + 64 = 140; 5 -> 1: 64 + 64 = 128
    (
        AdaptiveASHA(max_trials=64, max_length=64),
        [
            [(1, 45, 34), (4, 11, 9), (16, 2, 1), (64, 1, 1)],
            [(4, 14, 11), (16, 3, 2), (64, 1, 1)],
            [(16, 5, 4), (64, 1, 1)],
        ],
        418,
    ),
    # every trial to its end
    (RandomSearch(max_trials=20, max_length=7), [[(7, 20, 20)]], 140),
    (Grid(points=6, max_length=10), [[(10, 6, 6)]], 60),
    (Single(max_length=12), [[(12, 1, 1)]], 12),
    (RandomSearch(max_trials=20), [[(None, 20, 20)]], None),
]


@pytest.mark.parametrize(("method", "brackets", "total"), PREVIEWS)
def test_previews(method: ASHA, brackets: list[list[tuple[int | None, int, int]]], total: int | None) -> None:
    found = preview(method)
    assert [[(rung.length, rung.trials, rung.last) for rung in bracket.rungs] for bracket in found.brackets] == brackets
    assert found.total == total
    assert found.trials == sum(bracket[0][1] for bracket in brackets)
