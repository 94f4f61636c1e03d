"""Authentication: only holders of the server's token may use it.

Programs send the token as ``Authorization: Bearer``. A browser gets a cookie for it from ``/login?token=...``. Other
sites can make a browser send requests here, including that cookie if they are on the same host, so a request that
changes something needs more than the cookie: the header ``X-Dray``, which a foreign page can't send without permission,
and the server's own ``Origin``. A site whose name resolves to this machine (DNS rebinding) is refused by its name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from dray.private import is_loopback
from dray.serve.answers import refuse
from dray.serve.control import API

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SAFE = ("GET", "HEAD")  # methods that change nothing
HEADERS = {
    # Only scripts from this server, none inline; plotly sets styles on elements and draws images of figures.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
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


def guard(token: str, hosts: Collection[str]) -> Middleware:
    """A middleware that lets only authenticated requests through.

    Pages and their scripts contain no data, so they need no token; the API does. `hosts` are the server's names,
    without ports. IP addresses are always accepted, because no site can make its name look like an address.
    """
    assert token, "a server without a token is open to everybody on the machine"
    cookie = _cookie_value(token)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _is_named(request.host, hosts):
            return refuse(403, f"{request.host[:100]!r} is not a name of this server")
        resource = request.match_info.route.resource
        is_open = request.method in SAFE and resource is not None and not resource.canonical.startswith("/api/")
        if is_open:
            return await handler(request)
        given = request.headers.get("Authorization", "")
        if given:
            if _equal(given, f"Bearer {token}"):
                return await handler(request)
            return refuse(401, "the token is not this server's")
        if not _equal(request.cookies.get(_cookie_name(request), ""), cookie):
            return refuse(401, "a token is needed: open the address that dray serve has printed, or send it as Bearer")
        if request.method not in SAFE and (why := _may_be_forged(request)):
            return refuse(403, why)
        return await handler(request)

    return check


def login(token: str) -> web.RouteDef:
    """``GET /login?token=...``, which sets the browser's cookie and redirects to the page."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if not _equal(request.query.get("token", ""), token):
            return refuse(401, "the token is not this server's; dray serve --status prints the right address")
        found = web.Response(status=303, headers={"Location": "/"})
        found.set_cookie(_cookie_name(request), _cookie_value(token), httponly=True, samesite="Strict", path="/")
        return found

    return web.get("/login", handle)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add security headers; an aiohttp signal."""
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    if request.path.startswith(API):
        response.headers.setdefault("Cache-Control", "no-store")


def _may_be_forged(request: web.Request) -> str:
    """The reason why a request with a cookie may come from another site's page; "" if it can't."""
    if request.headers.get("X-Dray") != "1":
        return "a request by cookie needs the header X-Dray: 1"
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.host.lower():
        return f"a page of {origin[:100]!r} can't do that"
    return ""


def _is_named(host: str, hosts: Collection[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in hosts
    return True


def _cookie_name(request: web.Request) -> str:
    # Browsers share cookies between all ports of a host: two servers on a machine must not overwrite each other's.
    return f"dray-{urlsplit(f'//{request.host}').port or 80}"


def _cookie_value(token: str) -> str:
    # Not the token itself: the browser sends cookies to all servers on this host.
    return hmac.new(token.encode(), b"dray cookie", hashlib.sha256).hexdigest()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
