"""``GET /api/v1/openapi.json``: the API, described for programs, in ``openapi.yaml`` beside this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from dray.serve.answers import answer
from dray.serve.messages import API


def route() -> web.RouteDef:
    """The route, for an application."""
    return web.get(f"{API}/openapi.json", _answer)


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("openapi.yaml").read_text(encoding="utf-8"))
    return found


async def _answer(request: web.Request) -> web.StreamResponse:
    return answer(document())
