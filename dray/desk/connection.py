"""How processes of a run call each other: over TCP. A call of an actor costs 0.4 ms of CPU, one here 0.06.

A message is a call, ``(number, method, *args)``, its answer, ``(number, value)`` or ``(number, None, error)`` with an
error as text, or what the listener sends unasked, ``(None, value)``. Answers come in any order; a call may wait for
hours. A call whose answer nobody needs has the number None. Nothing is read before the other side has proven that it
knows the key (`dray.desk.channel`), and nothing can name code to run (`dray.desk.wire`). Where Ray uses TLS
(``RAY_USE_TLS``), so does this, with the same certificates.

A client that loses its connection makes another one, where its session goes on: no message is lost, repeated or
reordered (`dray.desk.stream`). This module does not know Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dray.desk.channel import MAX_MESSAGE, Channel, Forged
from dray.desk.stream import END, Stream
from dray.desk.wire import Malformed, pack, unpack
from dray.private import is_loopback
from dray.text import one_line

log = logging.getLogger(__name__)

_OPTIONS = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 180_000}
"""Seconds, seconds, count, milliseconds: firewalls forget connections that are idle for longer, and a peer whose
machine is gone is noticed after three minutes."""
_ID = 16


class DeskUnreachable(ConnectionError):
    """There is no connection to the desk: it has ended, or its machine can't be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a process listens, and the key that its clients must know."""

    host: str
    port: int
    key: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long connections wait.

    Attributes:
        connect_s: how long a client tries to connect.
        reconnect_s: how long it tries again, after it has lost a connection.
        refused_s: the same while the machine answers that nobody listens: the process has ended.
        kept_s: how long a session without one is kept: longer, as an idle client may notice the loss a minute later.
        handshake_s: how long a connection may take to prove that it is a client's.
        max_unproven: the most connections that have not proven it yet; a new one ends the oldest.
    """

    connect_s: float = 30
    reconnect_s: float = 60
    refused_s: float = 5
    kept_s: float = 150
    handshake_s: float = 5
    max_unproven: int = 1024


LIMITS = Limits()


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


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        with contextlib.suppress(AttributeError, OSError):  # where there is no such option
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Side:
    """One side of a session, which outlives its connections."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.take, self.stream = take, Stream()
        self.channel: Channel | None = None
        self.is_ending = False

    def send(self, message: bytes) -> None:
        """Send a message, later if there is no connection."""
        parts = self.stream.send(message)
        if self.channel is not None:
            self.channel.send(*parts)

    def end(self) -> None:
        """Tell the other side that nothing more comes."""
        self.is_ending = True
        if self.channel is not None:
            self.channel.send(END)

    async def carry(self, channel: Channel, first: bytes) -> None:
        """Exchange messages until the other side ends the session.

        Args:
            channel: a new connection, in place of the one before.
            first: the first frame that has come there.

        Raises:
            OSError, EOFError: the connection is lost.
            Malformed: it is not one of ours that sends.
        """
        if self.channel is not None:
            self.channel.abort()
        self.channel = channel
        try:
            for parts in self.stream.resume(first):
                channel.send(*parts)
            if self.is_ending:
                channel.send(END)
            while (frame := await channel.receive()) != END:
                if self.channel is not channel:  # what has come of an old connection comes again
                    raise ConnectionAbortedError
                if message := self.stream.receive(frame):
                    self.take(unpack(message))
                if self.stream.owes_count:
                    channel.send(self.stream.count())
        except (OSError, EOFError):
            if self.channel is channel:
                self.channel = None
            raise


# ---------------------------------------------------------------------------------------------------------- listening
async def listen(
    take: Callable[[Call], None],
    host: str,
    *,
    lost: Callable[[Session], None] = lambda session: None,
    limits: Limits = LIMITS,
) -> Listener:
    """Take calls from now on, in the running loop.

    Args:
        take: called with each of them, once, those of a session in their order. If it raises `Malformed`, as for an
            unknown method, the session ends; if anything else, the call fails.
        host: this machine's name for the others. Of all its addresses connections are taken, unless it is a loopback
            address.
        lost: called when the client of a session has ended, or did not come back.
    """
    listener = Listener(take, lost, limits)
    await listener.start(host)
    return listener


