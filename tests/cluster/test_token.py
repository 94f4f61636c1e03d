"""Who can read Ray's token on a machine where dray starts Ray, and which heads accept it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from ray._private import services

from dray.cluster import internals, token
from dray.cluster.connection import join


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_it_is_made_for_its_owner_alone(file: Path) -> None:
    before = os.umask(0)
    try:
        token.secure()
    finally:
        os.umask(before)
    assert (mode(file.parent), mode(file)) == (0o700, 0o600)
    text = file.read_text()
    assert len(text) == 64
    token.secure()
    assert file.read_text() == text


def test_one_that_others_could_read_is_closed_with_a_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    token.secure()
    written = file.read_text()
    for permissions in (0o644, 0o664):
        file.chmod(permissions)
        token.secure()
        assert (mode(file), file.read_text()) == (0o600, written)
    assert len(caplog.messages) == 2
    assert f"other users could read Ray's token in {file} until now" in caplog.messages[0]


def test_one_that_another_user_may_have_chosen_is_refused(file: Path, tmp_path: Path) -> None:
    token.secure()
    file.chmod(0o666)
    with pytest.raises(ConnectionError, match=rf"^Ray's token can't be kept secret: {file} was writable by all"):
        token.secure()
    file.rename(tmp_path / "known")
    (tmp_path / "known").chmod(0o600)
    file.symlink_to(tmp_path / "known")
    with pytest.raises(ConnectionError, match="auth_token is not a file; delete it"):
        token.secure()
    file.unlink()
    file.parent.chmod(0o777)
    with pytest.raises(ConnectionError, match=rf"{file.parent} was writable by all users"):
        token.secure()
    assert not file.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_is_refused(file: Path) -> None:
    token.secure()
    os.chown(file, 65534, 65534)
    with pytest.raises(ConnectionError, match="auth_token belongs to another user"):
        token.secure()


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "t"), ("RAY_AUTH_TOKEN_PATH", "/t")]
)
def test_none_is_made_that_ray_would_not_use(
    file: Path, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    token.secure()
    assert not file.exists()


@dataclass
class Head:
    """A head that accepts the token "right" alone, and has a node from the second answer on."""

    address: str = ""
    answers: int = 0

    def answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if ("authorization", "Bearer right") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        self.answers += 1
        return b"..node.." if self.answers > 1 else b""


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head()
    service, _, method = internals.NODES_METHOD.strip("/").partition("/")
    handler = grpc.unary_unary_rpc_method_handler(head.answer)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    head.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield head
    server.stop(None)


def test_a_head_that_refuses_the_token_is_found_before_ray_connects(
    head: Head, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "it requires a token, and this process has none; export RAY_AUTH_MODE=token"
    with pytest.raises(ConnectionError, match=f"^the Ray cluster at {head.address} refuses this process: {why}"):
        join(head.address)
    file.parent.mkdir()
    file.write_text("wrong\n")
    assert token.auth_error(head.address).startswith("it rejects this process's token; ")
    file.write_text("right\n")
    assert token.auth_error(head.address) == ""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    assert token.auth_error(head.address).startswith("it rejects")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token.auth_error(head.address).startswith("it requires")


@pytest.mark.usefixtures("file")
def test_a_refusal_is_found_among_the_causes_of_rays_error() -> None:
    error = ConnectionError("Failed to connect to Ray cluster")
    assert token.auth_error_in(error) == ""
    error.__cause__ = RuntimeError("Failed to connect to GCS: ray.exceptions.AuthenticationError: InvalidAuthToken")
    assert token.auth_error_in(error).startswith("it requires a token")


def test_ray_looks_for_a_new_node_once_it_has_registered(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "get_node", lambda address, node: head.answers)
    with internals.quick_start(lambda: "right"):
        assert services.get_node(head.address, b"node".hex()) == 2
