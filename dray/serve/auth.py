"""Authentication, and what each token may do: only holders of a token may use the server.

Programs send the token as ``Authorization: Bearer``. A browser gets a cookie for it from ``/login?token=...``, or from
the page, which sends what somebody has typed. Other sites can make a browser send requests here, including that cookie
if they are on the same host, so a request that changes something needs more than the cookie: the header ``X-Dray``,
which a foreign page can't send without permission, and the server's own ``Origin``. A site whose name resolves to this
machine (DNS rebinding) is refused by its name.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Mapping
from typing import Literal, get_args
from urllib.parse import quote, urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from dray.private import is_loopback
from dray.serve.answers import refuse
from dray.serve.control import API, Verb
from dray.serve.root_path import RootPath
from dray.serve.tokens import Token, Tokens
from searchers.errors import DamagedFile

Need = Literal["nothing", "read", "submit", "own", "operate"]
"""What a request needs: a token with a scope; for "own", submit if the experiment is the token's own, else operate. The
page's files contain no data, and need nothing."""
_ONE = f"{API}/experiments/{{name}}"
NEEDS: Mapping[tuple[str, str], Need] = {
    ("GET", "/"): "nothing",
    ("GET", "/static/{file}"): "nothing",
    ("GET", "/static/lib/{file}"): "nothing",
    ("GET", "/login"): "nothing",
    ("POST", "/login"): "nothing",
    **{("GET", f"{API}/{what}"): "read" for what in ("status", "openapi.json", "token", "experiments")},
    **{("GET", f"{API}/{what}"): "read" for what in ("queue", "queue/preview")},
    ("GET", f"{API}/tokens"): "operate",
    ("GET", _ONE): "read",
    **{
        ("GET", f"{_ONE}/{what}"): "read"
        for what in ("config", "events", "trials", "curves", "comparison", "beliefs", "checkpoints")
    },
    **{("GET", f"{_ONE}/{what}"): "read" for what in ("figures/{kind}", "variants/{variant}")},
    **{("GET", f"{_ONE}/{what}"): "read" for what in ("failures", "logs", "code", "code/{path}", "difference")},
    **{("GET", f"{_ONE}/trials/{{trial}}{what}"): "read" for what in ("", "/metrics", "/system", "/logs")},
    ("POST", f"{API}/experiments"): "submit",
    ("POST", f"{_ONE}/fork"): "submit",
    ("PATCH", _ONE): "own",
    ("DELETE", _ONE): "own",
    **{("POST", f"{_ONE}/{verb}"): "own" for verb in (*get_args(Verb), "extend", "trials")},
    **{("POST", f"{_ONE}/trials/{{trial}}/{what}"): "own" for what in ("fork", "stop")},
    ("POST", f"{_ONE}/boards"): "operate",  # it starts programs on the server's machine, which ask for no token
}
"""A route that is missing here is refused."""
FORKABLE = ("trials", "fork", "extend", "activate")
"""The last parts of routes of which a fork of the experiment does as well, with a token that may not use them."""
CALLER = web.RequestKey("caller", Token)
"""The key of a request's `Token`."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE = ("GET", "HEAD")  # methods that change nothing
HEADERS = {
    # Only scripts and styles from this server, none inline.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def host_names(host: str) -> frozenset[str]:
    """The names under which a server that listens at ``host`` may be addressed, for `guard`."""
    if is_loopback(host):
        return LOOPBACK | {host}
    return LOOPBACK | {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}


def guard(tokens: Tokens, hosts: Collection[str], owner_of: Callable[[str], str], root: RootPath) -> Middleware:
    """A middleware that lets only requests through whose token has what they need.

    Args:
        hosts: the server's names, without ports. IP addresses are always accepted, because no site can make its name
            look like an address.
        owner_of: the owner of an experiment; `NotSubmitted` if it is not the server's.
        root: the path of the server below a proxy, and that proxy's origin.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _is_named(request.host, hosts):
            return refuse(403, f"{request.host[:100]!r} is not a name of this server")
        need = _need(request, root.path)
        if need == "nothing":
            return await handler(request)
        given = request.headers.get("Authorization", "")
        scheme, _, secret = given.partition(" ")
        try:
            if given:
                token = tokens.bearer(secret) if scheme == "Bearer" else None
            else:
                token = tokens.cookie(request.cookies.get(_cookie_name(request, root), ""))
        except DamagedFile:
            return refuse(503, "the server's tokens can't be read; its operator sees why with: dray serve token list")
        if token is None and given:
            return refuse(401, "the token is not this server's, or it was revoked")
        if token is None:
            return refuse(401, "a token is needed: open the address that dray serve has printed, or send it as Bearer")
        if not given and request.method not in SAFE and (why := _may_be_forged(request, root)):
            return refuse(403, why)
        if why := _lacks(token, need):
            return refuse(403, why)
        if need == "own" and token.scope != "operate":
            name = request.match_info["name"]
            owner = await asyncio.to_thread(owner_of, name)
            if why := refusal(token, name, owner):
                resource = request.match_info.route.resource
                can_fork = resource is not None and resource.canonical.rpartition("/")[2] in FORKABLE
                return refuse(403, f"{why}; fork it instead" if can_fork and token.scope == "submit" else why)
        request[CALLER] = token
        return await handler(request)

    return check


