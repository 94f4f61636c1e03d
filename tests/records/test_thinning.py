"""The thinning of long curves: what each interval keeps, whatever the values are."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dray.records.thinning import LEAST, thinned

VALUES = st.lists(st.none() | st.floats() | st.sampled_from([0.0, 1.0, math.nan, math.inf]), min_size=1, max_size=300)


@given(VALUES, st.integers(0, 80))
def test_each_interval_keeps_its_ends_its_extremes_and_nan(values: list[float | None], most: int) -> None:
    kept, most = thinned(values, most), max(most, LEAST)
    assert kept == sorted(set(kept))
    assert len(kept) == min(most, len(values)), "as many points as there may be"
    if len(values) <= most:
        return
    ends = np.linspace(0, len(values), most // LEAST + 1).astype(int).tolist()
    for start, end in pairwise(ends):
        interval, mine = range(start, end), [each for each in kept if start <= each < end]
        assert {start, end - 1} <= set(mine)
        finite = [value for at in interval if (value := values[at]) is not None and math.isfinite(value)]
        if finite:
            assert {min(finite), max(finite)} <= {values[at] for at in mine}
        lost = [at for at in interval if (value := values[at]) is None or not math.isfinite(value)]
        assert bool(lost) == any(at in mine for at in lost)
        nan = [at for at in interval if (value := values[at]) is None or math.isnan(value)]
        assert not nan or nan[0] in mine


def test_what_room_is_left_is_evenly_spread() -> None:
    kept = thinned([float(i) for i in range(1001)], 40)
    steps = [b - a for a, b in pairwise(kept)]
    assert (kept[0], kept[-1]) == (0, 1000)
    assert max(steps) <= 2 * 1000 / 40


def test_a_long_series_keeps_one_spike_and_one_nan() -> None:
    values = [1 / i for i in range(1, 30_001)]
    values[12_344], values[20_000] = 100.0, math.nan
    kept = thinned(values, 400)
    assert len(kept) == 400
    assert {0, 12_344, 20_000, 29_999} <= set(kept)
