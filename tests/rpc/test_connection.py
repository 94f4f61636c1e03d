"""Calls over TCP, against a listener in another thread, and what both sides keep of a session that may be cut."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import random
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from dray.rpc.calls import PeerUnreachable
from dray.rpc.channel import Channel
from dray.rpc.connection import (
    LIMITS,
    Call,
    Connection,
    ConnectionLost,
    Endpoint,
    Limits,
    Session,
    listen,
)
from dray.rpc.stream import Stream
from dray.rpc.wire import Malformed

BRIEF = Limits(connect_s=5, reconnect_s=0.3, kept_s=0.3)


class Desk:
    """Notes what it is told; `take` waits for the next `give`."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.lost: list[Session] = []
        self._takes: list[Call] = []

    def on(self, call: Call) -> None:
        match call.method, call.args:
            case "note", (what,):
                self.told.append(what)
                call.answer(len(self.told))
            case "take", ():
                self._takes.append(call)
            case "give", (what,):
                self._takes.pop(0).answer(what)
                call.answer()
            case "push", (what,):
                call.session.push(what)
                call.answer("pushed")
            case "fail", ():
                raise KeyError("run-7")
            case "lock", ():
                call.answer(threading.Lock())  # which can't be sent
            case _:
                raise Malformed(f"no method {call.method}")


class Server:
    """A desk in a thread of its own."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.desk = Desk()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        listening = listen(self.desk.on, "127.0.0.1", lost=self.desk.lost.append, limits=limits)
        self._listener = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.endpoint = self._listener.endpoint

    def run(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def close(self) -> None:
        self.run(self._listener.close)

    def die(self) -> None:
        """As a process that is killed: the kernel closes its connections."""

        async def kill() -> None:
            self._listener.server.close()
            for transport in list(self._loop._transports.values()):  # type: ignore[attr-defined]  # noqa: SLF001
                transport.abort()
            for task in (others := asyncio.all_tasks() - {asyncio.current_task()}):
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(kill(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.die()


@pytest.fixture
def desk(server: Server) -> Iterator[Connection]:
    made = Connection(server.endpoint, limits=BRIEF)
    yield made
    made.close()


def soon(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_call_that_waits_holds_up_no_other(desk: Connection, server: Server) -> None:
    waiting: Future[Any] = desk.take()
    assert desk.note("meanwhile").result(30) == 1
    assert not waiting.done()
    other = Connection(server.endpoint)
    other.tell("give", large := bytes(5_000_000))
    other.close()
    assert waiting.result(30) == large, "what was told before the end of the connection has come"


def test_what_is_pushed_comes_in_order_with_answers(server: Server) -> None:
    seen: list[Any] = []
    desk = Connection(server.endpoint, on_push=seen.append)
    for number in range(100):
        desk.push(number).add_done_callback(lambda call: seen.append(call.result()))
    desk.note("last").result(30)
    assert seen == [each for number in range(100) for each in (number, "pushed")]
    desk.close()


def test_what_fails_is_an_error_of_the_call_alone(desk: Connection) -> None:
    desk.tell("fail")
    for call in (desk.fail(), desk.lock()):
        with pytest.raises(
            RuntimeError, match=r"^the experiment's desk failed: (KeyError: 'run-7'|TypeError: can't se)"
        ):
            call.result(30)
    with pytest.raises(TypeError, match="can't send a lock"):
        desk.note(threading.Lock())
    assert desk.note("still there").result(30) == 1


@pytest.mark.slow
def test_a_message_that_is_too_large_is_an_error_of_its_call(desk: Connection) -> None:
    with pytest.raises(ValueError, match="is too large: at most 268,435,456"):
        desk.note(bytes(1 << 28))
    assert desk.note("still there").result(30) == 1


# ------------------------------------------------------------------------------------------------------------ its end
def test_calls_fail_when_the_desk_is_gone(desk: Connection, server: Server) -> None:
    waiting = desk.take()
    desk.note("it has come").result(30)
    server.die()
    lost = f"lost the connection to the experiment's desk at 127.0.0.1:{server.endpoint.port}"
    for call in (waiting, desk.note("too late")):
        with pytest.raises(ConnectionLost, match=lost):  # not as where there never was one, which ends an experiment
            call.result(30)
    with pytest.raises(PeerUnreachable, match=lost):
        desk.note("later").result(30)


def test_an_error_of_its_thread_leaves_nobody_waiting(server: Server) -> None:
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'host'"):
        Connection(("127.0.0.1", 1, b""))  # type: ignore[arg-type]  # as of another version


def test_calls_fail_at_once_when_the_listener_is_closed(server: Server) -> None:
    desk = Connection(server.endpoint)
    waiting = desk.take()
    desk.note("it has come").result(30)
    server.close()
    with pytest.raises(PeerUnreachable):
        waiting.result(LIMITS.reconnect_s / 2)
    desk.close()


def test_calls_fail_once_it_is_closed(desk: Connection, server: Server) -> None:
    waiting, told = desk.take(), desk.note("the last")
    desk.close()
    desk.close()
    assert not wait([waiting, told], 30).not_done
    with pytest.raises(PeerUnreachable, match="is closed"):
        desk.note("more").result(30)
    soon(lambda: len(server.desk.lost) == 1)
    assert server.desk.told == ["the last"]


def test_no_thread_stays(server: Server) -> None:
    others = set(threading.enumerate())
    for is_lost in (False, True):
        made = Connection(server.endpoint, limits=BRIEF)
        made.note("something").result(30)
        if is_lost:
            server.die()
        made.close()
        soon(lambda: not set(threading.enumerate()) - others)


def test_no_desk_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(PeerUnreachable, match=rf"desk at 127.0.0.1:{port}: Connection refused; between the"):
        Connection(Endpoint(host="127.0.0.1", port=port, key=b""))


# ------------------------------------------------------------------------------------------------------------ strangers
def connected(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.host, endpoint.port), timeout=30)


def rest(raw: socket.socket) -> bytes:
    """What still comes, until the other side ends the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := raw.recv(1000):
            received += more
    return received


