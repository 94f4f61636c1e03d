"""How workers and drivers call the desk for every trial: over TCP. A call of an actor costs it 0.4 ms of CPU, one here
0.06.

A message is a pickle: of a call, ``(number, method, args, kwargs)``, or of its answer, ``(number, value, error)``, an
error as text. Answers come in any order; a call may wait for hours. A call whose answer nobody needs has the number
None. Neither side unpickles anything before the other one has proven that it knows the desk's key, which clients get
from Ray; see `dray.desk.channel`. Where Ray uses TLS (``RAY_USE_TLS``), so does this, with the same certificates.

This module does not know Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import secrets
import socket
import ssl
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from dray.desk.channel import MAX_MESSAGE, Channel, Forged, Role
from dray.private import is_loopback
from dray.text import one_line

log = logging.getLogger(__name__)

CONNECT_S = 30.0
"""How long a client tries to connect."""
HANDSHAKE_S = 5.0
"""How long a connection may take to prove that it is a client's."""
MAX_UNPROVEN = 1024
"""The most connections that have not proven it yet; a new one ends the oldest."""
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}
"""Seconds, seconds, count: firewalls forget connections that are idle for longer, and a peer whose machine is gone is
noticed after three minutes."""


class DeskUnreachable(ConnectionError):
    """There is no connection to the desk: it has ended, or its machine can't be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a desk listens, and the key that its clients must know."""

    host: str
    port: int
    key: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


async def listen(desk: object, host: str) -> Endpoint:
    """Take calls of the public coroutines of this object from now on, in the running loop.

    Args:
        host: this machine's name for the others. Of all its addresses connections are taken, unless it is a loopback
            address.
    """
    key = secrets.token_bytes()
    unproven: dict[_Caller, None] = {}
    encryption = tls(server=True)
    server = await asyncio.get_running_loop().create_server(
        lambda: _Caller(desk, key, unproven),
        host if is_loopback(host) else None,
        0,
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=4096,
        ssl=encryption,
        ssl_handshake_timeout=HANDSHAKE_S if encryption is not None else None,
    )
    return Endpoint(host=host, port=server.sockets[0].getsockname()[1], key=key)


def tls(*, server: bool) -> ssl.SSLContext | None:
    """How to encrypt what is sent, by Ray's variables; None if Ray does not."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname = False  # certificates of nodes are often made without their addresses; Ray does not either
    context.verify_mode = ssl.CERT_REQUIRED
    return context


class DeskConnection:
    """The desk, as its clients see it: each method of `Desk` is one of this object, and returns a future.

    For any thread. Calls of one thread begin in their order, also those by `tell`.

    Args:
        endpoint: of the desk.

    Raises:
        DeskUnreachable: no connection within half a minute.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._numbers, self._is_closed = endpoint, itertools.count(), False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="dray-desk", daemon=True).start()
        try:
            self._answers = asyncio.run_coroutine_threadsafe(self._open(endpoint), self._loop).result()
        except OSError as error:
            self._loop.call_soon_threadsafe(self._loop.stop)
            why = os.strerror(error.errno) if error.errno else one_line(error) or "no answer"
            if not isinstance(error, Forged):
                why += "; between the nodes of a Ray cluster all TCP ports must be open"
            raise DeskUnreachable(f"can't connect to the experiment's desk at {endpoint}: {why}") from None

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> Future[Any]:
            answer: Future[Any] = Future()
            number = next(self._numbers)
            if self._is_closed:
                answer.set_exception(DeskUnreachable(f"the connection to the desk at {self._endpoint} is closed"))
            else:
                message = _pickled((number, method, args, kwargs))
                self._loop.call_soon_threadsafe(self._answers.ask, number, answer, message)
            return answer

        return call

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method whose answer nobody needs, which saves half of its cost; if it fails, the desk logs it."""
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._answers.tell, _pickled((None, method, args, kwargs)))

    def close(self) -> None:
        """End the connection, once all calls so far have been sent; what has not been answered fails. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._answers.close)

    async def _open(self, endpoint: Endpoint) -> _Answers:
        async with asyncio.timeout(CONNECT_S):
            transport, answers = await self._loop.create_connection(
                lambda: _Answers(endpoint), endpoint.host, endpoint.port, ssl=tls(server=False)
            )
            try:
                await answers.trusted
            except BaseException:
                transport.abort()
                raise
        return answers


