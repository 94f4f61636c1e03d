"""The part of the API that reads: what it says is what the experiment's files say, also while they grow."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from dray.records.comparison import compare
from dray.records.metrics import SYSTEM, MetricsLog
from dray.records.repeats import summary
from dray.records.result import Result
from dray.serve import experiments, logs
from dray.text import fields_of
from tests.records.repeated import repeated
from tests.records.story import happened
from tests.records.test_repeats import VALUES, runs
from tests.records.test_result import config, told
from tests.report.simulated import simulated
from tests.serve.conftest import Served

TRIALS = 48
ROW = {"batches": 900, "epochs": None, "kind": "training", "name": "loss", "value": 0.5, "time": 1.0}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("views") / "digits-1", TRIALS).path


@pytest.fixture
def digits(once: Path, served: Served) -> Path:
    """An experiment that was not submitted, in the server's results."""
    shutil.copytree(once, served.results / "digits-1")
    return served.results / "digits-1"


def test_experiments_are_listed_whether_or_not_they_were_submitted(served: Served, digits: Path) -> None:
    served.control.put("digits-1", "PAUSED", slots=1.5, tags=("old",))
    shutil.copytree(digits, served.results / "digits-2")
    found = {row["name"]: row for row in served.listed()}
    assert list(found) == ["digits-1", "digits-2"]
    one, two = found["digits-1"], found["digits-2"]
    assert (one["state"], one["submitted"]["slots"], one["submitted"]["tags"]) == ("PAUSED", 1.5, ["old"])
    assert (two["state"], two["submitted"]) == ("COMPLETED", None)
    overview = Result(digits).overview
    assert (two["trials"], two["ended"], two["best_metric"]) == (overview.trials, overview.ended, overview.best_metric)


def test_large_answers_are_compressed_for_those_who_ask(served: Served, digits: Path) -> None:
    path = f"/api/v1/experiments/{digits.name}/trials?limit=100"
    plain = served.send("GET", path)
    packed = served.send("GET", path, headers={**served.headers, "Accept-Encoding": "gzip"})
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 4
    assert packed.headers["ETag"] == plain.headers["ETag"]


def test_the_list_answers_before_all_experiments_are_read(
    served: Served, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "PATIENCE_S", -1.0)  # no request reads any: only the thread does
    shutil.copytree(digits, served.results / "digits-2")
    served.control.put("digits-2", "COMPLETED")
    first = served.api("GET", "/experiments").json
    assert first["unread"] <= 2
    assert {row["name"]: row["submitted"] is None for row in first["experiments"]}["digits-2"] is False
    assert [row["ended"] for row in served.listed()] == [TRIALS, TRIALS]


def test_a_row_of_the_list_follows_its_experiment(served: Served, digits: Path) -> None:
    served.control.put("digits-1", "PAUSED")
    [before] = served.listed()
    served.control.put("digits-1", "RUNNING", slots=2.0)
    [row] = served.listed()
    assert (row["state"], row["submitted"]["slots"]) == ("RUNNING", 2.0)
    assert row["best_metric"] == before["best_metric"]


def test_an_experiment_that_was_deleted_leaves_the_list_at_once(served: Served, digits: Path) -> None:
    assert [row["name"] for row in served.listed()] == ["digits-1"]
    assert served.api("GET", "/experiments/digits-1/checkpoints").json == {"checkpoints": 0, "bytes": 0}
    assert served.api("DELETE", "/experiments/digits-1").status == 204
    assert served.listed() == []


def test_local_runs_are_in_the_list(served: Served) -> None:
    run = served.results / "local" / "mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"batches": 5, "time": 7.0, "final": true, "decides": true}\n')
    [row] = served.listed()
    assert (row["name"], row["state"], row["is_local"], row["last"]) == ("mine", "COMPLETED", True, 7.0)
    assert served.api("GET", "/experiments/mine").status == 404


def test_nothing_outside_of_the_results_directory_is_read(served: Served, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "secret")
    (served.results / "link").symlink_to(tmp_path / "secret")
    (served.results / "secret").symlink_to(tmp_path / "secret")  # as `link_into_results` makes it
    for name in ("..", "%2e%2e", "..%2fsecret", "link", ".hidden", "nothing", "%2Fetc"):
        for rest in ("", "/trials", "/config", "/curves", "/trials/0/logs"):
            reply = served.api("GET", f"/experiments/{name}{rest}")
            assert reply.status == 404, (name, rest, reply.body)
            assert "/" + str(tmp_path).strip("/") not in reply.body.decode()
    assert served.api("GET", "/experiments/secret").status == 200