class Trap:
    """Notes that it was unpickled."""

    sprung = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "sprung", True)


def framed(message: bytes) -> bytes:
    """A message as a frame, with a MAC that is wrong."""
    return len(message).to_bytes(4, "big") + bytes(16) + message


HOSTILE = [bytes(64) + framed(pickle.dumps((0, Trap(), None))), pickle.dumps((0, "note", Trap())) * 20, b"x" * 10]
"""What a stranger sends."""


@pytest.mark.parametrize("sent", HOSTILE, ids=["pickle in a frame", "pickle", "too little"])
def test_nothing_is_read_of_a_client_that_does_not_know_the_key(sent: bytes) -> None:
    server = Server(Limits(handshake_s=0.2))
    with connected(server.endpoint) as raw:
        raw.sendall(sent)
        assert len(rest(raw)) <= 64, "a nonce and a proof, and no answer"
    for key in (b"", b"not the key"):
        with pytest.raises(PeerUnreachable, match=r"does not know this connection's key$|bytes read|reset by peer"):
            Connection(Endpoint(host="127.0.0.1", port=server.endpoint.port, key=key))  # whichever side notices first
    assert server.desk.told == server.desk.lost == []
    assert not Trap.sprung
    server.die()


@pytest.mark.parametrize("sent", HOSTILE, ids=["pickle in a frame", "pickle", "too little"])
def test_a_client_reads_nothing_of_a_listener_without_the_key(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        received = bytearray()

        def pretend() -> None:
            with other.accept()[0] as raw:
                raw.sendall(sent)
                received.extend(rest(raw))

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(PeerUnreachable, match=r"does not know this connection's key$|no answer; between the nodes"):
            Connection(
                Endpoint(host="127.0.0.1", port=other.getsockname()[1], key=b"key"), limits=Limits(connect_s=0.2)
            )
        pretending.join(30)
    assert len(received) <= 64, "a nonce and a proof"
    assert not Trap.sprung


def test_of_too_many_unproven_connections_the_oldest_ends() -> None:
    server = Server(Limits(max_unproven=2))
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(connected(server.endpoint)) for _ in range(3)]
        assert len(rest(raws[0])) <= 32
        desk = Connection(server.endpoint)
        assert len(rest(raws[1])) <= 32
        assert desk.note("clients still connect").result(30) == 1
        raws[2].sendall(bytes(32))
        with raws[2].makefile("rb") as stream:
            assert len(stream.read(64)) == 64
        desk.close()
    server.die()


