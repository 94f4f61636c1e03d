"""The server's HTTP application: authentication, the API and the page; and the thread that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from aiohttp import web
from aiohttp.http import HttpProcessingError

from dray.errors import ExperimentError
from dray.serve import api, auth, site, views
from dray.serve.answers import errors_as_json
from dray.serve.control import Control
from dray.serve.root_path import RootPath
from dray.serve.tokens import Tokens

MAX_BODY = 1 << 20
"""Limit of a request's body in bytes; code is streamed, and has its own limit, see `dray.code.archive`."""
PORT = 8600  # the first port to try, by default
PORTS = 20  # the number of ports to try, beginning with the given one
AT_ROOT = RootPath()
REQUEST_S = 20.0  # how long a connection may take to send the headers of each request


def make_app(
    control: Control, results: Path, *, tokens: Tokens, hosts: Collection[str], root: RootPath = AT_ROOT
) -> web.Application:
    """The application that serves the API and the page, at "/" and below `root`. `hosts` are the server's names, from
    `dray.serve.auth.host_names`."""
    guard = auth.guard(tokens, hosts, lambda name: control.experiment(name).owner, root)
    app = web.Application(client_max_size=MAX_BODY, middlewares=[errors_as_json, guard])
    app.on_response_prepare.append(auth.add_headers)
    writing = api.Api(control, results, tokens)
    app.on_shutdown.append(writing.end_polls)
    app.on_cleanup.append(writing.close)
    routes = [*auth.login(tokens, root), *writing.routes(), *views.routes(control, results), *site.routes(root.path)]
    app.add_routes(routes)
    if root.path:
        app.add_routes(web.RouteDef(each.method, root.path + each.path, each.handler, each.kwargs) for each in routes)
    return app


@contextlib.contextmanager
def listening(
    control: Control, results: Path, host: str, port: int, tokens: Tokens, root: RootPath = AT_ROOT
) -> Iterator[str]:
    """Answer HTTP requests in a thread within the block, and yield the URL. It is an `ExperimentError` if no port is
    free or this machine has no such host."""
    loop = asyncio.new_event_loop()
    logging.getLogger("aiohttp.server").addFilter(_is_fault)
    runner = web.AppRunner(
        make_app(control, results, tokens=tokens, hosts=auth.host_names(host) | root.hosts, root=root),
        handle_signals=False,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=REQUEST_S,
    )
    try:
        chosen = loop.run_until_complete(_listen(runner, host, port))
        thread = threading.Thread(target=loop.run_forever, name="dray-http", daemon=True)
        thread.start()
        try:
            yield f"http://{_shown(host)}:{chosen}{root.path}"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
    finally:
        loop.run_until_complete(runner.cleanup())
        loop.run_until_complete(_cancel_all())  # requests that wait for another process, say
        loop.close()


def _is_fault(record: logging.LogRecord) -> bool:
    """Whether a record of aiohttp is about more than a request that is no HTTP, or too long: its client is told."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _shown(host: str) -> str:
    """The host of the server's URL."""
    if host in ("0.0.0.0", "::", ""):  # all addresses of this machine
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


async def _listen(runner: web.AppRunner, host: str, port: int) -> int:
    await runner.setup()
    for tried in range(port, min(port + PORTS, 2**16)):
        try:
            await web.TCPSite(runner, host, tried).start()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ExperimentError(f"can't listen at {host}: {error}; give another --host") from None
        else:
            return tried
    raise ExperimentError(f"no port is free from {port} to {port + PORTS - 1}; give another with --port")
