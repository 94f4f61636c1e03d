"""Who can read Ray's token on a machine where dray starts Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dray.cluster import token


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