def test_of_many_unproven_connections_that_come_at_once_no_more_stay() -> None:
    server = Server(Limits(max_unproven=2, handshake_s=60))
    with contextlib.ExitStack() as stack:

        def come() -> list[socket.socket]:  # while the listener can't accept any
            return [stack.enter_context(connected(server.endpoint)) for _ in range(20)]

        raws = server.run(come)
        assert all(len(rest(raw)) <= 32 for raw in raws[:-2]), "before the time for a proof is over"
        server.die()


async def came(server: Server, attempt: int = 0) -> tuple[Channel, asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection of a client that knows the key, the same client each time."""
    reader, writer = await asyncio.open_connection(server.endpoint.host, server.endpoint.port)
    channel = Channel(reader, writer, server.endpoint.key, "client")
    await channel.prove()
    channel.send(bytes(8), b"1234567890123456", attempt.to_bytes(8, "big"))
    return channel, reader, writer


def test_a_connection_that_comes_late_replaces_no_newer_one(server: Server) -> None:
    async def answered() -> bytes:
        first = await came(server)
        await first[0].receive()
        newer = await came(server, 2)
        await newer[0].receive()
        late = await came(server, 1)
        with pytest.raises(ConnectionResetError):
            await late[0].receive()
        newer[0].send(bytes(8), b"\x93\x01\xa4note\xa1x")
        answer = await newer[0].receive()
        for _, _, writer in (first, newer, late):
            writer.close()
        return answer

    assert asyncio.run(answered()).endswith(b"\x92\x01\x01")
    assert server.desk.told == ["x"]


@pytest.mark.parametrize("frame", ["unknown method", "pickle", "no call", "too large", "impossible count"])
def test_a_client_that_sends_what_none_sends_is_let_go(
    server: Server, desk: Connection, frame: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that knows the key: it gets nothing run, and the others notice nothing."""

    async def misbehave() -> bytes:
        channel, reader, writer = await came(server)
        await channel.receive()
        match frame:
            case "unknown method":
                channel.send(bytes(8), b"\x92\x01\xa5close")
            case "pickle":
                channel.send(bytes(8), pickle.dumps((0, "note", Trap())))
            case "no call":
                channel.send(bytes(8), b"\x01")
            case "too large":
                writer.write((1 << 31).to_bytes(4, "big") + bytes(16))
            case "impossible count":
                channel.send(b"\x01" * 8, b"\x92\x01\xa5close")
        await asyncio.sleep(0)
        ended = await reader.read()
        writer.close()
        return ended

    with caplog.at_level(logging.WARNING):
        ended = asyncio.run(misbehave())
    assert desk.note("still there").result(30) == 1
    assert [record.getMessage().partition(":")[0] for record in caplog.records if record.name.startswith("dray")] == [
        "ended a connection" if frame == "too large" else "ended a session that sent what no client sends"
    ]
    assert (len(ended), len(server.desk.lost)) == ((0, 0) if frame == "too large" else (28, 1))
    assert not Trap.sprung


# ------------------------------------------------------------------------------------------------------------ cuts
class Proxy:
    """Stands between client and listener; cuts, stalls and delays what it passes on."""

    def __init__(self, to: Endpoint, seed: int = 0) -> None:
        self._to, self._rng = to, random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.is_open, self.cuts = True, 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._left = 1 << 60
        self.mean: int | None = None
        """Bytes between two cuts."""
        server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accept, "127.0.0.1", 0), self._loop
        ).result()
        self.endpoint = Endpoint(host="127.0.0.1", port=server.sockets[0].getsockname()[1], key=to.key)

    def cut_every(self, mean: int) -> None:
        self.mean = mean
        self._left = 0

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        self.cuts += 1
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            return writer.transport.abort()
        others, other = await asyncio.open_connection(self._to.host, self._to.port)
        self._writers |= {writer, other}
        await asyncio.gather(self._pass(reader, other), self._pass(others, writer))
        self._writers -= {writer, other}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.mean and self._rng.random() < 0.1:
                    await asyncio.sleep(self._rng.random() / 100)  # a delay, which also joins pieces
                if self.mean and len(data) > self._left:
                    writer.write(data[: self._left])  # in the middle of a frame
                    await asyncio.sleep(0)
                    self._left = self._rng.randrange(2 * self.mean)
                    return self._cut()
                self._left -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server.endpoint)
    yield made
    made.stop()