def test_a_page_that_has_not_changed_is_not_sent_again(served: Served, digits: Path) -> None:
    path = "/api/v1/experiments/digits-1/curves"
    first = served.send("GET", path)
    again = served.send("GET", path, headers={**served.headers, "If-None-Match": first.headers["ETag"]})
    assert (first.status, again.status, again.body) == (200, 304, b"")


def test_trials_are_sorted_searched_and_paged(served: Served, digits: Path) -> None:
    def trials(**query: Any) -> Any:
        return served.api("GET", "/experiments/digits-1/trials?" + "&".join(f"{k}={v}" for k, v in query.items())).json

    table = Result(digits).trials
    ranked = table.sort_values("best_metric", kind="stable")["trial_id"].tolist()
    found = trials(sort="best_metric", limit=10, offset=5)
    assert [row["trial"] for row in found["trials"]] == ranked[5:15]
    assert (found["found"], found["of"]) == (TRIALS, TRIALS)
    found = trials(search="optimizer%3Dadam%20lr%3C0.005", limit=500)
    wanted = table[(table["hparams.optimizer"] == "adam") & (table["hparams.lr"] < 0.005)]["trial_id"].tolist()
    assert [row["trial"] for row in found["trials"]] == wanted
    assert 0 < len(wanted) < TRIALS
    assert served.api("GET", "/experiments/digits-1/trials?sort=nonsense").status == 400
    assert served.api("GET", "/experiments/digits-1/trials?limit=501").status == 400


def test_trials_are_filtered_by_facets_that_say_what_they_leave(served: Served, digits: Path) -> None:
    def trials(query: str) -> Any:
        return served.api("GET", f"/experiments/digits-1/trials?{query}").json

    table = Result(digits).trials
    adams = table[table["hparams.optimizer"] == "adam"]
    pruned = adams[adams["state"] == "PRUNED"]["trial_id"].tolist()
    found = trials("search=optimizer%3Dadam&state=pruned&facets=1&limit=500")
    assert [row["trial"] for row in found["trials"]] == pruned
    counts = {each["value"]: each["count"] for each in found["facets"]["state"]}
    assert counts == adams["state"].str.lower().value_counts().to_dict(), "a facet does not limit itself"
    rungs = {each["value"]: each for each in found["facets"]["rung"]}
    assert sum(each["count"] for each in rungs.values()) == len(pruned)
    assert rungs["1"]["label"] == "up to 1 epoch"
    assert trials(f"search=optimizer%3Dadam&state=pruned&rung={','.join(rungs)}&ids=1")["ids"] == pruned
    assert trials("search=optimizer%3Dadam&state=pruned&rung=1&ids=1")["found"] == rungs["1"]["count"]
    assert "trials" not in trials("ids=1")


def test_states_are_found_by_their_names_and_by_the_words_of_the_page(served: Served) -> None:
    directory = happened(served.results / "story-1")
    states = {row["trial"]: row for row in served.api("GET", "/experiments/story-1/trials").json["trials"]}
    for search, wanted in (
        ("state=errored", {trial for trial, row in states.items() if row["state"] == "ERRORED"}),
        ("state=failed", {trial for trial, row in states.items() if row["state"] == "ERRORED"}),
        ("state=invalid", {trial for trial, row in states.items() if row["state"] == "INVALID_HP"}),
        ("state=diverged", {trial for trial, row in states.items() if row["ended_by"] == "divergence"}),
    ):
        ids = served.api("GET", f"/experiments/{directory.path.name}/trials?search={quote(search)}&ids=1").json["ids"]
        assert set(ids) == wanted, search
        assert wanted or search == "state=diverged"


def test_other_metrics_are_columns_to_sort_and_search_by(served: Served, digits: Path) -> None:
    def trials(query: str) -> Any:
        return served.api("GET", f"/experiments/digits-1/trials?limit=500&{query}").json["trials"]

    rows = Result(digits).metrics.query("kind == 'training' and name == 'accuracy'").sort_values("batches")
    last = rows.groupby("trial_id")["value"].last()
    found = trials("metric=training.accuracy&sort=metrics.training.accuracy&descending=1")
    assert {row["trial"]: row["metrics"]["training.accuracy"] for row in found} == last.to_dict()
    values = [row["metrics"]["training.accuracy"] for row in found]
    assert values == sorted(values, reverse=True)
    limit = values[10]
    assert len(trials(f"search=training.accuracy%3E{limit}")) == 10
    assert served.api("GET", "/experiments/digits-1/trials?metric=training.nothing").status == 400


