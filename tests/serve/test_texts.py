"""Logs by their lines, failures, code and differences, as the page asks for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from dray.cli import main
from tests.records.test_result import config, told
from tests.report.simulated import simulated
from tests.serve.conftest import Served

STAMP = "2026-11-23T10:00:{:02}.000Z "


@pytest.fixture
def digits(served: Served) -> Path:
    return simulated(served.results / "digits-1", 12).path


def ask(served: Served, path: str, **query: Any) -> Any:
    given = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
    reply = served.api("GET", f"/experiments/{path}?{given}")
    assert reply.status == 200, reply.body
    return reply.json


def write_log(experiment: Path, rank: int, lines: list[str], trial: int = 0) -> Path:
    place = experiment / f"trial_{trial}" / "logs"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"rank_{rank}.log").write_text("".join(f"{line}\n" for line in lines))
    return place / f"rank_{rank}.log"


def test_a_ranks_lines_are_read_by_their_numbers(served: Served, digits: Path) -> None:
    lines = [f"line {each}" for each in range(1, 1201)]
    write_log(digits, 0, ["other"])
    path = write_log(digits, 1, lines)
    tail = ask(served, "digits-1/trials/0/logs", rank=1)
    assert (tail["line"], tail["lines"], tail["total"]) == (701, lines[700:], 1200)
    assert tail["ranks"] == [0, 1]
    found = ask(served, "digits-1/trials/0/logs", rank=1, line=10, limit=3)
    assert (found["line"], found["lines"]) == (10, lines[9:12])
    with path.open("a") as file:
        file.write("more\nhalf")
    assert ask(served, "digits-1/trials/0/logs", rank=1, line=1201)["lines"] == ["more", "half"], "it has ended"
    assert ask(served, "digits-1/trials/0/logs", rank=1, line=1300)["lines"] == []
    reply = served.api("GET", "/experiments/digits-1/trials/0/logs?rank=2")
    assert (reply.status, reply.json["error"]) == (404, "trial 0 has no rank 2; it has 0, 1")
    assert ask(served, "digits-1/trials/1/logs", rank=0)["lines"] == [], "it has printed nothing"


def test_a_line_of_all_ranks_says_where_it_is(served: Served, digits: Path) -> None:
    write_log(digits, 0, [STAMP.format(1) + "a", "b", STAMP.format(4) + "c"])
    path = write_log(digits, 1, [STAMP.format(2) + "d"])
    found = ask(served, "digits-1/trials/0/logs")
    assert [line.partition(" | ")[0] for line in found["lines"]] == ["rank 0", "rank 0", "rank 1", "rank 0"]
    assert found["places"] == [[0, 1], [0, 2], [1, 1], [0, 3]]
    with path.open("a") as file:
        file.write("e\n")
    news = ask(served, "digits-1/trials/0/logs", after=found["next"])
    assert (news["lines"], news["places"]) == (["rank 1 | e"], [[1, 2]])


def test_a_long_log_is_numbered_from_its_beginning_and_not_read_whole_again(
    served: Served, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_log(digits, 0, [f"line {each}" for each in range(1, 100_001)])
    found = ask(served, "digits-1/trials/0/logs")
    assert (found["lines"][-1], found["places"][-1]) == ("line 100000", [0, 100_000])
    assert found["places"][0][1] == int(found["lines"][0].split()[1])
    before = ask(served, "digits-1/trials/0/logs", rank=0)
    with path.open("r+b") as file:  # were it read again, it would have other lines
        file.write(b"\n" * 1000)
    assert ask(served, "digits-1/trials/0/logs", rank=0) == before


def test_a_search_says_where_its_matches_are(served: Served, digits: Path) -> None:
    write_log(digits, 0, ["one", "Error: two"])
    write_log(digits, 1, ["error", "four", "an ERROR"])
    found = ask(served, "digits-1/trials/0/logs", search="error")
    assert [(each["rank"], each["line"], each["text"]) for each in found["matches"]] == [
        (0, 2, "Error: two"),
        (1, 1, "error"),
        (1, 3, "an ERROR"),
    ]
    assert (found["more"], found["total"]) == (False, 5)
    assert ask(served, "digits-1/trials/0/logs", search="error", line=1) == found
    [match] = ask(served, "digits-1/trials/0/logs", search="error", rank=1, line=2)["matches"]
    assert match["line"] == 3
    assert served.api("GET", f"/experiments/digits-1/trials/0/logs?search={'x' * 201}").status == 400
    assert served.api("GET", "/experiments/digits-1/trials/0/logs?search=a%0Ab").status == 400


def test_an_experiments_log_is_its_events(served: Served) -> None:
    story = told(served.results, config())
    lines = served.api("GET", "/experiments/experiment/events?after=0").json["lines"]
    found = ask(served, "experiment/logs")
    assert (found["lines"], found["line"], found["total"], found["running"]) == (lines, 1, len(lines), True)
    story.write({"event": "ended", "reason": "budget.time is spent"})
    found = ask(served, "experiment/logs", line=len(lines) + 1)
    assert len(found["lines"]) == 1
    assert found["lines"][0].endswith("experiment ended: budget.time is spent")
    matches = ask(served, "experiment/logs", search="TRIAL 1 failed")["matches"]
    assert [lines[each["line"] - 1] for each in matches] == [each["text"] for each in matches]
    assert len(matches) == 2


def test_failures_are_grouped(served: Served) -> None:
    told(served.results, config())
    found = ask(served, "experiment/failures")
    assert found["failures"] == 2
    [group] = found["groups"]
    assert (group["error"], group["trials"], group["restarted"], group["given_up"]) == ("no", [[1, 2]], 1, 1)


def test_code_is_text_and_only_the_experiments(served: Served, digits: Path) -> None:
    code = digits / "code"
    (code / "net").mkdir(parents=True)
    (code / "net" / "a b.py").write_text("<script>")
    (code / "data.bin").write_bytes(b"\0")
    (code / "link").symlink_to(digits / "experiment.yaml")
    variant = digits / "variants" / ("0" * 12) / "code"
    variant.mkdir(parents=True)
    (variant / "other.py").write_text("y = 2\n")
    found = ask(served, "digits-1/code")
    assert [each["path"] for each in found["files"]] == ["data.bin", "link", "net/a b.py"]
    assert found["variants"] == ["0" * 12]
    assert ask(served, "digits-1/code/net/a%20b.py")["text"] == "<script>"
    assert ask(served, "digits-1/code/data.bin")["text"] is None
    assert ask(served, "digits-1/code/other.py", variant="0" * 12)["text"] == "y = 2\n"
    outside = (
        "link",
        "..%2Fexperiment.yaml",
        "%2E%2E/experiment.yaml",
        "net/..%2F..%2Fexperiment.yaml",
        "%2Fetc%2Fpasswd",
        "x" * 300,
    )
    for path in (*outside, "none.py", "other.py"):
        reply = served.api("GET", f"/experiments/digits-1/code/{path}")
        assert reply.status == 404, path
        assert "searcher" not in reply.body.decode()
    assert served.api("GET", "/experiments/digits-1/code?variant=../../x").status == 404
    assert served.api("GET", f"/experiments/{'x' * 300}/code").status == 404
    assert served.api("GET", f"/experiments/digits-1/difference?with={'x' * 300}").status == 404


def test_a_difference_is_that_of_the_command(served: Served, digits: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = simulated(served.results / "other-2", 8).path
    for path, text in ((digits, "x = 1\n"), (other, "x = 2\n")):
        (path / "code").mkdir()
        (path / "code" / "model_def.py").write_text(text)
    found = ask(served, "digits-1/difference", **{"with": "other-2"})
    capfd.readouterr()
    with pytest.raises(SystemExit):
        main(["diff", str(digits), str(other), "--json"])
    said = json.loads(capfd.readouterr().out)
    assert found["diff"] == said["diff"]
    assert found["more"] == 0
    for name in ("config", "hyperparameters", "versions", "data", "metrics", "a", "b"):
        assert found[name] == said[name], name
    assert {each["path"] for each in found["config"]} >= {"searcher.max_trials"}
    trials = ask(served, "digits-1/difference", a_trial=0, b_trial=1)
    assert (trials["a"]["trial"], trials["b"]["trial"], trials["config"], trials["diff"]) == (0, 1, [], "")
    assert {each["path"] for each in trials["hyperparameters"]} >= {"lr"}
    assert served.api("GET", "/experiments/digits-1/difference?with=none").status == 404
    assert served.api("GET", "/experiments/digits-1/difference?a_trial=99").status == 404
