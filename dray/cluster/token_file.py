"""The file with Ray's token, ``~/.ray/auth_token``: whoever reads it can run code as this user."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path

log = logging.getLogger(__name__)


def secure() -> None:
    """Make sure that no other user can read the token of a cluster that is about to be started on this machine.

    Ray would create the file with the permissions that the umask leaves: usually all users may read it.

    Raises:
        ConnectionError: another user may have chosen the token.
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
