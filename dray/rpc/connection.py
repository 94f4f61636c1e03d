"""Calls between the processes of a run, over TCP, or a Unix socket within a machine.

An actor call costs 0.4 ms of CPU time, one here 0.06.

A message is a call, ``(number, method, *args)``; its answer, ``(number, value)`` or ``(number, None, error)`` with the
error as text; or a value that the listener pushes, ``(None, value)``. Answers come in any order; a call may wait for
hours. A call without an answer has the number None. Nothing is read before the other side has proven that it knows the
key (`dray.rpc.channel`), and no message can name code to run (`dray.rpc.wire`). If Ray uses TLS (``RAY_USE_TLS``), so
does this module, with the same certificates.

A client that loses its connection makes another one, on which its session continues: no message is lost, repeated or
reordered (`dray.rpc.stream`). This module does not use Ray.
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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dray.private import is_loopback
from dray.rpc.calls import PeerUnreachable
from dray.rpc.channel import MAX_MESSAGE, Channel, Forged, Role
from dray.rpc.stream import END, Stream
from dray.rpc.wire import Malformed, pack, unpack, wire
from dray.text import one_line

log = logging.getLogger(__name__)

_OPTIONS = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 180_000}
"""In seconds, seconds, count, milliseconds: firewalls drop connections that are idle for longer, and the loss of a
peer's machine is detected after three minutes."""
_ID = 16


class ConnectionLost(PeerUnreachable):
    """The connection to the desk was lost for good."""


@wire
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address at which a process listens, and the key that its clients must know.

    Attributes:
        host: a machine's name; or the path of a Unix socket, which begins with a slash.
        port: 0 for a Unix socket.
    """

    host: str
    port: int
    key: bytes = field(repr=False)

    @property
    def is_unix(self) -> bool:
        return self.host.startswith("/")

    def __str__(self) -> str:
        return self.host if self.is_unix else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Timeouts and limits of clients and listeners."""

    connect_s: float = 30  # to connect
    reconnect_s: float = 60  # to reconnect after a loss
    refused_s: float = 5  # to reconnect while the machine refuses connections, as the process has ended
    kept_s: float = 150  # for a client to come back; it may notice the loss a minute later than the listener
    handshake_s: float = 5  # for a new connection to prove that it knows the key
    max_unproven: int = 1024  # connections that have not proven it yet; a new one ends the oldest


LIMITS = Limits()


def tls(*, server: bool) -> ssl.SSLContext | None:
    """The TLS context from Ray's environment variables; None if Ray does not use TLS."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname = False  # as in Ray: certificates of nodes often lack their addresses
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _opened(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, role: Role) -> Channel:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        with contextlib.suppress(AttributeError, OSError):  # the option does not exist on this system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Channel(reader, writer, key, role)


async def _carry(stream: Stream, channel: Channel, first: bytes, take: Callable[[Any], None]) -> None:
    """Exchange a session's messages over a new connection, until the other side ends the session. Raises `OSError`
    if the connection is lost, and `Malformed` for data that dray does not send."""
    stream.resume(channel, first)
    try:
        while (frame := await channel.receive()) != END:
            if stream.channel is not channel:  # there is a newer connection, on which this message comes again
                raise ConnectionAbortedError
            if message := stream.receive(frame):
                take(unpack(message))
    except OSError:
        if stream.channel is channel:
            stream.channel = None
        raise


def _packed(*content: Any) -> bytes:
    message = pack(content)
    if len(message) > MAX_MESSAGE - len(END):
        raise ValueError(f"a message of {len(message):,} bytes is too large: at most {MAX_MESSAGE:,}")
    return message


# ---------------------------------------------------------------------------------------------------------- listening
async def listen(
    take: Callable[[Call], None],
    host: str,
    *,
    lost: Callable[[Session], None] = lambda session: None,
    limits: Limits = LIMITS,
) -> Listener:
    """Start accepting calls in the running event loop.

    Args:
        take: called with each call, once, and in order within a session. `Malformed`, as for an unknown method, ends
            the session; any other exception fails the call.
        host: this machine's name for other machines. Connections to all addresses of the machine are accepted, unless
            this is a loopback address. Or the path of a Unix socket, which is created.
        lost: called when the client of a session has ended, or has not come back.
    """
    listener = Listener(take, lost, limits)
    listener.endpoint = Endpoint(host=host, port=0, key=listener.key)
    if listener.endpoint.is_unix:
        listener.server = await asyncio.start_unix_server(listener.serve, host)
        return listener
    encryption = tls(server=True)
    listener.server = await asyncio.start_server(
        listener.serve,
        host if is_loopback(host) else None,
        0,
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=4096,
        ssl=encryption,
        ssl_handshake_timeout=limits.handshake_s if encryption is not None else None,
    )
    listener.endpoint = replace(listener.endpoint, port=listener.server.sockets[0].getsockname()[1])
    return listener


class Listener:
    """Accepts calls at an endpoint; see `listen`."""

    server: asyncio.Server
    endpoint: Endpoint

    def __init__(self, take: Callable[[Call], None], lost: Callable[[Session], None], limits: Limits) -> None:
        self.take, self.lost, self.key, self._limits = take, lost, secrets.token_bytes(), limits
        self.sessions: dict[bytes, Session] = {}
        self._unproven: dict[Channel, None] = {}  # oldest first

    def close(self) -> None:
        """End all sessions; their clients learn it at once. Idempotent."""
        self.server.close()
        self.lost = lambda session: None
        for session in list(self.sessions.values()):
            session.end()
        for channel in self._unproven:
            channel.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection to its end; afterwards the session waits for another connection."""
        channel = _opened(reader, writer, self.key, "desk")
        session = None
        try:
            await asyncio.wait_for(self._prove(channel), self._limits.handshake_s)
            hello = await channel.receive()
            first, id, attempt = hello[: -_ID - 8], hello[-_ID - 8 : -8], int.from_bytes(hello[-8:], "big")
            if id not in self.sessions and attempt > 0:
                return channel.send(END)
            session = self.sessions.setdefault(id, Session(id, self))
            if attempt <= session.attempt:
                raise ConnectionAbortedError("a later connection was faster")
            session.attempt = attempt
            channel.send(session.stream.count())
            await _carry(session.stream, channel, first, session.take)
            session.end()
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError) as error:  # Python 3.11 logs the last one
            if session is not None:
                if isinstance(error, Forged):
                    log.warning("ended a connection: %s", error)
                asyncio.get_running_loop().call_later(self._limits.kept_s, session.expire, attempt)
        except Malformed as error:
            log.warning("ended a session that sent what no client sends: %s", error)
            if session is not None:
                session.end()
        finally:
            channel.close()

    async def _prove(self, channel: Channel) -> None:
        self._unproven[channel] = None
        if len(self._unproven) > self._limits.max_unproven:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]  # at once, so that each of many new connections ends a different one
            oldest.abort()
        try:
            await channel.prove()
        finally:
            self._unproven.pop(channel, None)


