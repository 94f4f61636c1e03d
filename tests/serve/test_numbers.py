"""Each view of an experiment shows the same numbers, whoever reads it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from dray.cli import main
from dray.config.notify import Notify
from dray.experiment.notify import Notifier
from dray.figures.data import FigureData
from dray.observers.observer import News
from dray.records.listing import StoredExperiment
from dray.records.result import Result
from searchers.journal import Journal
from tests.observers.replayed import replay_to
from tests.recorded_search import recorded_search
from tests.records.story import BEST, DIVERGED, RESTARTS, STATES, happened
from tests.serve.conftest import Served


class Logger:
    """An observer that keeps what a logger would write."""

    def __init__(self, metric: str) -> None:
        self.states: dict[int, str] = {}
        self.values: dict[int, dict[int, float]] = {}
        self._metric = metric

    def update(self, news: Sequence[News]) -> None:
        for one in news:
            self.states[one.trial.id] = one.trial.state
            for row in one.rows:
                if (row["kind"], row["name"]) == ("validation", self._metric):
                    self.values.setdefault(one.trial.id, {})[row["batches"]] = row["value"]

    def close(self, done: bool) -> None: ...


@pytest.mark.parametrize("several", [False, True])
def test_every_view_has_the_same_numbers(served: Served, capsys: pytest.CaptureFixture[str], several: bool) -> None:
    directory = happened(served.results / "story", several=several)

    def command(*arguments: str) -> Any:
        with pytest.raises(SystemExit):
            main([*arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    def page(path: str = "") -> Any:
        return served.api("GET", f"/experiments{path}").json

    [listed], described = command("experiment", "list"), command("experiment", "describe", "story")
    [on_page], one = page()["experiments"], page("/story")
    result, figures = Result(directory.path), FigureData(StoredExperiment.here(directory).read())
    logger = Logger("validation_loss")
    replay_to(directory, lambda: logger)
    out = directory.path / "told"
    Notifier(Notify(states=["completed"], command=f'echo "$DRAY_NOTIFY_TEXT" > {out}'), directory).ended("completed")

    assert "best validation_loss 0.126 (trial 0)" in out.read_text()
    bests = {
        "list": (listed["best_trial"], listed["best_metric"]),
        "describe": (described["best"]["trial"], described["best"]["metric"]),
        "describe as list": (described["best_trial"], described["best_metric"]),
        "page": (one["best_trial"], one["best_metric"]),
        "page's list": (on_page["best_trial"], on_page["best_metric"]),
        "Result": (result.overview.best_trial, result.overview.best_metric),
        "figures": (int(figures.eligible.index[0]), figures.eligible["best_metric"].iloc[0]),
    }
    assert set(bests.values()) == {(0, 0.126)}, bests

    states = Counter(STATES.values())
    search = recorded_search(directory.config(), Journal.read(directory.journal))  # whose states Prometheus gets
    assert described["states"] == one["states"] == dict(search.states) == states == Counter(logger.states.values())
    for numbers in (listed, described, on_page, one):
        assert (numbers["trials"], numbers["ended"], numbers["failed"]) == (9, 6, 1)
    assert described["diverged"] == one["diverged"] != ""
    assert described["restarts"] == sum(RESTARTS.values())
    assert described["failures"] == one["failures"] == 3

    places = {trial: page(f"/story/trials/{trial}")["rank"] for trial in STATES}
    ranks = {
        "trial list": [row["trial"] for row in command("trial", "list", "story", "--best")],
        "page": sorted((trial for trial in places if places[trial]), key=lambda trial: places[trial]),
        "figures": figures.ranked["trial_id"].tolist(),
        "curves": [curve["trial"] for curve in page("/story/curves")["curves"]],
    }
    # Trial 1 has failed; 3 exceeds a limit; of several objectives the front comes first.
    expected = [0, 7, 2, 5, 4, 3, 1] if several else [0, 3, 7, 2, 5, 4, 1]
    if several:
        table = result.trials.set_index("trial_id")
        fronts = {
            "list": listed["front"],
            "describe": described["front"],
            "describe, with metrics": [each["trial"] for each in described["pareto_front"]],
            "page": one["front"],
            "page's list": on_page["front"],
            "Result": list(result.overview.front),
            "Result's table": table[table["front"].eq(1).fillna(False)].sort_values("best_metric").index.tolist(),
        }
        assert all(front == [0, 7, 2] for front in fronts.values()), fronts
    assert all(rank == expected for rank in ranks.values()), ranks

    rows = {row["trial"]: row for row in page("/story/trials?limit=100")["trials"]}
    table, of_figures = result.trials.set_index("trial_id"), figures.trials
    for row in command("trial", "list", "story"):
        trial = row["trial"]
        best, batches = BEST.get(trial, (None, None))
        found = row["state"], row["best_metric"], row["best_batches"], row["nan_since"], row["restarts"]
        assert found == (STATES[trial], best, batches, DIVERGED.get(trial), RESTARTS.get(trial, 0))
        described = command("trial", "describe", "story", str(trial))
        for name in ("state", "batches", "best_metric", "best_batches", "nan_since", "restarts"):
            assert described[name] == rows[trial][name] == row[name], (trial, name)
            for frame in (table, of_figures):
                if name in frame:
                    value = frame.loc[trial, name]
                    assert (None if pd.isna(value) else value) == row[name], (trial, name)
        if batches is not None:
            assert logger.values[trial][batches] == best


def test_every_view_has_the_same_alerts(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    directory = happened(served.results / "story")
    with Journal(directory.journal) as journal:
        text = "trial 1 failed for good: KeyError: '\x1b[8m'"
        alert = {"event": "alert", "id": 0, "kind": "trial_failed", "level": None, "key": "", "text": text}
        journal.append({**alert, "time": 1_700_000_900.5})
        journal.append({"event": "told", "id": 0, "error": "notify.url answers with HTTP status 404"})

    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main([*arguments])
        return capsys.readouterr().out

    [alert] = served.api("GET", "/experiments/story").json["alerts"]
    error = "notify.url answers with HTTP status 404"
    assert alert == {"id": 0, "time": 1_700_000_900.5, "event": "trial_failed", "text": text, "error": error}
    [described] = json.loads(said("experiment", "describe", "story", "--json"))["alerts"]
    assert described == alert
    line = r"trial 1 failed for good: KeyError: '\x1b[8m' (not sent: notify.url answers with HTTP status 404)"
    shown = " ".join(said("experiment", "describe", "story").split())
    assert line in shown
    logged = said("experiment", "logs", "story")
    assert r"alert: trial 1 failed for good: KeyError: '\x1b[8m'" in logged
    assert f"alert could not be sent: {error}" in logged
