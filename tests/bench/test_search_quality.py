"""bench/search_quality.py: its incumbents, its simplest opponent, and the page from kept searches."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from searchers import Create, Event, Exited, Pause, Reported, Resume, parse_space

pytestmark = pytest.mark.slow  # it imports what it compares with

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The benchmarks import each other by their file names, and silence their peers' logs."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    logging.disable(logging.NOTSET)


class Overfitting:
    """Trial n has x = n. Trial 0 is worst at first and best in the end; trial 1 overfits from the lowest loss on."""

    seed, rungs = 0, (1, 3)
    space = parse_space({"x": {"type": "int", "minval": 0, "maxval": 3}})
    losses: Mapping[int, Mapping[float, float]] = {0: {1: 3.0, 3: 1.0}, 1: {1: 0.5, 3: 2.0}, 2: {1: 2.5, 3: 1.5}}

    def curve(self, config: Mapping[str, Any]) -> Callable[[float], float]:
        return lambda t: self.losses[config["x"]][t]

    def cost(self, config: Mapping[str, Any]) -> float:
        return 1.0

    def regret(self, config: Mapping[str, Any]) -> float:
        return config["x"] / 10


class InOrder:
    def ask(self, trial: int) -> dict[str, object]:
        return {"x": trial}

    def tell(self, event: Event, hparams: Mapping[str, object]) -> None:
        pass


@pytest.mark.usefixtures("bench")
def test_both_incumbents_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    import search_quality
    from search_page import at
    from search_peers import Peer
    from search_problems import Regime
    from search_ways import Way

    regime = Regime(noise=0.0, workers=1, trainings=2.99)
    monkeypatch.setattr(search_quality, "JITTER", 0.0)
    monkeypatch.setattr(search_quality.Case, "problem", lambda case: (Overfitting(), regime))
    monkeypatch.setitem(
        search_quality.WAYS, "all", Way("", lambda problem, workers: (Peer(problem, workers), InOrder()))
    )
    found = search_quality.search("all", search_quality.Case("synthetic", "base", "", 0))
    # By then, the trials 0, 1 and 2 have been trained for 1 or 3 of 3 steps, one after the other.
    times = (0.2, 0.5, 1.5, 1.9, 2.9)
    assert [at(found.lowest, time) for time in times] == [1.0, 0.0, 0.1, 0.1, 0.1]
    assert [at(found.highest, time) for time in times] == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.usefixtures("bench")
def test_the_best_four_of_a_round_are_trained_to_the_end() -> None:
    from search_ways import OneThenTop

    method = OneThenTop(SimpleNamespace(rungs=(1, 2)), workers=1)
    assert method.start() == [Create(trial=0)]
    for trial, loss in enumerate([5.0, 1.0, 7.0, 2.0, 8.0, 3.0, 6.0]):
        actions = method.on(Reported(trial=trial, step=1, value=loss))
        assert actions == [Pause(trial=trial), Create(trial=trial + 1)]
    assert method.on(Reported(trial=7, step=1, value=4.0)) == [Pause(trial=7), Resume(trial=1)]
    assert method.on(Reported(trial=1, step=2, value=0.5)) == []
    resumed = [method.on(Exited(trial=trial, reason="completed")) for trial in (1, 3, 5, 7)]
    assert resumed == [[Resume(trial=3)], [Resume(trial=5)], [Resume(trial=7)], [Create(trial=8)]]


def found(way: str, task: str, regret: float, seed: int = 0) -> Any:
    from search_page import Found

    return Found(
        problems="tables",
        regime="three",
        task=task,
        seed=seed,
        way=way,
        trials=7,
        cpu_s=0.5,
        lowest=[(0.0, 1.0), (4.0, regret)],
        highest=[(0.0, 1.0), (30.0, regret)],
        machine="a machine",
        versions=["ray 2.60.0"],
    )


@pytest.mark.usefixtures("bench")
def test_a_way_with_fewer_searches_is_compared_in_their_cases() -> None:
    from _measure import Paper
    from search_page import figure, report

    searches = [
        found("auto", "adult", 0.1),
        found("auto", "higgs", 0.3),
        found("auto", "jasmine", 0.05),
        found("ray+optuna", "higgs", 0.2),
        found("ray+optuna", "adult", 0.4),
    ]
    paper = Paper()
    report(paper, searches)
    text = paper.text("")
    assert "3 searches on 3 tasks, seeds 0 to 0; slow ways: fewer." in text
    rows = {cells[1].strip(): cells[2:-1] for line in text.splitlines() if len(cells := line.split("|")) > 4}
    assert [cell.split()[0] for cell in rows["auto"]][:5] == ["3", "1.000", "1.000", "1.000", "0.150"]
    # +0.3 on one task and -0.1 on the other.
    assert rows["ray+optuna"][0].strip() == "+0.100 (-0.100 .. +0.300)"
    assert rows["ray+optuna"][3].split()[0] == "+0.000"
    assert rows["ray+optuna"][-1].strip() == "1 / 1 / 1 of 2"

    svg = ElementTree.fromstring(figure(searches))
    lines = list(svg.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 4  # two ways, two incumbents
    ends = [float(line.attrib["points"].split(",")[-1]) for line in lines]
    assert ends[0] > ends[1]  # a lower regret is farther down


@pytest.mark.usefixtures("bench")
def test_kept_searches_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import search_quality

    ran: list[tuple[str, int]] = []

    def searches(units: Any, jobs: int, minutes: float) -> Any:
        for way, case in units:
            ran.append((way, case.seed))
            yield search_quality.search(way, case)

    monkeypatch.setattr(search_quality, "searches", searches)
    keep = tmp_path / "kept.jsonl"
    for seeds in ("1", "2"):
        options = ["--regimes", "many", "--ways", "full", "--seeds", seeds, "--first-seed", "0", "--keep", str(keep)]
        monkeypatch.setattr(sys, "argv", ["search_quality.py", *options])
        search_quality.main()
    assert ran == [("full", 0), ("full", 1)]
    assert "2 of 2 searches" in capsys.readouterr().out
    assert [each.seed for each in search_quality.kept(keep)] == [0, 1]
