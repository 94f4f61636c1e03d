"""How workers and drivers call the desk for every trial: over TCP. A call of an actor costs it 0.4 ms of CPU, one here
0.06.

A frame is its length, in four bytes, and a pickle: of a call, ``(number, method, args, kwargs)``, or of its answer,
``(number, value, error)``, an error as text. Answers come in any order; a call may wait for hours. One whose answer
nobody needs has the number None. Nothing is unpickled of a client that has not proven that it knows the desk's key,
which it has from Ray: the desk begins with a nonce, and the client answers with its HMAC. Where Ray uses TLS
(``RAY_USE_TLS``), so does this, with the same certificates.

This module does not know Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
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

from dray.text import one_line

log = logging.getLogger(__name__)

CONNECT_S = 30.0
"""How long to try to connect."""
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6}
"""Seconds, seconds, count: firewalls forget connections that are idle for longer, and a peer whose machine is gone is
noticed after three minutes."""
_NONCE = 32
_LENGTH = 4


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
    interface = host if host == "localhost" or host.startswith("127.") or host == "::1" else None
    server = await asyncio.get_running_loop().create_server(
        lambda: _Caller(desk, key), interface, 0, family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=4096, ssl=tls(server=True),
    )  # fmt: skip
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
            raise DeskUnreachable(
                f"can't connect to the experiment's desk at {endpoint}: {why}; between the nodes of a Ray cluster all "
                "TCP ports must be open"
            ) from None

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
                frame = _frame((number, method, args, kwargs))
                self._loop.call_soon_threadsafe(self._answers.ask, number, answer, frame)
            return answer

        return call

    def tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method whose answer nobody needs, which saves half of its cost; if it fails, the desk logs it."""
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._answers.tell, _frame((None, method, args, kwargs)))

    def close(self) -> None:
        """End the connection, once all calls so far have been sent; what has not been answered fails. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._answers.close)

    async def _open(self, endpoint: Endpoint) -> _Answers:
        async with asyncio.timeout(CONNECT_S):
            _, answers = await self._loop.create_connection(
                lambda: _Answers(endpoint), endpoint.host, endpoint.port, ssl=tls(server=False)
            )
            await answers.trusted
        return answers


class _Frames(asyncio.Protocol):
    """Takes the bytes of one side of a connection apart: a nonce, or the answer to it, then frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._proven = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            with contextlib.suppress(AttributeError, OSError):  # where there is no such option
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        if not self._proven:
            if len(self._bytes) < _NONCE:
                return
            self._proven = self.proves(bytes(self._bytes[:_NONCE]))
            del self._bytes[:_NONCE]
        while self._proven and len(self._bytes) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._bytes[:_LENGTH], "big")
            if len(self._bytes) < end:
                return
            frame = pickle.loads(self._bytes[_LENGTH:end])
            del self._bytes[:end]
            self.received(*frame)

    def proves(self, first: bytes) -> bool:
        """Whether these first bytes allow to go on."""
        raise NotImplementedError

    def received(self, number: int | None, *frame: Any) -> None:
        """A frame has come."""
        raise NotImplementedError


class _Caller(_Frames):
    """The desk's side of a connection."""

    def __init__(self, desk: object, key: bytes) -> None:
        super().__init__()
        self._desk, self._key, self._nonce = desk, key, secrets.token_bytes(_NONCE)
        self._calls: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(self._nonce)

    def proves(self, first: bytes) -> bool:
        if hmac.compare_digest(first, hmac.digest(self._key, self._nonce, "sha256")):
            return True
        self.transport.abort()
        return False

    def received(self, number: int | None, *frame: Any) -> None:
        # Not cancelled if the caller dies: what it has reported counts.
        call = asyncio.ensure_future(self._answer(number, *frame))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _answer(self, number: int | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            value = await getattr(self._desk, method)(*args, **kwargs)
            answer = b"" if number is None else _frame((number, value, None))
        except Exception as error:
            log.exception("a call of the desk's %s failed", method)
            answer = b"" if number is None else _frame((number, None, f"{type(error).__name__}: {error}"))
        if answer and not self.transport.is_closing():
            self.transport.write(answer)


class _Answers(_Frames):
    """A client's side of a connection; all in its loop's thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._awaited: dict[int, Future[Any]] = {}
        self.trusted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def proves(self, first: bytes) -> bool:
        self.transport.write(hmac.digest(self._endpoint.key, first, "sha256"))
        self.trusted.set_result(None)
        return True

    def tell(self, frame: bytes) -> None:
        """Send a call that is not answered."""
        if not self.transport.is_closing():
            self.transport.write(frame)

    def ask(self, number: int, answer: Future[Any], frame: bytes) -> None:
        """Send a call."""
        if self.transport.is_closing():
            return answer.set_exception(self._error())
        self._awaited[number] = answer
        self.transport.write(frame)

    def close(self) -> None:
        """End the connection once all is sent, then the loop."""
        self.transport.close()
        self._lost.add_done_callback(lambda lost: lost.get_loop().stop())

    def received(self, number: int | None, *frame: Any) -> None:
        assert number is not None
        value, error = frame
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


def _frame(content: tuple[Any, ...]) -> bytes:
    pickled = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return len(pickled).to_bytes(_LENGTH, "big") + pickled