class Session:
    """The listener's view of a client, with or without a connection. `attempt`: the number of its latest
    connection."""

    def __init__(self, id: bytes, listener: Listener) -> None:
        self.id, self.attempt, self.stream, self._listener = id, -1, Stream(), listener

    def push(self, value: Any) -> None:
        """Send a value without a call."""
        self.stream.send(_packed(None, value))

    def end(self) -> None:
        """Tell the client that the session is over. Idempotent."""
        if not self.stream.is_ending:
            self.stream.end()
            if self.stream.channel is not None:
                self.stream.channel.close()
            self.stream.channel = None
            del self._listener.sessions[self.id]
            self._listener.lost(self)

    def expire(self, attempt: int) -> None:
        """End the session unless the client has reconnected."""
        if attempt == self.attempt:
            self.end()

    def take(self, message: Any) -> None:
        """Handle a message of the client."""
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
    """A client's call. Answer it once, in the event loop, at once or later."""

    _number: int | None
    method: str
    args: tuple[Any, ...]
    session: Session

    def answer(self, value: Any = None) -> None:
        """Send the answer, if the client waits for one."""
        try:
            self._reply(value)
        except (TypeError, ValueError, OverflowError) as error:
            log.exception("a call of %s failed", self.method)
            self.fail(f"{type(error).__name__}: {error}")

    def fail(self, error: str) -> None:
        """Let the call raise an error in the client, if the client waits for an answer."""
        self._reply(None, error)

    def _reply(self, *content: Any) -> None:
        if self._number is not None:
            self.session.stream.send(_packed(self._number, *content))