def _need(request: web.Request, root: str) -> Need | None:
    """What a request needs; None if no token allows it."""
    resource = request.match_info.route.resource
    if resource is None:  # the answer is that there is no such page, or no such method
        return "read"
    method, path = "GET" if request.method == "HEAD" else request.method, resource.canonical.removeprefix(root) or "/"
    return NEEDS.get((method, path))


def _lacks(token: Token, need: Need | None) -> str:
    """The reason why a token's scope does not allow a request; "" if it does, or if that depends on the experiment."""
    if need is None:
        return "no token allows this request"
    wanted = "submit" if need == "own" else need
    allowed = {"read": ("read",), "submit": ("read", "submit"), "operate": ("read", "submit", "operate")}
    if wanted in allowed[token.scope]:
        return ""
    return f"this needs a token with the scope {wanted}; token {token.name} has the scope {token.scope}"


def refusal(token: Token, name: str, owner: str) -> str:
    """The reason why a token may not change an experiment of this owner; "" if it may."""
    if token.scope == "operate" or (token.scope == "submit" and owner == token.owner):
        return ""
    return _lacks(token, "own") or f"{name[:100]} {_is_not_its(token, owner)}"


def _is_not_its(token: Token, owner: str) -> str:
    whose = f"was submitted with token {owner}" if owner else "was submitted with the server's own token"
    return f"{whose}, and token {token.name} may change only what it has submitted; the scope operate may"


def login(tokens: Tokens, root: RootPath) -> list[web.RouteDef]:
    """``/login``, which sets the browser's cookie: ``GET`` with ``token`` in a link, and in ``to`` the view of the page
    to go to (``/e/NAME``); ``POST`` with ``token`` in JSON, from the page itself."""

    def with_cookie(request: web.Request, secret: object, status: int, **headers: str) -> web.StreamResponse:
        token = tokens.bearer(secret) if isinstance(secret, str) else None
        if token is None:
            return refuse(
                401, "the token is not this server's, or was revoked; dray serve --status prints the right one"
            )
        found = web.Response(status=status, headers=headers)
        # Without a path, it is sent to where the browser sees /login: "/", or the server's path below a proxy.
        found.set_cookie(_cookie_name(request, root), token.cookie, httponly=True, samesite="Strict", path="")
        return found

    async def follow(request: web.Request) -> web.StreamResponse:
        # Behind the hash sign nothing leads to another site. The place is relative: a proxy may have stripped a path.
        view = request.query.get("to", "")
        place = f"./#{quote(view, safe='/?=&,:%')}" if view else "./"
        return with_cookie(request, request.query.get("token", ""), 303, Location=place)

    async def sign_in(request: web.Request) -> web.StreamResponse:
        # A foreign page must not sign anybody in: they would work under another's token.
        if why := _may_be_forged(request, root):
            return refuse(403, why)
        try:
            given = await request.json()
        except (ValueError, LookupError):  # the latter for an unknown charset
            given = None
        return with_cookie(request, given.get("token") if isinstance(given, dict) else None, 204)

    return [web.get("/login", follow), web.post("/login", sign_in)]


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add security headers; an aiohttp signal."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    if f"{API}/" in request.path:  # perhaps below a root path
        response.headers.setdefault("Cache-Control", "no-store")


def _may_be_forged(request: web.Request, root: RootPath) -> str:
    """The reason why a browser's request may come from another site's page; "" if it can't."""
    if request.headers.get("X-Dray") != "1":
        return "a request from a browser needs the header X-Dray: 1"
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site == "same-origin":  # only browsers can set it, and no proxy changes it
        return ""
    refused = f"a page of {'another site' if origin is None else repr(origin[:100])} can't do that"
    if site in ("same-site", "cross-site"):  # whatever a proxy has made of Origin
        return refused
    if origin is None or (root.origin and origin.lower() == root.origin):
        return ""
    host = urlsplit(origin).netloc.lower()
    is_unencrypted = host == urlsplit(root.origin).netloc  # the proxy's, by another scheme
    return refused if host != request.host.lower() or is_unencrypted else ""


def _is_named(host: str, hosts: Collection[str]) -> bool:
    try:
        parts = urlsplit(f"//{host}")
        name, _ = parts.hostname or "", parts.port  # which fails if it is no number
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in hosts
    return True


def _cookie_name(request: web.Request, root: RootPath) -> str:
    # Browsers share cookies between all ports of a host, and send those of "/" to all paths, too: two servers on a
    # machine must not read or overwrite each other's.
    return f"dray-{urlsplit(f'//{request.host}').port or 80}{re.sub(r'[^a-zA-Z0-9%_-]', '.', root.path)}"
