"""The server's static content: the page's files, which need no token, and the API's description."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from dray.report.page import PLOTS
from dray.serve.answers import answer
from dray.serve.control import API

PAGE = Path(__file__).parent / "page"
FILES = {path.name: path for path in (PLOTS, *PAGE.iterdir(), *(PAGE / "lib").iterdir()) if path.is_file()}
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def routes() -> list[web.RouteDef]:
    """The routes of the page, its files, and the API's description."""
    return [
        web.get("/", _file),
        web.get("/static/{file:[\\w-]+\\.(?:js|css|svg)}", _file),
        web.get("/static/lib/{file:[\\w-]+\\.(?:js|css)}", _file),
        web.get(f"{API}/openapi.json", _openapi),
    ]


@cache
def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document, from ``openapi.yaml`` beside this file."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("openapi.yaml").read_text(encoding="utf-8"))
    return found


async def _openapi(request: web.Request) -> web.StreamResponse:
    return answer(openapi())


async def _file(request: web.Request) -> web.StreamResponse:
    path = FILES.get(name := request.match_info.get("file", "index.html"))
    if path is None:
        raise web.HTTPNotFound(text=f"the page has no file {name}")
    # Browsers ask each time: a new dray may have other files.
    headers = {"Cache-Control": "no-cache", "Content-Type": f"{KINDS[path.suffix]}; charset=utf-8"}
    return web.FileResponse(path, headers=headers)