class _Messages(asyncio.Protocol):
    """One side of a connection: hands over the messages of the other one, once that is known to have the key."""

    def __init__(self, key: bytes, role: Role) -> None:
        self.channel = Channel(key, role)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            with contextlib.suppress(AttributeError, OSError):  # where there is no such option
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

        self.transport.write(self.channel.hello)

    def data_received(self, data: bytes) -> None:
        was_proven = self.channel.is_proven
        try:
            answer, messages = self.channel.receive(data)
        except Forged as error:
            self.refused(error)
            self.transport.abort()
            return
        if answer:
            self.transport.write(answer)
        if self.channel.is_proven and not was_proven:
            self.proven()
        for message in messages:
            self.received(*pickle.loads(message))

    def proven(self) -> None:
        """The other side has proven that it knows the key."""
        raise NotImplementedError

    def refused(self, error: Forged) -> None:
        """The other side does not know the key; the connection ends."""

    def received(self, number: int | None, *content: Any) -> None:
        """A message has come."""
        raise NotImplementedError


class _Caller(_Messages):
    """The desk's side of a connection.

    Args:
        unproven: all such connections that have not proven yet that they are a client's, oldest first.
    """

    def __init__(self, desk: object, key: bytes, unproven: dict[_Caller, None]) -> None:
        super().__init__(key, "desk")
        self._desk, self._unproven = desk, unproven
        self._calls: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.transport.abort)
        self._unproven[self] = None
        if len(self._unproven) > MAX_UNPROVEN:
            oldest = next(iter(self._unproven))
            oldest.leave_unproven()
            oldest.transport.abort()

    def leave_unproven(self) -> None:
        """It has proven that it is a client's, or it ends."""
        self._timer.cancel()
        self._unproven.pop(self, None)

    proven = leave_unproven

    def connection_lost(self, error: Exception | None) -> None:
        self.leave_unproven()

    def received(self, number: int | None, *content: Any) -> None:
        # Not cancelled if the caller dies: what it has reported counts.
        call = asyncio.ensure_future(self._answer(number, *content))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, number: int | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            value = await getattr(self._desk, method)(*args, **kwargs)
            answer = b"" if number is None else _pickled((number, value, None))
        except Exception as error:
            log.exception("a call of the desk's %s failed", method)
            answer = b"" if number is None else _pickled((number, None, f"{type(error).__name__}: {error}"))
        if answer and not self.transport.is_closing():
            self.transport.write(self.channel.seal(answer))


class _Answers(_Messages):
    """A client's side of a connection; all in its loop's thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint.key, "client")
        self._endpoint = endpoint
        self._awaited: dict[int, Future[Any]] = {}
        self.trusted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def proven(self) -> None:
        self.trusted.set_result(None)

    def refused(self, error: Forged) -> None:
        if not self.trusted.done():
            self.trusted.set_exception(error)

    def tell(self, message: bytes) -> None:
        """Send a call that is not answered."""
        if not self.transport.is_closing():
            self.transport.write(self.channel.seal(message))

    def ask(self, number: int, answer: Future[Any], message: bytes) -> None:
        """Send a call."""
        if self.transport.is_closing():
            return answer.set_exception(self._error())
        self._awaited[number] = answer
        self.transport.write(self.channel.seal(message))

    def close(self) -> None:
        """End the connection once all is sent, then the loop."""
        self.transport.close()
        self._lost.add_done_callback(lambda lost: lost.get_loop().stop())

    def received(self, number: int | None, *content: Any) -> None:
        assert number is not None
        value, error = content
        answer = self._awaited.pop(number)
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(RuntimeError(f"the experiment's desk failed: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.trusted.done():
            self.trusted.set_exception(error or ConnectionResetError("it was closed"))
        for answer in self._awaited.values():
            answer.set_exception(self._error())
        self._awaited.clear()
        self._lost.set_result(None)

    def _error(self) -> DeskUnreachable:
        return DeskUnreachable(f"lost the connection to the experiment's desk at {self._endpoint}")


def _pickled(content: tuple[Any, ...]) -> bytes:
    message = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    if len(message) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(message):,} bytes is too large for the desk: at most {MAX_MESSAGE:,}")
    return message
