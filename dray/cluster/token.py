"""Ray's token: keeps its file secret, and finds out whether a cluster accepts it.

Anyone who can read ``~/.ray/auth_token`` can run code as this user.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import traceback
from pathlib import Path

from dray.cluster import internals

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
_CURE = "export RAY_AUTH_MODE=token, and write the cluster's token to ~/.ray/auth_token, or export it as RAY_AUTH_TOKEN"
_WRONG_TOKEN = f"it rejects this process's token; {_CURE}"
_NO_TOKEN = f"it requires a token, and this process has none; {_CURE}"


def secure() -> None:
    """Make sure that no other user can read the token of a cluster that is about to be started on this machine.

    Ray would create the file with the default permissions: usually all users may read it.
    """
    has_other = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if has_other or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    directory = Path.home() / ".ray"
    file = directory / "auth_token"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _close(directory, directory.stat(), "directory", stat.S_IWGRP)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            if _close(file, file.lstat(), "file", stat.S_IRWXG | stat.S_IRWXO):
                log.warning(
                    "other users could read Ray's token in %s until now; if you don't trust all of them, end your Ray "
                    "clusters, delete the file, and start them again",
                    file,
                )
        else:
            with os.fdopen(descriptor, "w") as opened:
                opened.write(secrets.token_hex(32))
    except OSError as error:
        raise ConnectionError(f"Ray's token can't be kept secret: {error}") from None


def _close(path: Path, found: os.stat_result, kind: str, others: int) -> bool:
    """Take permissions away from others. Returns whether they had them."""
    why = ""
    if not (stat.S_ISDIR if kind == "directory" else stat.S_ISREG)(found.st_mode):
        why = f"is not a {kind}"
    elif found.st_uid != os.getuid():
        why = "belongs to another user"
    elif found.st_mode & stat.S_IWOTH:
        why = "was writable by all users"
    if why:
        raise PermissionError(f"{path} {why}; delete it, and dray makes another")
    if had := bool(found.st_mode & others):
        path.chmod(stat.S_IMODE(found.st_mode) & ~others)
    return had


def own() -> str:
    """The token that Ray sends from this process; "" if there is none."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    if found := os.environ.get("RAY_AUTH_TOKEN"):
        return found
    file = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""


def auth_error(address: str) -> str:
    """Why the cluster whose head is at ``host:port`` refuses this process; "" if it does not, or does not answer.

    It takes milliseconds. Ray itself retries for twenty seconds, prints a warning every second, and then reports that
    it can't connect.
    """
    # Imported here: it takes a tenth of a second.
    import grpc

    sent = own()
    try:
        with internals.nodes_of_head(address, sent, TIMEOUT_S) as nodes:
            nodes()
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return _WRONG_TOKEN if sent else _NO_TOKEN
    return ""


def auth_error_in(error: Exception) -> str:
    """Like `auth_error`, from the error of ``ray.init()`` and its causes; "" if they are of another kind."""
    if "AuthenticationError" not in "".join(traceback.format_exception(error)):
        return ""
    return _WRONG_TOKEN if own() else _NO_TOKEN
