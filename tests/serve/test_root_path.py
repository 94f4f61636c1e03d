"""Below a path of a proxy, whether the proxy strips it or not: the page, the sign-in, the API and its client."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urljoin

import pytest

from dray.errors import ConfigError
from dray.serve import tokens
from dray.serve.app import listening, make_app
from dray.serve.auth import LOOPBACK
from dray.serve.client import Server
from dray.serve.quota import Quota
from dray.serve.root_path import RootPath
from dray.serve.tokens import Tokens
from tests.serve.conftest import DOCUMENT, PORT, TOKEN, Served
from tests.serve.fake import FakeControl

ROOT = RootPath.parse("https://hub.example.org/lab/dray/")
STOP = "/api/v1/experiments/digits-1/stop"


@pytest.fixture
def below(results: Path) -> Iterator[Served]:
    """A server with a running experiment, ``digits-1``, below `ROOT`."""
    control = FakeControl(results)
    (results / "digits-1").mkdir()
    (results / "digits-1" / "experiment.yaml").write_text("name: digits\n")
    control.put("digits-1", "RUNNING")
    with listening(control, results, "127.0.0.1", PORT, Tokens(results, TOKEN), ROOT) as url:
        yield Served(int(url.removesuffix("/lab/dray").rpartition(":")[2]), control, results)


def addresses(page: bytes) -> list[str]:
    return [each for each in re.findall(r'(?:src|href)="([^"]+)"', page.decode()) if not each.startswith("#")]


def test_the_page_and_its_files_have_relative_addresses(served: Served) -> None:
    found = addresses(served.send("GET", "/", headers={}).body)
    assert len(found) == 4
    for each in found:
        assert urljoin("https://host/lab/dray/", each).startswith("https://host/lab/dray/static/")
        assert served.send("GET", f"/{each}", headers={}).status == 200
    assert urljoin("https://host/lab/dray/api/v1/openapi.json", DOCUMENT["servers"][0]["url"]).endswith(
        "/lab/dray/api/v1"
    )


@pytest.mark.parametrize("prefix", ["", "/lab/dray"], ids=["stripped", "kept"])
def test_a_server_below_a_path_is_whole(below: Served, prefix: str) -> None:
    for slash in ("/", ""):
        page = below.send("GET", f"{prefix}{slash}" or "/", headers={})
        assert page.status == 200
        for each in addresses(page.body):
            assert each.startswith("/lab/dray/static/")
            assert below.send("GET", prefix + each.removeprefix("/lab/dray"), headers={}).status == 200
    reply = below.send("GET", f"{prefix}/login?token={TOKEN}&to=/e/digits-1", headers={})
    assert reply.status == 303
    assert urljoin("https://host/lab/dray/login", reply.headers["Location"]) == "https://host/lab/dray/#/e/digits-1"
    assert "path" not in reply.headers["Set-Cookie"].lower(), "so it is for /lab/dray, where the browser sees /login"
    mine = {"Cookie": reply.headers["Set-Cookie"].partition(";")[0]}
    status = below.send("GET", f"{prefix}/api/v1/status", headers=mine)
    assert (status.status, status.headers["Cache-Control"]) == (200, "no-store")
    assert below.send("POST", f"{prefix}{STOP}", headers={**mine, "X-Dray": "1"}).status == 200
    assert Server(f"http://127.0.0.1:{below.port}{prefix}/", TOKEN).status().slots == below.control.status().slots


def test_servers_at_several_paths_of_a_host_read_their_own_cookies(below: Served) -> None:
    reader = tokens.create(below.results, "reader", "read", Quota())
    login = below.send("GET", f"/lab/dray/login?token={reader}", headers={})
    operator = Tokens(below.results, TOKEN).bearer(TOKEN)
    assert operator is not None
    elsewhere = f"dray-{below.port}={operator.cookie}"  # of a server at "/"
    both = f"{login.headers['Set-Cookie'].partition(';')[0]}; {elsewhere}"  # a browser sends the longer path's first
    assert below.send("GET", "/lab/dray/api/v1/token", headers={"Cookie": both}).json["name"] == "reader"


def test_every_route_below_a_path_needs_what_it_needs_elsewhere(below: Served) -> None:
    tokens = Tokens(below.results, TOKEN)
    app = make_app(below.control, below.results, tokens=tokens, hosts=LOOPBACK, root=ROOT)
    checked = 0
    for route in app.router.routes():
        assert route.resource is not None
        path = re.sub(r"\{(name|trial)\}", "digits-1", route.resource.canonical)
        if path.startswith("/lab/dray/api/"):
            assert below.send(route.method, path, headers={}).status == 401, path
            checked += 1
    assert checked >= 12
    assert below.control.calls == []


HUB, PAGE = "hub.example.org", "https://hub.example.org"
FORGED: list[tuple[Mapping[str, str], bool]] = [
    ({"Origin": PAGE}, True),  # the proxy changes Host
    ({"Origin": PAGE, "Host": HUB}, True),
    ({"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-origin"}, True),  # the browser's word, at another port
    ({}, True),
    ({"Origin": "https://evil.example"}, False),
    ({"Origin": "https://evil.example", "Host": HUB}, False),
    ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, False),
    ({"Origin": "https://other.example.org", "Sec-Fetch-Site": "same-site"}, False),
    ({"Origin": f"{PAGE}.evil.example"}, False),
    ({"Origin": f"{PAGE}:444"}, False),
    ({"Origin": "http://hub.example.org"}, False),  # not encrypted: anybody on the way
    ({"Origin": "http://hub.example.org", "Host": HUB}, False),  # the same, and the proxy keeps Host
    ({"Origin": PAGE, "Host": HUB, "Sec-Fetch-Site": "cross-site"}, False),  # the browser knows better
    ({"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "cross-site"}, False),  # the proxy changes Origin too
    ({"Sec-Fetch-Site": "cross-site"}, False),
    ({"Sec-Fetch-Site": "same-site"}, False),
    ({"Sec-Fetch-Site": "none"}, True),  # no page's: somebody's extension, or the browser itself
    ({"Origin": "null"}, False),
    ({"Origin": ""}, False),
    ({"Host": "evil.example", "Sec-Fetch-Site": "same-origin"}, False),  # DNS rebinding
    ({"Host": ""}, False),
]


@pytest.mark.parametrize(("headers", "is_ours"), FORGED)
def test_foreign_pages_are_refused_below_a_path_too(below: Served, headers: Mapping[str, str], is_ours: bool) -> None:
    login = below.send("GET", f"/lab/dray/login?token={TOKEN}", headers={})
    mine = {"Cookie": login.headers["Set-Cookie"].partition(";")[0]}
    if headers.get("Host"):  # the cookie has the port of the address that the browser sees
        mine["Cookie"] = mine["Cookie"].replace(f"dray-{below.port}", f"dray-{80}")
    headers = {name: value.replace("{port}", str(below.port)) for name, value in headers.items()}
    reply = below.send("POST", f"/lab/dray{STOP}", headers={**mine, "X-Dray": "1", **headers})
    assert reply.status == (200 if is_ours else 403), reply.body
    assert below.send("POST", f"/lab/dray{STOP}", headers={**mine, **headers}).status == 403, "without X-Dray"
    assert below.control.calls == [("stop", "digits-1")] * is_ours


@pytest.mark.parametrize(
    "given",
    ["lab", "//evil.example/x", "ftp://host/x", "https:///x", "/a/../b", "/a//b", "/a?b", "/a#b", "/{name}", "/a\r\nb",
     "https://u@host/x", "https://host:x/y", "/%2e%2e/x", "/a%00b", '/a"b', "/<x>"],
)  # fmt: skip
def test_what_is_no_path_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="must be a path such as /lab/dray, or a whole address"):
        RootPath.parse(given)


def test_a_path_may_have_any_users_name() -> None:
    assert RootPath.parse("/user/al%40x é/proxy/8600/").path == "/user/al@x%20%C3%A9/proxy/8600"
    assert RootPath.parse("/") == RootPath()
    assert RootPath.parse("HTTPS://Hub:8443") == RootPath(origin="https://hub:8443")
