"""Only those who have the token may use the server; a foreign site's page may not, whatever it makes a browser send."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from dray.private import is_loopback
from dray.serve.app import make_app
from dray.serve.auth import LOOPBACK, host_names
from dray.serve.tokens import Tokens
from tests.serve.conftest import TOKEN, Served

STOP = "/api/v1/experiments/digits-1/stop"


@pytest.fixture
def running(served: Served) -> Served:
    """A server with a running experiment, ``digits-1``."""
    (served.results / "digits-1").mkdir()
    (served.results / "digits-1" / "experiment.yaml").write_text("name: digits\n")
    served.control.put("digits-1", "RUNNING")
    return served


def cookie(served: Served) -> str:
    """The cookie that a browser gets."""
    reply = served.send("GET", f"/login?token={TOKEN}", headers={})
    assert (reply.status, reply.headers["Location"]) == (303, "./")
    return reply.headers["Set-Cookie"]


def sent(served: Served) -> dict[str, str]:
    """What a browser that has logged in sends with each request to this host."""
    return {"Cookie": cookie(served).partition(";")[0]}


# -------------------------------------------------------------------------------------------------------------- token
def test_every_route_of_the_api_needs_the_token(running: Served) -> None:
    app = make_app(running.control, running.results, tokens=Tokens(running.results, TOKEN), hosts=LOOPBACK)
    checked = 0
    for route in app.router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        if path.startswith("/api/"):
            for name in ("name", "trial"):
                path = path.replace(f"{{{name}}}", "digits-1")
            assert running.send(route.method, path, headers={}).status == 401, path
            checked += 1
        else:
            assert route.method in ("GET", "HEAD") or (route.method, path) == ("POST", "/login"), path
    assert checked >= 12
    assert running.control.calls == []


WRONG = ["", "Bearer", "Bearer ", "Bearer x", f"Basic {TOKEN}", f"bearer{TOKEN}", f"Bearer {TOKEN}x", "Bearer é"]


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_token_is_refused(running: Served, given: str) -> None:
    reply = running.send("POST", STOP, headers={"Authorization": given.encode("latin-1")})  # type: ignore[dict-item]
    assert reply.status == 401
    assert "token" in reply.json["error"]
    assert TOKEN not in reply.body.decode()


PAGE = {"X-Dray": "1", "Content-Type": "application/json"}


def test_the_page_signs_in_with_a_token_that_somebody_types(running: Served) -> None:
    reply = running.send("POST", "/login", {"token": TOKEN}, headers=PAGE)
    assert reply.status == 204
    assert {"HttpOnly", "SameSite=Strict"} <= set(reply.headers["Set-Cookie"].split("; "))
    given = {"Cookie": reply.headers["Set-Cookie"].partition(";")[0]}
    assert running.send("GET", "/api/v1/status", headers=given).status == 200
    for body in (b"", b"[]", b'{"token": 7}', b'{"token": "wrong"}', TOKEN.encode()):
        reply = running.send("POST", "/login", body, headers=PAGE)
        assert (reply.status, "Set-Cookie" in reply.headers) == (401, False), body
    unknown = {**PAGE, "Content-Type": "application/json; charset=nonsense"}
    assert running.send("POST", "/login", {"token": TOKEN}, headers=unknown).status == 401


FORGED = [{}, {"X-Dray": "1", "Origin": "http://evil.example"}, {"Content-Type": "application/json"}]


@pytest.mark.parametrize("headers", FORGED)
def test_a_foreign_page_signs_nobody_in(running: Served, headers: dict[str, str]) -> None:
    reply = running.send("POST", "/login", {"token": TOKEN}, headers=headers)
    assert (reply.status, "Set-Cookie" in reply.headers) == (403, False)


PLACES = {
    "/e/digits-1/t/3?sel=1,2": "./#/e/digits-1/t/3?sel=1,2",
    "https://evil.example/": "./#https://evil.example/",
    "//evil.example": "./#//evil.example",
    "x\r\nSet-Cookie: a=b": "./#x%0D%0ASet-Cookie:%20a=b",
    "": "./",
}


@pytest.mark.parametrize(("to", "place"), PLACES.items())
def test_a_link_leads_to_a_view_of_this_page_only(running: Served, to: str, place: str) -> None:
    reply = running.send("GET", f"/login?token={TOKEN}&to={quote(to)}", headers={})
    assert (reply.status, reply.headers["Location"]) == (303, place)
    assert running.send("GET", f"/login?token=wrong&to={quote(to)}", headers={}).status == 401


def test_what_is_not_there_is_not_shown_either(running: Served) -> None:
    assert running.send("GET", "/api/v1/experiments/digits-9/events", headers={}).status == 401
    assert running.send("GET", "/%61pi/v1/status", headers={}).status == 401
    assert running.send("GET", "//api/v1/status", headers={}).status in (401, 404)


def test_a_server_without_a_token_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Tokens(tmp_path, "")


# ------------------------------------------------------------------------------------------------------------ browser
def test_a_browser_logs_in_and_acts(running: Served) -> None:
    assert running.send("GET", "/login?token=wrong", headers={}).status == 401
    assert running.send("GET", "/login", headers={}).status == 401
    given = cookie(running)
    assert f"dray-{running.port}=" in given
    assert TOKEN not in given
    for flag in ("HttpOnly", "SameSite=Strict"):
        assert flag in given
    mine = sent(running)
    assert running.send("GET", "/api/v1/status", headers=mine).status == 200
    by_page = {**mine, "X-Dray": "1", "Origin": f"http://127.0.0.1:{running.port}"}
    assert running.send("POST", STOP, headers=by_page).status == 200
    assert running.control.calls == [("stop", "digits-1")]


def test_every_answer_has_the_headers_that_browsers_need(running: Served) -> None:
    for path in ("/api/v1/status", "/api/v1/nothing", f"/login?token={TOKEN}"):
        headers = running.send("GET", path).headers
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert not any(word in headers["Content-Security-Policy"] for word in ("script-src", "style-src", "unsafe"))
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in headers
    assert running.send("GET", "/api/v1/status").headers["Cache-Control"] == "no-store"


# -------------------------------------------------------------------------------------------------------- other sites
EVIL = "https://evil.example"
FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({"Origin": EVIL, "Content-Type": FORM}, id="a form, posted without the cookie"),
        pytest.param({"Origin": EVIL, "Content-Type": "text/plain", "Sec-Fetch-Mode": "no-cors"}, id="a simple fetch"),
        pytest.param({"Origin": "null", "Content-Type": FORM}, id="a sandboxed frame"),
    ],
)
@pytest.mark.parametrize("with_cookie", [False, True])
def test_a_foreign_page_can_not_stop_an_experiment(running: Served, headers: dict[str, str], with_cookie: bool) -> None:
    # SameSite=Strict keeps the cookie from being sent. Where it is sent all the same, as from another port of this
    # host, the header is missing: a page can't set it for another origin without asking first.
    if with_cookie:
        headers = {**headers, **sent(running)}
    reply = running.send("POST", STOP, b"", headers=headers)
    assert reply.status == (403 if with_cookie else 401)
    assert running.control.calls == []
    assert running.control.experiment("digits-1").state == "RUNNING"


@pytest.mark.parametrize("origin", [EVIL, "null", "http://127.0.0.1:1", "http://localhost:{port}", "http://127.0.0.1"])
def test_the_header_alone_does_not_help_another_origin(running: Served, origin: str) -> None:
    headers = {**sent(running), "X-Dray": "1", "Origin": origin.format(port=running.port)}
    assert running.send("POST", STOP, headers=headers).status == 403
    assert running.send("DELETE", "/api/v1/experiments/digits-1", headers=headers).status == 403
    assert running.control.calls == []


def test_a_browser_that_asks_before_it_sends_the_header_is_refused(running: Served) -> None:
    asks = {"Origin": EVIL, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-dray"}
    reply = running.send("OPTIONS", STOP, headers={**asks, **sent(running)})
    assert reply.status in (401, 403, 405)
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "[", "", "localhost:x", "127.0.0.1:99999"]
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(running: Served, host: str) -> None:
    # The page's own origin is then this server, so its browser sends whatever it likes, but not our name.
    host = host.format(port=running.port)
    headers = {"Host": host, "X-Dray": "1", "Origin": f"http://{host}", "Authorization": f"Bearer {TOKEN}"}
    for method, path in (("POST", STOP), ("GET", "/api/v1/status"), ("GET", f"/login?token={TOKEN}")):
        assert running.send(method, path, headers=headers).status in (400, 403), (method, path)
    assert running.control.calls == []


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:9000", "LOCALHOST", "[::1]:8600", "10.1.2.3:8600"])
def test_own_names_and_addresses_are_accepted_at_any_port(running: Served, host: str) -> None:
    # A tunnel may end at another port. No site can have an address as its name.
    headers = {**running.headers, "Host": host.format(port=running.port)}
    assert running.send("GET", "/api/v1/status", headers=headers).status == 200


def test_names_of_a_server() -> None:
    assert host_names("127.0.0.1") == {"localhost", "127.0.0.1", "::1"}
    assert "trainer.example" in host_names("Trainer.example")
    assert is_loopback("127.0.0.2")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("trainer.example")