class Listener:
    """Takes calls until it is closed; its clients are told then."""

    def __init__(self, take: Callable[[Call], None], lost: Callable[[Session], None], limits: Limits) -> None:
        self.take, self.lost, self.limits = take, lost, limits
        self.sessions: dict[bytes, Session] = {}
        self._unproven: dict[Channel, None] = {}  # oldest first
        self._key = secrets.token_bytes()

    async def start(self, host: str) -> None:
        encryption = tls(server=True)
        self._server = await asyncio.start_server(
            self._serve,
            host if is_loopback(host) else None,
            0,
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=4096,
            ssl=encryption,
            ssl_handshake_timeout=self.limits.handshake_s if encryption is not None else None,
        )
        self.endpoint = Endpoint(host=host, port=self._server.sockets[0].getsockname()[1], key=self._key)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._server.close()
        self.lost = lambda session: None
        for session in list(self.sessions.values()):
            session.end()
        for channel in self._unproven:
            channel.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All of one connection."""
        _keep_alive(writer)
        channel, session = Channel(reader, writer, self._key, "desk"), None
        try:
            await asyncio.wait_for(self._prove(channel), self.limits.handshake_s)
            hello = await channel.receive()
            session = self._session(hello[-_ID - 8 : -8], int.from_bytes(hello[-8:], "big"))
            if session is None:
                channel.send(END)
            else:
                channel.send(session.side.stream.count())
                await session.side.carry(channel, hello[: -_ID - 8])
                session.end()
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            if session is not None:
                if isinstance(error, Forged):
                    log.warning("ended a connection: %s", error)
                session.disconnected()
        except Malformed as error:
            log.warning("ended a session that sent what no client sends: %s", error)
            if session is not None:
                session.end()
        finally:
            channel.close()

    async def _prove(self, channel: Channel) -> None:
        self._unproven[channel] = None
        if len(self._unproven) > self.limits.max_unproven:
            next(iter(self._unproven)).abort()
        try:
            await channel.prove()
        finally:
            del self._unproven[channel]

    def _session(self, id: bytes, attempt: int) -> Session | None:
        """That of a client's new connection."""
        session = self.sessions.get(id)
        if session is None and attempt == 0:
            session = self.sessions[id] = Session(id, self)
        if session is not None:
            session.connected(attempt)
        return session


class Session:
    """A client, as the listener sees it; also while it has no connection.

    Attributes:
        id: of this client alone.
    """

    def __init__(self, id: bytes, listener: Listener) -> None:
        self.id, self._listener, self._attempt = id, listener, -1
        self.side, self._is_over = _Side(self._take), False
        self._timer: asyncio.TimerHandle | None = None

    def push(self, value: Any) -> None:
        """Send a value without a call."""
        self.send(_packed(None, value))

    def send(self, message: bytes) -> None:
        if not self._is_over:
            self.side.send(message)

    def end(self) -> None:
        """Tell the client that the session is over. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._stop_timer()
            self.side.end()
            if self.side.channel is not None:
                self.side.channel.close()
                self.side.channel = None
            del self._listener.sessions[self.id]
            self._listener.lost(self)

    def connected(self, attempt: int) -> None:
        if attempt <= self._attempt:
            raise ConnectionAbortedError("overtaken by a later one")
        self._attempt = attempt
        self._stop_timer()

    def disconnected(self) -> None:
        if self.side.channel is None and not self._is_over:
            self._timer = asyncio.get_running_loop().call_later(self._listener.limits.kept_s, self.end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _take(self, message: Any) -> None:
        match message:
            case (int() | None as number, str() as method, *args):
                call = Call(number, method, tuple(args), self)
            case _:
                raise Malformed("it is no call")
        try:
            self._listener.take(call)
        except Malformed:
            raise
        except Exception as error:
            log.exception("a call of %s failed", method)
            call.fail(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a client has made; to be answered once, in the loop, then or later."""

    _number: int | None
    method: str
    args: tuple[Any, ...]
    session: Session

    @property
    def wants_answer(self) -> bool:
        """Whether the client waits for it."""
        return self._number is not None

    def answer(self, value: Any = None) -> None:
        """Answer it, if the client wants that."""
        if self._number is not None:
            try:
                self.session.send(_packed(self._number, value))
            except (TypeError, ValueError, OverflowError) as error:
                log.exception("a call of %s failed", self.method)
                self.fail(f"{type(error).__name__}: {error}")

    def fail(self, error: str) -> None:
        """Make it fail at the client, if that wants to know."""
        if self._number is not None:
            self.session.send(_packed(self._number, None, error))


