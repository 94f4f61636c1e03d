"""Tokens with scopes: what each may do, whose experiments it may change, and the file that the command changes."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dray.code.archive import pack
from dray.errors import ConfigError
from dray.serve import address, tokens
from dray.serve.app import make_app
from dray.serve.auth import LOOPBACK, NEEDS
from dray.serve.client import Refused, Server
from dray.serve.quota import Quota
from dray.serve.tokens import FILE, STATE, Tokens
from tests.cli.conftest import dray
from tests.cli.said import Said
from tests.serve.conftest import TOKEN, Reply, Served
from tests.serve.test_api import CONFIG, model, submit

__all__ = ["dray", "model"]

Dray = Callable[..., Said]
OWNERS = {"mine-1": "agent", "theirs-1": "other", "ours-1": ""}
"""Experiments, with the tokens that submitted them."""


@pytest.fixture
def shared(served: Served) -> Served:
    """A server with experiments of three owners."""
    for name, owner in OWNERS.items():
        (served.results / name).mkdir()
        (served.results / name / "experiment.yaml").write_text("name: digits\n")
        served.control.put(name, "RUNNING", owner=owner)
    return served


def bearer(served: Served, name: str, scope: str = "submit", **quota: Any) -> dict[str, str]:
    """The headers of a new token."""
    return {"Authorization": f"Bearer {tokens.create(served.results, name, scope, Quota(**quota))}"}


def routes(served: Served) -> set[tuple[str, str]]:
    app = make_app(served.control, served.results, tokens=Tokens(served.results, TOKEN), hosts=LOOPBACK)
    return {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource is not None
    }


# -------------------------------------------------------------------------------------------------------------- scopes
def test_every_route_has_a_need_and_no_need_is_without_a_route(served: Served) -> None:
    assert routes(served) == set(NEEDS)
    assert {path for (_, path), need in NEEDS.items() if need == "nothing" and path.startswith("/api")} == set()
    changes = {each: need for each, need in NEEDS.items() if each[0] != "GET" and each != ("POST", "/login")}
    assert set(changes.values()) == {"submit", "own", "operate"}


@pytest.mark.parametrize("scope", ["read", "submit", "operate"])
def test_a_token_may_do_what_its_scope_says_on_every_route(shared: Served, scope: str) -> None:
    headers = bearer(shared, "agent", scope)
    allowed = {"read": {"read"}, "submit": {"read", "submit"}, "operate": {"read", "submit", "own", "operate"}}[scope]
    for (method, path), need in NEEDS.items():
        if need == "nothing":
            continue
        for name, owner in OWNERS.items():
            filled = path.replace("{name}", name).replace("{trial}", "0").replace("{kind}", "history")
            reply = shared.send(method, filled, headers=headers)
            may = need in allowed or (need == "own" and scope == "submit" and owner == "agent")
            if path.endswith(("/boards", "/curves", "/figures/{kind}")) and may:
                continue  # of an experiment without records
            assert (reply.status == 403) != may, (method, filled, reply.body)
            if not may:
                assert re.search(f"token agent has the scope {scope}|may change only what it has", reply.json["error"])
    mine = {name for _, name in shared.control.calls}
    assert mine == {"read": set(), "submit": {"mine-1"}, "operate": set(OWNERS)}[scope]


def test_a_refusal_says_who_owns_the_experiment_and_what_is_needed(shared: Served) -> None:
    headers = bearer(shared, "agent")
    for name, owner in (("theirs-1", "token other"), ("ours-1", "the server's own token")):
        reply = shared.send("POST", f"/api/v1/experiments/{name}/stop", headers=headers)
        assert reply.json == {
            "error": f"{name} was submitted with {owner}, and token agent may change only what it has submitted; the "
            "scope operate may"
        }
    reply = shared.send("POST", "/api/v1/experiments/none-1/stop", headers=headers)
    assert reply.status == 404


def test_a_submission_and_a_fork_belong_to_their_token_whatever_the_config_says(shared: Served, model: Path) -> None:
    reply = submit(shared, CONFIG, pack(model), bearer(shared, "agent"))
    assert reply.json["owner"] == "agent"
    fork = f"/api/v1/experiments/{reply.json['name']}/fork"
    assert shared.send("POST", fork, {}, headers=bearer(shared, "other")).json["owner"] == "other"
    assert shared.send("POST", fork, {}).json["owner"] == ""
    forged = shared.send("POST", fork, {"config": {"owner": "agent"}}, headers=bearer(shared, "third"))
    assert (forged.status, forged.json["faults"][0][0]) == (400, "owner")
    assert shared.send("PATCH", f"/api/v1/experiments/{reply.json['name']}", {"owner": "x"}).status == 400


def test_a_priority_below_that_of_the_token_is_refused(shared: Served) -> None:
    headers, path = bearer(shared, "agent", priority=50), "/api/v1/experiments/mine-1"
    refused = shared.send("PATCH", path, {"priority": 49}, headers=headers)
    assert (refused.status, refused.json["faults"]) == (
        400,
        [["priority", "must be 50 or more with token agent, got 49"]],
    )
    assert shared.send("PATCH", path, {"priority": 50}, headers=headers).json["share"]["priority"] == 50
    assert shared.send("PATCH", path, {"priority": 1}).json["share"]["priority"] == 1, "operators may"


def test_no_token_is_logged_although_a_browser_sends_it_in_an_address(
    shared: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    headers, cookie = bearer(shared, "agent"), logged_in(shared, bearer(shared, "browser"))
    secret = headers["Authorization"].split()[1]
    monkeypatch.setattr(shared.control, "status", broken)
    with caplog.at_level("DEBUG"):
        for each in (headers, cookie):
            assert shared.send("GET", f"/api/v1/status?token={secret}", headers=each).status == 500
        assert shared.send("GET", f"/login?token={secret}", headers={}).headers["Referrer-Policy"] == "no-referrer"
    assert "a bug" in caplog.text
    assert secret not in caplog.text


# --------------------------------------------------------------------------------------------------------- the file
def test_a_running_server_accepts_and_refuses_tokens_as_the_file_changes(shared: Served) -> None:
    assert shared.send("GET", "/api/v1/status", headers={"Authorization": "Bearer x"}).status == 401
    headers = bearer(shared, "agent")
    cookie = logged_in(shared, headers)
    assert shared.send("GET", "/api/v1/status", headers=headers).status == 200
    assert shared.send("GET", "/api/v1/status", headers=cookie).status == 200
    tokens.revoke(shared.results, "agent")
    for each in (headers, cookie):
        assert shared.send("GET", "/api/v1/status", headers=each).status == 401
    assert shared.control.experiment("mine-1").state == "RUNNING"
    with pytest.raises(ConfigError, match="agent exists, or did"):
        tokens.create(shared.results, "agent", "submit", Quota())


def logged_in(served: Served, headers: dict[str, str]) -> dict[str, str]:
    """What a browser sends that has logged in with a token."""
    reply: Reply = served.send("GET", f"/login?token={headers['Authorization'].split()[1]}", headers={})
    assert reply.status == 303
    return {"Cookie": reply.headers["Set-Cookie"].partition(";")[0], "X-Dray": "1"}


def test_a_browser_with_a_token_may_do_what_the_token_may(shared: Served) -> None:
    cookie = logged_in(shared, bearer(shared, "agent"))
    assert shared.send("POST", "/api/v1/experiments/theirs-1/stop", headers=cookie).status == 403
    assert shared.send("POST", "/api/v1/experiments/mine-1/stop", headers=cookie).status == 200
    del cookie["X-Dray"]
    assert shared.send("POST", "/api/v1/experiments/mine-1/activate", headers=cookie).status == 403


def test_the_file_is_its_owners_alone_and_has_no_token(tmp_path: Path) -> None:
    secrets = [tokens.create(tmp_path, name, "submit", Quota(slots=2)) for name in ("a", "b")]
    file = tmp_path / STATE / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not [secret for secret in secrets if secret in file.read_text()]
    assert len(set(secrets)) == 2
    assert min(map(len, secrets)) >= 43, "256 bits"
    assert Tokens(tmp_path, TOKEN).quota("a") == Quota(slots=2)


@pytest.mark.parametrize("damage", ["readable", "link", "text", "field"])
def test_a_file_that_may_be_somebody_elses_or_is_damaged_lets_only_the_operator_in(
    shared: Served, tmp_path: Path, damage: str
) -> None:
    headers, file = bearer(shared, "agent", slots=2), shared.results / STATE / FILE
    found = Tokens(shared.results, TOKEN)
    assert found.quota("agent").slots == 2
    if damage == "readable":
        file.chmod(0o644)
        os.utime(file, ns=(1, 1))
    elif damage == "link":
        os.rename(file, tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        os.utime(tmp_path / "elsewhere", ns=(1, 1))
    else:
        file.write_text("{" if damage == "text" else json.dumps({"tokens": [{"name": "agent", "may": "all"}]}))
    assert shared.send("GET", "/api/v1/status", headers=headers).status == 503
    assert shared.send("GET", "/api/v1/status").status == 200
    assert found.quota("agent").slots == 2, "what was known still limits its experiments"


BAD: list[tuple[str, str, dict[str, Any], str]] = [
    ("../agent", "submit", {}, "NAME"),
    ("a/b", "submit", {}, "NAME"),
    ("", "submit", {}, "NAME"),
    (".hidden", "submit", {}, "NAME"),
    ("a" * 64, "submit", {}, "NAME"),
    ("a\nb", "submit", {}, "NAME"),
    ("operator", "submit", {}, "NAME"),
    ("agent", "root", {}, "scope"),
    ("agent", "read", {"slots": 1}, "scope"),
    ("agent", "submit", {"slots": 0}, "slots"),
    ("agent", "submit", {"slots": 10**12}, "slots"),
    ("agent", "submit", {"slot_hours": float("nan")}, "slot_hours"),
    ("agent", "submit", {"slot_hours": -1.0}, "slot_hours"),
    ("agent", "submit", {"slot_hours": float("inf")}, "slot_hours"),
    ("agent", "submit", {"usd": 5.0}, "price"),
    ("agent", "submit", {"prices": {"CPU": 1}}, "price"),
    ("agent", "submit", {"usd": 5.0, "prices": {"CPU": float("nan")}}, "price"),
    ("agent", "submit", {"usd": 5.0, "prices": {"CPU": "1"}}, "price"),
    ("agent", "submit", {"usd": 5.0, "prices": {"CPU": -1}}, "price"),
    ("agent", "submit", {"experiments": 0}, "experiments"),
    ("agent", "submit", {"priority": 100}, "priority"),
]


@pytest.mark.parametrize(("name", "scope", "quota", "field"), BAD)
def test_a_bad_name_scope_or_limit_is_refused(
    tmp_path: Path, name: str, scope: str, quota: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        tokens.create(tmp_path, name, scope, Quota(**quota))
    assert [fault.path for fault in refused.value.faults] == [field]
    assert not (tmp_path / STATE / FILE).exists()


# ------------------------------------------------------------------------------------------------------- its account
def test_a_token_reads_what_is_left_of_its_quota(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = bearer(shared, "agent", slots=4, slot_hours=10.0, experiments=20, priority=50)
    monkeypatch.setenv(address.URL, shared.url)
    monkeypatch.setenv(address.TOKEN, headers["Authorization"].split()[1])
    server = Server.find()
    assert server is not None
    limits = {"slots": 4, "slot_hours": 10.0, "usd": None, "experiments": 20, "priority": 50}
    limits |= {"prices": {}, "sandbox": False}
    assert server.token() == {
        "name": "agent",
        "scope": "submit",
        "quota": limits,
        "used": {"slots": 0.0, "slot_hours": 1.5, "usd": 0.0, "experiments": 1},
        "reserved": {"slot_hours": 2.0, "usd": 0.0},
        "left": {"slots": 4.0, "slot_hours": 6.5, "usd": None, "experiments": 19},
    }
    with pytest.raises(Refused, match=r"needs a token with the scope operate; .*DRAY_SERVER_TOKEN"):
        server.tokens()
    assert shared.send("GET", "/api/v1/token").json["name"] == "operator"


# -------------------------------------------------------------------------------------------------------- the command
def test_the_command_creates_lists_and_revokes_with_and_without_a_server(
    dray: Dray, shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    created = dray("serve", "token", "create", "agent", "--slots", "4", "--slot-hours", "10", "--priority", "50")
    secret = created.out.strip()
    assert (created.code, re.fullmatch(r"[\w-]{43}", secret) is not None) == (0, True)
    dray("serve", "token", "create", "paid", "--usd", "5", "--price", "A100=2.9", "--price", "CPU=0.1")
    told = dray("serve", "token", "create", "reader", "--scope", "read", "--json")
    assert (told.value["name"], told.value["scope"], len(told.value["token"])) == ("reader", "read", 43)
    assert told.out.count("\n") == 1
    assert dray("serve", "token", "revoke", "reader").code == 0
    without = dray("serve", "token", "list")
    assert secret not in without.out
    address.write(shared.results, shared.url, TOKEN)
    with_server = dray("serve", "token", "list")
    for said, hours in ((without, "10"), (with_server, "6.5 of 10 left")):
        rows = [re.split(r"\s{2,}", line.strip()) for line in said.out.splitlines()]
        assert [row[0] for row in rows[-3:]] == ["agent", "paid", "reader"]
        assert hours in rows[-3]
        assert rows[-1][-1] == "revoked"
    listed = json.loads(dray("serve", "token", "list", "--json").out)
    assert [each["quota"]["usd"] for each in listed] == [None, 5.0, None]
    assert dray("serve", "token", "revoke", "nobody").code == 2
    assert "exists, or did" in dray("serve", "token", "create", "agent").err
