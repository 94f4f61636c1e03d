"""The server's address and token, from the environment or from a file that a server of the same user writes.

``DRAY_SERVER`` is the URL, and ``DRAY_SERVER_TOKEN`` the token, or the path of a file with it. Without them, or with
``DRAY_SERVER=auto``, the file ``.server.json`` in the results directory names the server that is up on this machine.
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
from dray.text import counted
from searchers import rows
from searchers.errors import DamagedFile
from searchers.rows import has_fields

FILE = ".server.json"
URL, TOKEN = "DRAY_SERVER", "DRAY_SERVER_TOKEN"  # variables of the environment
AUTO = "auto"  # in place of a URL: the server that the file leads to
MIN_TOKEN = 16  # fewest characters of a token, if other machines can reach the server


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a server."""

    url: str
    token: str  # "" if unknown
    pid: int = 0  # the server's process on ``machine``; 0 if unknown, or if the server has ended
    machine: str = ""


_is_address = has_fields({"url": (str,), "token": (str,), "pid": (int,), "machine": (str,)})


def find(results: Path, url: str | None = None) -> Address | None:
    """The address of the server that ``url``, or else ``DRAY_SERVER``, names; None if there is no server."""
    written = read(results)
    if (url := url or os.environ.get(URL)) and url != AUTO:
        token = token_of_environment()
        if not token and written is not None and written.url == url.rstrip("/"):
            token = written.token
        return Address(url=url.rstrip("/"), token=token)
    return written if written is not None and _is_up(written) else None


def read(results: Path) -> Address | None:
    """The address that a server of this user wrote, perhaps long ago; None if there is no such file."""
    try:
        descriptor = os.open(results / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        # Another user's file would send this user's code to that user.
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            return None
        with suppress(DamagedFile):  # there is no server, until the next one writes it
            return Address(**rows.parse_document(file.read(), results / FILE, _is_address))
    return None


def write(results: Path, url: str, token: str) -> None:
    """Write the address of this process's server, for this user's commands on this machine."""
    _write(results, Address(url=url, token=token, pid=os.getpid(), machine=socket.gethostname()))


def _write(results: Path, address: Address) -> None:
    results.mkdir(parents=True, exist_ok=True)
    with private.replaced(results / FILE) as unnamed, private.create(unnamed) as file:
        json.dump(asdict(address), file)


def remove(results: Path) -> None:
    """Note that the server has ended, if this process wrote the file; the next server reuses the token."""
    found = read(results)
    if found is not None and (found.pid, found.machine) == (os.getpid(), socket.gethostname()):
        _write(results, replace(found, pid=0))


def token_of_environment() -> str:
    """The token from ``DRAY_SERVER_TOKEN``; "" if it is not set. An unreadable or empty file is a `ConfigError`."""
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
    """The token for a server that listens at ``host``: from the environment, else from the last server here, else new.
    If other machines can reach it, the environment must give a long enough token, else it is a `ConfigError`."""
    given = token_of_environment()
    if given:
        if len(given) < MIN_TOKEN and not is_loopback(host):
            has = f"has {counted(len(given), 'character')}"
            what = f"{has}; at {host}, it must be hard to guess: give at least {MIN_TOKEN}"
            raise ConfigError([(TOKEN, what)], _HERE)
        return given
    if not is_loopback(host):
        what = (
            f"missing: at {host}, other machines can reach the server, and its users can run code as you; export "
            f"{TOKEN}=..., a long random text or the path of a file with one, here and for its users; or leave out "
            "--host, and use it through ssh -L"
        )
        raise ConfigError([(TOKEN, what)], _HERE)
    before = read(results)
    return before.token if before is not None and before.token else secrets.token_urlsafe(32)


def _is_up(address: Address) -> bool:
    """Whether the server's process exists; another process may have taken its number."""
    if address.machine != socket.gethostname() or address.pid <= 0:
        return False
    try:
        os.kill(address.pid, 0)
    except OSError:
        return False
    return True


_HERE = "The environment"
