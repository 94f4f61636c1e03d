"""The section ``repeat``: what it means, and what can't be repeated."""

from __future__ import annotations

from typing import Any

import pytest

from dray.config.custom import Custom
from dray.config.load import load_config
from dray.config.search import build_method
from dray.errors import ConfigError
from dray.experiment.preview import preview_search
from searchers import Repeats, Single
from tests.config.configs import ASHA_CONFIG, changed, faults

REPEAT = {"seeds": 2, "for": "top 3"}
SINGLE = {"name": "single", "metric": "validation_loss", "max_length": {"epochs": 4}}
TWO = [{"name": "validation_loss"}, {"name": "size"}]


def test_search_repeats_its_best_trials() -> None:
    config = load_config(changed(repeat=REPEAT))
    method = build_method(config)
    assert isinstance(method, Repeats)
    assert (method.seeds, method.top, method.rungs) == (2, 3, (1, 4, 16))
    assert load_config(config.to_dict()) == config
    assert config.to_dict()["repeat"] == REPEAT


def test_nothing_is_repeated_by_default() -> None:
    assert not isinstance(build_method(load_config(ASHA_CONFIG)), Repeats)
    assert "repeat" not in load_config(ASHA_CONFIG).to_dict()
    config = load_config(changed(repeat={}))
    assert config.repeat is not None
    assert (config.repeat.seeds, config.repeat.top) == (3, 4)


def test_single_trial_is_trained_with_several_seeds_in_turn() -> None:
    method = build_method(load_config(changed(searcher=SINGLE, repeat={"seeds": 5, "for": "top 1"})))
    assert isinstance(method, Repeats)
    assert isinstance(method.method, Single)


@pytest.mark.parametrize(
    ("change", "path", "what"),
    [
        ({"repeat": 3}, "repeat", "must be a mapping"),
        ({"repeat": {"seeds": 0}}, "repeat.seeds", "must be >= 1, got 0"),
        ({"repeat": {"for": 4}}, "repeat.for", 'must be "top" and a number from 1 to 1000, such as top 4; got 4'),
        ({"repeat": {"for": "best 4"}}, "repeat.for", "got 'best 4'"),
        ({"repeat": {"for": "top 0"}}, "repeat.for", "got 'top 0'"),
        ({"repeat": {"seed": 3}}, "repeat.seed", "did you mean seeds?"),
        ({"repeat": REPEAT, "searcher__max_trials": ..., "patience": 9}, "searcher.max_trials", "required with repeat"),
        (
            {"repeat": REPEAT, "searcher__metric": ..., "searcher__smaller_is_better": ..., "searcher__metrics": TWO},
            "repeat",
            "by one metric, not by metrics",
        ),
        (
            {
                "repeat": REPEAT,
                "searcher": {**SINGLE, "name": "pbt", "population": 4, "interval": {"epochs": 1}},
            },
            "repeat",
            "can't be given with pbt",
        ),
    ],
)
def test_fault_is_named(change: dict[str, Any], path: str, what: str) -> None:
    found = faults(changed(**change))
    assert list(found) == [path]
    assert what in found[path]


def test_own_method_must_create_trials_on_request() -> None:
    class Own:
        rungs = ()
        start = on = progress = extend = Single.start

    searcher = {"name": "custom", "metric": "validation_loss", "max_length": {"epochs": 4}}
    config = load_config(changed(searcher=searcher, repeat=REPEAT))
    with pytest.raises(ConfigError, match=r"repeat: needs a method that can create trials on request; Own has no"):
        build_method(config, Custom(method=Own()))  # type: ignore[arg-type]
    assert isinstance(build_method(config, Custom(method=Single())), Repeats)


@pytest.mark.usefixtures("few_simulations")
def test_preview_says_what_repeats_cost(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    seen, alone = preview_search(load_config(changed(repeat=REPEAT))), preview_search(load_config(ASHA_CONFIG))
    seen.show(Console(width=200))
    shown = capsys.readouterr().out
    assert "then the best 3 trials are trained again with 2 seeds: 6 more trials, 96 epochs" in shown
    assert "repeats" in shown
    plain = seen.as_dict()
    assert (plain["repeats"], alone.as_dict()["repeats"]) == (6, None)
    assert plain["total"] == pytest.approx(alone.as_dict()["total"] + 96, abs=0.02)  # each is rounded
    assert plain["brackets"][-1] == [{"length": 16, "trials": 6, "last": 6}]