# ------------------------------------------------------------------------------------------------------------ calling
class Connection:
    """What listens at an endpoint, as its clients see it: each method is one of this object, and returns a future.

    For any thread. Calls of one thread begin in their order, also those by `tell`.

    Args:
        endpoint: where it listens.
        on_push: called, in the connection's thread, with each value that it pushes.

    Raises:
        DeskUnreachable: no connection within half a minute.
    """

    def __init__(
        self, endpoint: Endpoint, *, on_push: Callable[[Any], None] = lambda value: None, limits: Limits = LIMITS
    ) -> None:
        self._endpoint, self._on_push, self._limits = endpoint, on_push, limits
        self._numbers, self._is_closed = itertools.count(), False
        self._posted: deque[tuple[int | None, Future[Any] | None, bytes]] = deque()
        self._is_posting = False
        self._awaited: dict[int, Future[Any]] = {}
        self._is_over = False
        self._side, self._id = _Side(self._take), secrets.token_bytes(_ID)
        self._loop = asyncio.new_event_loop()
        opened: Future[None] = Future()
        threading.Thread(target=self._run, args=(opened,), name="dray-desk", daemon=True).start()
        try:
            opened.result()
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            why = (
                os.strerror(error.errno)
                if isinstance(error, OSError) and error.errno
                else one_line(error) or "no answer"
            )
            if not isinstance(error, Forged):
                why += "; between the nodes of a Ray cluster all TCP ports must be open"
            raise DeskUnreachable(f"can't connect to the experiment's desk at {endpoint}: {why}") from None

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self.call(method, *args)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method."""
        answer: Future[Any] = Future()
        if self._is_closed:
            answer.set_exception(DeskUnreachable(f"the connection to the desk at {self._endpoint} is closed"))
        else:
            number = next(self._numbers)
            self._post(number, answer, _packed(number, method, *args))
        return answer

    def tell(self, method: str, *args: Any) -> None:
        """Call a method whose answer nobody needs, which saves half of its cost; if it fails, the desk logs it."""
        if not self._is_closed:
            self._post(None, None, _packed(None, method, *args))

    def close(self) -> None:
        """End the session, once all calls so far have been sent; what has not been answered fails. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._post(None, None, b"")

    def _post(self, number: int | None, answer: Future[Any] | None, message: bytes) -> None:
        self._posted.append((number, answer, message))
        if not self._is_posting:  # waking the thread costs more than all else: once for several calls
            self._is_posting = True
            self._loop.call_soon_threadsafe(self._send_posted)

    # ------------------------------------------------------------------ in its own thread
    def _send_posted(self) -> None:
        self._is_posting = False  # first: what is posted from now on wakes this thread again
        for _ in range(len(self._posted)):
            number, answer, message = self._posted.popleft()
            if not message:
                self._fail_awaited()
                self._side.end()
                self._closing.set()
            elif self._is_over:
                if answer is not None:
                    answer.set_exception(self._error())
            else:
                if number is not None and answer is not None:
                    self._awaited[number] = answer
                self._side.send(message)

    def _run(self, opened: Future[None]) -> None:
        self._loop.run_until_complete(self._live(opened))
        self._loop.close()

    async def _live(self, opened: Future[None]) -> None:
        self._closing = asyncio.Event()
        deadline = lost_at = pause_s = 0.0
        for attempt in itertools.count():
            try:
                channel, first = await asyncio.wait_for(self._connect(attempt), self._limits.connect_s)
            except (OSError, EOFError, asyncio.TimeoutError) as error:
                if attempt == 0:
                    return opened.set_exception(error)
                if isinstance(error, ConnectionRefusedError):
                    deadline = min(deadline, lost_at + self._limits.refused_s)
                if isinstance(error, (Forged, DeskUnreachable)) or self._loop.time() > deadline:
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1)
                continue
            if attempt == 0:
                opened.set_result(None)
            try:
                await self._side.carry(channel, first)
                break
            except (OSError, EOFError):
                lost_at, pause_s = self._loop.time(), 0.05
                deadline = lost_at + self._limits.reconnect_s
            except Malformed as error:
                log.warning("ended the connection to %s, which sent what no desk sends: %s", self._endpoint, error)
                break
            finally:
                channel.close()
        self._is_over = True
        self._fail_awaited()
        await self._closing.wait()

    async def _connect(self, attempt: int) -> tuple[Channel, bytes]:
        reader, writer = await asyncio.open_connection(self._endpoint.host, self._endpoint.port, ssl=tls(server=False))
        channel = Channel(reader, writer, self._endpoint.key, "client")
        try:
            _keep_alive(writer)
            await channel.prove()
            channel.send(self._side.stream.count(), self._id, attempt.to_bytes(8, "big"))
            if (first := await channel.receive()) == END:
                raise DeskUnreachable("it does not know this session")
            return channel, first
        except BaseException:
            channel.abort()
            raise

    def _take(self, message: Any) -> None:
        match message:
            case (None, value):
                try:
                    self._on_push(value)
                except Exception:
                    log.exception("a message of the desk failed")
            case (int() as number, value, *error):
                answer = self._awaited.pop(number, None)
                if answer is None or not answer.set_running_or_notify_cancel():
                    return
                if error:
                    answer.set_exception(RuntimeError(f"the experiment's desk failed: {error[0]}"))
                else:
                    answer.set_result(value)
            case _:
                raise Malformed("it is no answer")

    def _fail_awaited(self) -> None:
        for answer in self._awaited.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(self._error())
        self._awaited.clear()

    def _error(self) -> DeskUnreachable:
        return DeskUnreachable(f"lost the connection to the experiment's desk at {self._endpoint}")


def _packed(*content: Any) -> bytes:
    message = pack(content)
    if len(message) > MAX_MESSAGE - len(END):
        raise ValueError(f"a message of {len(message):,} bytes is too large for the desk: at most {MAX_MESSAGE:,}")
    return message