def test_trials_that_were_trained_again_are_compared(served: Served) -> None:
    result = Result(repeated(served.results / "again-1", VALUES, runs({1: 0.45, 2: 0.11, 3: 0.10}, noise=0.01)).path)
    found = served.api("GET", "/experiments/again-1").json
    assert (found["best_trial"], found["best_metric"]) == (3, pytest.approx(0.2))
    assert found["repeats"] == [each.to_json() for each in result.reader.finalists()]
    assert found["repeats_summary"] == summary(result.reader.finalists())
    [row] = served.api("GET", "/experiments/again-1/trials?limit=1&offset=5").json["trials"]
    assert (row["trial"], row["repeat_of"], row["repeat"]) == (5, 1, 1)
    found = served.api("GET", "/experiments/again-1/comparison?a=3&b=1").json
    assert found == fields_of(result.compare(3, 1))
    assert (found["better"], found["text"]) == (3, str(result.compare(3, 1)))
    other = repeated(served.results / "again-2", VALUES, runs({1: 0.3, 2: 0.4, 3: 0.5}, noise=0.01)).path
    found = served.api("GET", "/experiments/again-1/comparison?a=3&b=1&with=again-2").json
    assert found == fields_of(compare(result.reader, 3, Result(other).reader, 1))
    assert found["text"].startswith("trial 3 of again-1 is better than trial 1 of again-2 by ")
    assert served.api("GET", "/experiments/again-1/comparison?a=3&b=1&with=..").status == 404
    for query, problem in (("a=3&b=99", "there is no trial 99"), ("a=3&b=x", "b must be an integer from 0, got x")):
        reply = served.api("GET", f"/experiments/again-1/comparison?{query}")
        assert reply.status == 400
        assert problem in reply.json["error"]


def test_a_trial_has_its_metrics_checkpoints_and_failures(served: Served) -> None:
    story = told(served.results, config())
    trial = served.api("GET", "/experiments/experiment/trials/0").json
    assert [each["batches"] for each in trial["checkpoints"]] == [10, 20]
    assert trial["rank"] == 1
    assert trial["drawn"]["net"]["depth"] == trial["hparams"]["net.depth"]
    failed = served.api("GET", "/experiments/experiment/trials/1").json["failures"]
    assert [(each["again"], each["error"]) for each in failed] == [(True, "no"), (False, "no")]
    series = served.api("GET", "/experiments/experiment/trials/0/metrics").json["series"]
    rows = Result(story.directory.path).metrics.query("trial_id == 0")
    assert {(each["kind"], each["name"]): each["values"] for each in series} == {
        key: mine["value"].tolist() for key, mine in rows.groupby(["kind", "name"])
    }
    assert served.api("GET", "/experiments/experiment/trials/99").status == 404
    assert trial["best"] == {"trial": 0, "metric": 0.25, "best_by": "one seed", "hparams": trial["hparams"]}
    assert trial["lineage"] == {"ancestors": [], "children": [], "repeats": []}


def test_series_of_a_trial_are_thinned_to_the_points_that_are_asked_for(served: Served, digits: Path) -> None:
    [trial] = Result(digits).trials.query("batches == 160")["trial_id"].tolist()[:1]
    path = f"/experiments/digits-1/trials/{trial}/metrics"
    whole = served.api("GET", path).json["series"]
    for few, all_ in zip(served.api("GET", f"{path}?points=5").json["series"], whole, strict=True):
        assert (all_["of"], len(all_["values"]), few["of"], len(few["values"])) == (16, 16, 16, 5)
        places = [all_["batches"].index(batches) for batches in few["batches"]]
        assert {min(all_["values"]), max(all_["values"]), all_["values"][0], all_["values"][-1]} <= {*few["values"]}
        assert few["values"] == [all_["values"][i] for i in places]
        assert few["times"] == [all_["times"][i] for i in places]


def test_use_of_the_machine_is_that_of_the_system_metrics(served: Served, digits: Path) -> None:
    log = MetricsLog(digits / "metrics")
    for second, cores in ((1, 0.5), (6, 1.5), (11, 1.0)):
        log.append(
            3,
            [
                {
                    "batches": 10 * second,
                    "epochs": 1.0,
                    "kind": SYSTEM,
                    "time": 1e9 + second,
                    "name": "cpu_cores",
                    "value": cores,
                }
            ],
        )
    log.close()
    found = served.api("GET", "/experiments/digits-1/trials/3/system").json
    [cpu] = found["figures"]
    assert (cpu["name"], cpu["label"], cpu["of"]) == ("cpu_cores", "CPU cores per trial", 3)
    mine = Result(digits).system_metrics.query("trial_id == 3")
    rows = mine[mine["name"] == "cpu_cores"]
    for column in ("batches", "value", "time"):
        assert cpu[{"value": "values", "time": "times"}.get(column, column)] == rows[column].tolist()
    spent = mine.groupby("name")["value"].sum()
    assert found["phases"] == {
        name: pytest.approx(spent[f"{name}_s"]) for name in ("starting", "training", "validating")
    }
    assert served.api("GET", "/experiments/digits-1/trials/99/system").status == 404