# ------------------------------------------------------------------------------------------------------------ calling
class Connection:
    """A client's connection to a listener. The listener's methods are methods of this object that return futures.

    Thread-safe. The calls of one thread begin in order, including those by `tell`. `on_push` is called in the
    connection's thread with each value that the listener pushes.

    Raises:
        PeerUnreachable: no connection was established: it was refused, was closed at once, or took half a minute.
    """

    def __init__(
        self, endpoint: Endpoint, *, on_push: Callable[[Any], None] = lambda value: None, limits: Limits = LIMITS
    ) -> None:
        self._endpoint, self._on_push, self._limits = endpoint, on_push, limits
        self._encryption, self._numbers, self._is_closed = tls(server=False), itertools.count(), False
        self._posted: deque[Callable[[], None]] = deque()
        self._is_posting = False
        # In the thread alone:
        self._id, self._stream = secrets.token_bytes(_ID), Stream()
        self._awaited: dict[int, Future[Any]] = {}
        self._loop = asyncio.new_event_loop()
        opened: Future[None] = Future()
        threading.Thread(target=self._run, args=(opened,), name="dray-connection", daemon=True).start()
        try:
            opened.result()
        except (OSError, asyncio.TimeoutError) as error:
            errno = getattr(error, "errno", None)
            why = os.strerror(errno) if errno else one_line(error) or "no answer"
            if not isinstance(error, Forged):
                why += "; between the nodes of a Ray cluster all TCP ports must be open"
            raise PeerUnreachable(f"can't connect to the experiment's desk at {endpoint}: {why}") from None

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.call, method)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Call a method."""
        answer: Future[Any] = Future()
        if self._is_closed:
            answer.set_exception(PeerUnreachable(f"the connection to the desk at {self._endpoint} is closed"))
        else:
            number = next(self._numbers)
            self._post(partial(self._ask, number, answer, _packed(number, method, *args)))
        return answer

    def tell(self, method: str, *args: Any) -> None:
        """Call a method without an answer, at half the cost; the desk logs its errors."""
        if not self._is_closed:
            self._post(partial(self._stream.send, _packed(None, method, *args)))

    @property
    def is_lost(self) -> bool:
        """Whether the session has ended other than by `close`, so that messages no longer arrive."""
        return self._stream.is_ending and not self._is_closed

    def close(self) -> None:
        """End the session after sending all calls so far; calls without an answer fail. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._post(self._end)

    def _post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        if not self._is_posting:  # waking the thread is the largest cost, so several calls share it
            self._is_posting = True
            self._loop.call_soon_threadsafe(self._act)

    # ------------------------------------------------------------------ in its thread
    def _act(self) -> None:
        self._is_posting = False  # first, so that later posts wake the thread again
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def _ask(self, number: int, answer: Future[Any], message: bytes) -> None:
        self._awaited[number] = answer
        self._stream.send(message)
        if self._stream.is_ending:
            self._fail_awaited()

    def _end(self) -> None:
        self._stream.end()
        self._fail_awaited()
        self._closing.set()

    def _run(self, opened: Future[None]) -> None:
        try:
            self._loop.run_until_complete(self._live(opened))
        except BaseException as error:  # otherwise callers would wait forever
            if not opened.done():
                return opened.set_exception(error)
            self._stream.end()
            self._fail_awaited()
            raise
        finally:
            self._loop.close()

    async def _live(self, opened: Future[None]) -> None:
        """Connect and reconnect until the session is over; then wait for `close`."""
        self._closing = asyncio.Event()
        deadline = lost_at = pause_s = 0.0
        for attempt in itertools.count():
            channel = None
            try:
                channel, first = await asyncio.wait_for(self._connect(attempt), self._limits.connect_s)
                if attempt == 0:
                    opened.set_result(None)
                await _carry(self._stream, channel, first, self._take)
                break
            except Malformed as error:
                log.warning("ended the connection to %s, which sent what no desk sends: %s", self._endpoint, error)
                break
            except (OSError, asyncio.TimeoutError) as error:
                if channel is not None:
                    lost_at, pause_s = self._loop.time(), 0.05
                    deadline = lost_at + self._limits.reconnect_s
                elif attempt == 0:
                    return opened.set_exception(error)
                elif isinstance(error, ConnectionRefusedError):
                    deadline = min(deadline, lost_at + self._limits.refused_s)
                is_certain = channel is None and isinstance(error, (Forged, PeerUnreachable))
                if is_certain or self._loop.time() > deadline:
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1)
            finally:
                if channel is not None:
                    channel.close()
        self._stream.end()
        self._fail_awaited()
        await self._closing.wait()

    async def _connect(self, attempt: int) -> tuple[Channel, bytes]:
        """A new connection and its first frame."""
        host = self._endpoint.host
        if self._endpoint.is_unix:
            streams = await asyncio.open_unix_connection(host)
        else:
            streams = await asyncio.open_connection(host, self._endpoint.port, ssl=self._encryption)
        channel = _opened(*streams, self._endpoint.key, "client")
        try:
            await channel.prove()
            channel.send(self._stream.count(), self._id, attempt.to_bytes(8, "big"))
            if (first := await channel.receive()) == END:
                raise PeerUnreachable("it does not know this session")
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
                if answer is None or not answer.set_running_or_notify_cancel():  # the caller no longer waits
                    return
                if error:
                    answer.set_exception(RuntimeError(f"the experiment's desk failed: {error[0]}"))
                else:
                    answer.set_result(value)
            case _:
                raise Malformed("it is no answer")

    def _fail_awaited(self) -> None:
        error = ConnectionLost(f"lost the connection to the experiment's desk at {self._endpoint}")
        while self._awaited:
            _, answer = self._awaited.popitem()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
