"""The server's static content: the page's files, which need no token, and the API's description."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from dray.serve.control import API

PAGE = Path(__file__).parent / "page"
FILES = {path.name: path for path in (*PAGE.iterdir(), *(PAGE / "lib").iterdir()) if path.is_file()}
OPENAPI = Path(__file__).with_name("openapi.json")
"""The OpenAPI 3.1 document, which docs/generate.py writes."""
KINDS = {
    ".json": "application/json",
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}


def routes(root: str) -> list[web.RouteDef]:
    """The routes of the page, its files, and the API's description. The files have relative addresses, or with `root`
    addresses below it, which are also right where the page's own address lacks the slash at its end."""
    text = (
        FILES["index.html"].read_text(encoding="utf-8").replace('"static/', f'"{root}/static/' if root else '"static/')
    )

    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, headers=_headers(".html"))

    return [
        *(web.get(path, page) for path in ("/", *([""] if root else ()))),
        web.get("/static/{file:[\\w-]+\\.(?:js|css|svg)}", _file),
        web.get("/static/lib/{file:[\\w-]+\\.(?:js|css)}", _file),
        web.get(f"{API}/openapi.json", openapi),
    ]


async def openapi(request: web.Request) -> web.StreamResponse:
    """This document"""
    return web.FileResponse(OPENAPI, headers=_headers(".json"))


async def _file(request: web.Request) -> web.StreamResponse:
    path = FILES.get(name := request.match_info["file"])
    if path is None:
        raise web.HTTPNotFound(text=f"the page has no file {name}")
    return web.FileResponse(path, headers=_headers(path.suffix))


def _headers(suffix: str) -> dict[str, str]:
    # Browsers ask each time: a new dray may have other files.
    return {"Cache-Control": "no-cache", "Content-Type": f"{KINDS[suffix]}; charset=utf-8"}