def test_logs_come_piece_by_piece(served: Served, digits: Path) -> None:
    place = digits / "trial_0" / "logs"
    place.mkdir(parents=True)
    stamp = "2026-11-23T10:00:0{}.000Z "
    (place / "rank_0.log").write_text(stamp.format(1) + "one\n" + stamp.format(3) + "<script>\nhalf")
    first = served.api("GET", "/experiments/digits-1/trials/0/logs").json
    assert first["lines"] == [stamp.format(1) + "one", stamp.format(3) + "<script>"]
    with (place / "rank_0.log").open("a") as file:
        file.write(" a line\n")
    second = served.api("GET", f"/experiments/digits-1/trials/0/logs?after={first['next']}").json
    assert second["lines"] == ["half a line"]
    assert served.api("GET", f"/experiments/digits-1/trials/0/logs?after={second['next']}").json["lines"] == []
    assert served.api("GET", "/experiments/digits-1/trials/0/logs?after=../x:1").status == 400
    whole = served.send("GET", "/api/v1/experiments/digits-1/trials/0/logs?whole=1")
    assert whole.headers["Content-Type"].startswith("text/plain")
    assert whole.body.decode() == stamp.format(1) + "one\n" + stamp.format(3) + "<script>\nhalf a line\n"


def test_the_end_of_a_long_log_comes_first(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("".join(f"line {i}\n" for i in range(20_000)))
    found = logs.piece([tmp_path], "")
    assert found["lines"][-1] == "line 19999"
    assert found["skipped"] + sum(len(line) + 1 for line in found["lines"]) == (tmp_path / "rank_0.log").stat().st_size


def test_figures_have_the_trials_that_are_asked_for(
    served: Served, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dray.figures.data.MAX_TRIALS", 8)
    monkeypatch.setattr("dray.serve.experiments.MOST_MADE", 3)

    def figure(query: str = "") -> tuple[list[int], list[int], str]:
        found = served.api("GET", f"/experiments/digits-1/figures/parallel{query}").json
        lines = found["figures"]["parallel"]
        return lines["data"][0]["customdata"], found["included"], lines["note"]

    usual, none, note = figure()
    assert (len(usual), none) == (8, [])
    assert note == "8 of 48 trials are shown: the 4 best, and others evenly by rank."
    left_out = sorted(set(range(TRIALS)) - set(usual))
    rows = served.api("GET", "/experiments/digits-1/trials?sort=rank&limit=100").json["trials"]
    ranked = [row["trial"] for row in rows][::-1]  # the best is drawn last, on top
    for first in left_out[:6]:  # more than are kept
        trials, included, noted = figure(f"?include={first},{left_out[-1]},{usual[0]},999")
        assert (set(trials) - set(usual), included) == ({first, left_out[-1]}, [first, left_out[-1]])
        assert noted == f"{note} The selected ones are shown, too."
    assert figure() == (usual, none, note)
    assert trials == [trial for trial in ranked if trial in trials], "by rank"
    assert served.api("GET", "/experiments/digits-1/figures/nonsense").status == 400
    for wrong in ("x", "-1", "1.5", "9" * 20, ",".join(map(str, range(101)))):
        reply = served.api("GET", f"/experiments/digits-1/figures/parallel?include={wrong}")
        assert (reply.status, "include must be at most 100 whole numbers" in reply.json["error"]) == (400, True)


def test_a_damaged_journal_is_an_answer(served: Served, digits: Path) -> None:
    (digits / "journal.jsonl").write_text("{}}\n{}\n")
    assert served.api("GET", "/experiments/digits-1").status == 409
    [row] = served.listed()
    assert row["state"] == "DAMAGED"


def test_damaged_rows_are_told_where_the_experiment_is_seen(served: Served, digits: Path) -> None:
    assert served.api("GET", "/experiments/digits-1").json["damaged"] == []
    tail = digits / "metrics" / "_tail.jsonl"
    MetricsLog(digits / "metrics").append(0, [ROW])
    tail.write_bytes(tail.read_bytes() + b"%$\n[]\n" + tail.read_bytes())
    served.api("GET", "/experiments/digits-1/trials/0/metrics")
    [line] = served.api("GET", "/experiments/digits-1?now=1").json["damaged"]
    assert line.startswith(f"{tail.resolve()}: line "), line
    assert line.endswith("is damaged: expected a JSON object, got b'%$'; this line is left out; so is 1 more")


def test_an_empty_config_is_an_answer_that_says_so(served: Served, digits: Path) -> None:
    (digits / "experiment.yaml").write_text("")
    for what in ("", "/events", "/code"):
        assert (
            "experiment.yaml can't be read: it has no fields"
            in served.api("GET", f"/experiments/digits-1{what}").json["error"]
        )