def test_messages_arrive_once_and_in_order_however_often_cut(server: Server, proxy: Proxy) -> None:
    pushed: list[Any] = []
    desk = Connection(proxy.endpoint, on_push=pushed.append)
    proxy.cut_every(20_000)
    waiting = desk.take()
    answers = []
    for number in range(2000):
        answers.append(desk.push(number))
        desk.tell("note", number)
        answers.append(desk.note([number, "x" * (number % 300)]))
        if number % 100 == 0:
            answers[-1].result(60)
    assert [each.result(60) for each in answers[::2]] == ["pushed"] * 2000
    assert [each.result(60) for each in answers[1::2]] == [2 * number for number in range(1, 2001)]
    assert server.desk.told == [each for number in range(2000) for each in (number, (number, "x" * (number % 300)))]
    assert pushed == list(range(2000))
    desk.give("after all of it").result(60)
    assert waiting.result(60) == "after all of it"
    assert proxy.cuts > 10
    desk.close()
    soon(lambda: server.desk.lost)


def test_what_is_told_before_the_end_arrives_after_a_cut(server: Server, proxy: Proxy) -> None:
    desk = Connection(proxy.endpoint)
    proxy.is_open = False
    proxy.cut()
    desk.tell("note", "the last")
    desk.close()
    time.sleep(0.1)
    assert server.desk.told == []
    proxy.is_open = True
    soon(lambda: server.desk.lost)
    assert server.desk.told == ["the last"]


def test_a_client_that_does_not_come_back_is_lost_for_good() -> None:
    server = Server(BRIEF)
    proxy = Proxy(server.endpoint)
    desk = Connection(proxy.endpoint)
    waiting = desk.take()
    desk.tell("note", "it has come")
    soon(lambda: server.desk.told)
    proxy.is_open = False
    proxy.cut()
    soon(lambda: server.desk.lost)
    proxy.is_open = True
    with pytest.raises(PeerUnreachable):
        waiting.result(LIMITS.reconnect_s / 2)
    assert server.desk.told == ["it has come"]
    desk.close()
    proxy.stop()
    server.die()


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """Ray's variables, with a certificate that is its own authority."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=dray"],
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    paths = {"RAY_TLS_SERVER_CERT": certificate, "RAY_TLS_SERVER_KEY": key, "RAY_TLS_CA_CERT": certificate}
    return {"RAY_USE_TLS": "1", **{name: str(path) for name, path in paths.items()}}


def test_with_rays_certificates_it_is_encrypted(certificates: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in certificates.items():
        monkeypatch.setenv(name, value)
    server = Server()
    desk = Connection(server.endpoint)
    assert desk.note("hidden").result(30) == 1
    desk.close()
    monkeypatch.delenv("RAY_USE_TLS")
    with pytest.raises(PeerUnreachable):
        Connection(server.endpoint, limits=Limits(connect_s=0.5))
    server.die()


class Side:
    """Sends numbers; it is its own connection too."""

    def __init__(self) -> None:
        self.stream, self.sent = Stream(), 0
        self.wire = deque[bytes]()  # to the other side

    def send(self, *parts: bytes) -> None:
        self.wire.append(b"".join(parts))

    def abort(self) -> None:
        raise AssertionError("there is no connection in place of which this one could be")

    def say(self) -> None:
        self.sent += 1
        self.stream.send(b"%d" % self.sent)

    def take(self, frame: bytes) -> None:
        connection: Any = self
        if self.stream.channel is None:
            self.stream.resume(connection, frame)
        else:
            self.stream.receive(frame)


def test_what_has_arrived_is_not_kept_for_long() -> None:
    one, other = Side(), Side()
    for each in (one, other):
        each.send(each.stream.count())
    one.take(other.wire.popleft())
    other.take(one.wire.popleft())
    for number in range(1000):
        one.say()
        other.take(one.wire.popleft())
        if other.wire:
            one.take(other.wire.popleft())
        if number % 100 == 99:
            one.stream.send(bytes(1 << 20))
            other.stream.receive(one.wire.popleft())
            one.take(other.wire.popleft())  # the count comes at once after a large message
    one.stream.channel = None
    connection: Any = one
    one.stream.resume(connection, other.stream.count())
    assert not one.wire


@pytest.mark.parametrize("frame", [b"", b"1234567", (2).to_bytes(8, "big"), (0).to_bytes(8, "big")])
def test_acknowledgements_that_can_not_be_are_refused(frame: bytes) -> None:
    stream = Stream()
    stream.send(b"one")
    stream.receive((1).to_bytes(8, "big"))
    with pytest.raises(Malformed):
        stream.receive(frame)
