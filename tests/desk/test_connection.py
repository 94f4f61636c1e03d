"""Calls of the desk over TCP, against a server in another thread."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from dray.desk import connection
from dray.desk.connection import DeskConnection, DeskUnreachable, Endpoint, listen


class Desk:
    """Notes what it is told; `take` waits for the next `give`."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self._given: list[asyncio.Future[Any]] = []

    async def note(self, what: Any, *, twice: bool = False) -> int:
        self.told += [what] * (1 + twice)
        return len(self.told)

    async def take(self) -> Any:
        self._given.append(asyncio.get_running_loop().create_future())
        return await self._given[-1]

    async def give(self, what: Any) -> None:
        self._given.pop(0).set_result(what)

    async def fail(self) -> None:
        raise KeyError("run-7")

    async def lock(self) -> Any:
        return threading.Lock()  # which can't be pickled


class Server:
    """A desk in a thread of its own."""

    def __init__(self) -> None:
        self.desk = Desk()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.endpoint = asyncio.run_coroutine_threadsafe(listen(self.desk, "127.0.0.1"), self._loop).result()

    def die(self) -> None:
        """As a process that is killed: the kernel closes its connections."""

        async def close() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            for transport in list(self._loop._transports.values()):  # type: ignore[attr-defined]  # noqa: SLF001
                transport.abort()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.die()


@pytest.fixture
def desk(server: Server) -> Iterator[DeskConnection]:
    made = DeskConnection(server.endpoint)
    yield made
    made.close()


def test_calls_of_a_thread_begin_in_their_order(server: Server, desk: DeskConnection) -> None:
    calls = [desk.note({"number": number}) for number in range(1000)]
    assert [call.result(30) for call in calls] == list(range(1, 1001))
    assert server.desk.told == [{"number": number} for number in range(1000)]
    assert desk.note("more", twice=True).result(30) == 1002


def test_a_call_that_waits_holds_up_no_other(desk: DeskConnection, server: Server) -> None:
    waiting: Future[Any] = desk.take()
    assert desk.note("meanwhile").result(30) == 1
    assert not waiting.done()
    other = DeskConnection(server.endpoint)
    other.tell("give", large := bytes(5_000_000))
    other.close()
    assert waiting.result(30) == large, "what was told before the end of the connection has come"


def test_what_the_desk_raises_is_an_error_of_the_call_alone(desk: DeskConnection) -> None:
    desk.tell("fail")
    for call in (desk.fail(), desk.lock(), desk.unknown()):
        with pytest.raises(RuntimeError, match=r"^the experiment's desk failed: (KeyError|TypeError|AttributeError): "):
            call.result(30)
    assert desk.note("still there").result(30) == 1


def test_calls_fail_when_the_desk_is_gone(desk: DeskConnection, server: Server) -> None:
    waiting = desk.take()
    desk.note("it has come").result(30)
    server.die()
    lost = f"lost the connection to the experiment's desk at 127.0.0.1:{server.endpoint.port}"
    for call in (waiting, desk.note("too late")):
        with pytest.raises(DeskUnreachable, match=lost):
            call.result(30)


def test_calls_fail_once_it_is_closed(desk: DeskConnection) -> None:
    waiting, told = desk.take(), desk.note("the last")
    desk.close()
    desk.close()
    assert not wait([waiting, told], 30).not_done
    with pytest.raises(DeskUnreachable, match="is closed"):
        desk.note("more").result(30)


def test_no_thread_stays(server: Server) -> None:
    for is_lost in (False, True):
        made = DeskConnection(server.endpoint)
        made.note("something").result(30)
        if is_lost:
            server.die()
        made.close()
        deadline = time.monotonic() + 30
        while any(thread.name == "dray-desk" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_no_desk_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(DeskUnreachable, match=rf"desk at 127.0.0.1:{port}: Connection refused; between the"):
        DeskConnection(Endpoint(host="127.0.0.1", port=port, key=b""))


def test_what_listens_is_no_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(DeskUnreachable, match=r"no answer; between"),
    ):
        DeskConnection(Endpoint(host="127.0.0.1", port=other.getsockname()[1], key=b""))


def connected(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.host, endpoint.port), timeout=30)


def rest(raw: socket.socket) -> bytes:
    """What still comes, until the other side ends the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := raw.recv(1000):
            received += more
    return received


def framed(pickled: bytes) -> bytes:
    """A message as a frame, with a MAC that is wrong."""
    return len(pickled).to_bytes(4, "big") + bytes(16) + pickled


class Trap:
    """Notes that it was unpickled."""

    sprung = False

    def __reduce__(self) -> Any:
        return setattr, (Trap, "sprung", True)


@pytest.mark.parametrize("key", [b"", b"not the key"])
def test_nothing_is_unpickled_of_who_does_not_know_the_key(server: Server, key: bytes) -> None:
    with pytest.raises(DeskUnreachable, match=r"does not know this connection's key$|it was closed|reset by peer"):
        DeskConnection(Endpoint(host="127.0.0.1", port=server.endpoint.port, key=key))  # whichever side notices first
    with connected(server.endpoint) as raw:
        raw.sendall(bytes(64) + framed(pickle.dumps((0, "note", (Trap(),), {}))))
        assert len(rest(raw)) <= 32, "the nonce, and no answer"
    assert not Trap.sprung
    assert server.desk.told == []


def test_a_client_unpickles_nothing_of_a_desk_that_does_not_know_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def pretend() -> None:
            with other.accept()[0] as raw:
                raw.sendall(bytes(64) + framed(pickle.dumps((0, Trap(), None))))
                rest(raw)

        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(DeskUnreachable, match=r"does not know this connection's key$"):
            DeskConnection(Endpoint(host="127.0.0.1", port=other.getsockname()[1], key=b"the key"))
        pretending.join(30)
    assert not Trap.sprung


def test_a_connection_that_proves_nothing_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_S", 0.05)
    with connected(server.endpoint) as raw:
        raw.sendall(bytes(10))
        assert len(rest(raw)) <= 32


def test_of_too_many_unproven_connections_the_oldest_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_UNPROVEN", 2)
    with contextlib.ExitStack() as stack:
        raws = [stack.enter_context(connected(server.endpoint)) for _ in range(3)]
        assert len(rest(raws[0])) <= 32
        desk = DeskConnection(server.endpoint)
        assert len(rest(raws[1])) <= 32
        assert desk.note("clients still connect").result(30) == 1
        raws[2].sendall(bytes(32))
        with raws[2].makefile("rb") as stream:
            assert len(stream.read(64)) == 64
        desk.close()


def test_a_message_that_is_too_large_is_an_error_of_its_call(
    desk: DeskConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_MESSAGE", 1000)
    with pytest.raises(ValueError, match="is too large for the desk: at most 1,000"):
        desk.note(bytes(1001))
    assert desk.note("still there").result(30) == 1


def test_an_endpoint_does_not_show_its_key() -> None:
    assert "secret" not in repr(Endpoint(host="10.0.0.1", port=1, key=b"secret"))


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
    desk = DeskConnection(server.endpoint)
    assert desk.note("hidden").result(30) == 1
    desk.close()
    monkeypatch.delenv("RAY_USE_TLS")
    monkeypatch.setattr(connection, "CONNECT_S", 0.5)
    with pytest.raises(DeskUnreachable):
        DeskConnection(server.endpoint)
    server.die()
