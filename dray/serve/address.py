"""Where the server is, and its token: from the environment, or from a file that a server of the same user writes.

``DRAY_SERVER`` is its URL, and ``DRAY_SERVER_TOKEN`` its token, or the path of a file with it. Without them, or with
``DRAY_SERVER=auto``, the file ``.server.json`` in the results directory leads to the server that is up on this machine.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dray import private
from dray.errors import ConfigError
from dray.private import is_loopback

FILE = ".server.json"
URL, TOKEN = "DRAY_SERVER", "DRAY_SERVER_TOKEN"  # variables of the environment
AUTO = "auto"  # in place of a URL: the server that the file leads to
MIN_TOKEN = 16  # fewest characters of a token, if other machines can reach the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is."""

    url: str
    token: str  # "" if it is not known
    pid: int = 0  # of its process, on ``machine``; 0 if that is not known, or it has ended
    machine: str = ""


def find(results: Path, url: str | None = None) -> Address | None:
    """The address of the server to use: what ``url``, or in its place ``DRAY_SERVER``, names; None if there is none."""
    written = read(results)
    if (url := url or os.environ.get(URL)) and url != AUTO:
        token = token_of_environment()
        if not token and written is not None and written.url == url.rstrip("/"):
            token = written.token
        return Address(url=url.rstrip("/"), token=token)
    return written if written is not None and _is_up(written) else None


def read(results: Path) -> Address | None:
    """What a server of this user has written, perhaps long ago; None if there is no such file."""
    try:
        descriptor = os.open(results / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor) as file:
        found = os.fstat(file.fileno())
        # Another user's file would send this user's code to that user.
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            return None
        with suppress(ValueError, TypeError):
            return Address(**json.load(file))
    return None


def write(results: Path, url: str, token: str) -> None:
    """Write where this process serves, for this user's commands on this machine."""
    _write(results, Address(url=url, token=token, pid=os.getpid(), machine=socket.gethostname()))


def _write(results: Path, address: Address) -> None:
    results.mkdir(parents=True, exist_ok=True)
    temporary = results / f"{FILE}.{os.getpid()}"
    with private.create(temporary) as file:
        json.dump(asdict(address), file)
    os.replace(temporary, results / FILE)


def remove(results: Path) -> None:
    """Note that the server has ended, if the file is this process's; the token stays for the next one."""
    found = read(results)
    if found is not None and (found.pid, found.machine) == (os.getpid(), socket.gethostname()):
        _write(results, replace(found, pid=0))


def token_of_environment() -> str:
    """The token that ``DRAY_SERVER_TOKEN`` gives; "" if it gives none. A file that can't be read, or is empty, is a
    `ConfigError`."""
    given = os.environ.get(TOKEN, "").strip()
    if not given.startswith(("/", "~")):
        return given
    try:
        token = Path(given).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [(TOKEN, f"can't be read: {error}; give a file with the token, or the token")], _HERE
        ) from None
    if not token:
        raise ConfigError([(TOKEN, f"{given} is empty; write a token to it")], _HERE)
    return token


def token_for(host: str, results: Path) -> str:
    """The token of a server that listens at ``host``: that of the environment, else that of the last server here,
    else a new one. If other machines can reach it, no token in the environment, or a short one, is a `ConfigError`."""
    given = token_of_environment()
    if given:
        if len(given) < MIN_TOKEN and not is_loopback(host):
            what = f"has {len(given)} characters; at {host}, a token must not be guessed: give at least {MIN_TOKEN}"
            raise ConfigError([(TOKEN, what)], _HERE)
        return given
    if not is_loopback(host):
        what = (
            f"missing: at {host}, other machines can reach the server, and who can use it can run code as you; export "
            f"{TOKEN}=..., a long random text or the path of a file with one, here and for its users; or leave out "
            "--host, and use it through ssh -L"
        )
        raise ConfigError([(TOKEN, what)], _HERE)
    before = read(results)
    return before.token if before is not None and before.token else secrets.token_urlsafe(32)


def _is_up(address: Address) -> bool:
    """Whether its process is there; another process may have its number by now."""
    if address.machine != socket.gethostname() or address.pid <= 0:
        return False
    try:
        os.kill(address.pid, 0)
    except OSError:
        return False
    return True


_HERE = "The environment"
