"""The server's HTTP side, put together: who may use it, the API, and the page."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from aiohttp import web

from dray.serve import api, auth, site, views
from dray.serve.answers import errors_as_json
from dray.serve.control import Control

MAX_BODY = 1 << 20
"""Most bytes of a request's body; code is read in pieces, and has its own limit, see `dray.code.archive`."""


def make_app(control: Control, results: Path, *, token: str, hosts: Collection[str]) -> web.Application:
    """The application that serves the API and the page.

    Args:
        control: does what the API asks for.
        results: the results directory, whose experiments are shown.
        token: that its users need; not empty.
        hosts: names that it goes by, see `dray.serve.auth.host_names`.
    """
    app = web.Application(client_max_size=MAX_BODY, middlewares=[errors_as_json, auth.guard(token, hosts)])
    app.on_response_prepare.append(auth.add_headers)
    app.add_routes([auth.login(token)])
    writing = api.Api(control, results)
    app.add_routes(writing.routes())
    app.on_shutdown.append(writing.end_polls)
    app.add_routes(views.routes(control, results))
    app.add_routes(site.routes())
    return app
