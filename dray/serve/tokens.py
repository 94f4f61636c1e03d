"""The server's further tokens, each with a scope and a quota: a file that ``dray serve token`` changes.

The file has no token, only their hashes: a token is shown once, when it is created. They are 256 random bits, so that a
plain SHA-256 can't be reversed.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Literal, get_args

from typing_extensions import TypedDict

from dray import private
from dray.errors import ConfigError, Fault
from dray.serve.quota import Quota, Use
from searchers import rows
from searchers.errors import DamagedFile
from searchers.rows import NUMBER, OPTIONAL_NUMBER, has_fields

STATE = ".server"
"""The directory of the server's own files, in the results directory."""
FILE = "tokens.json"
Scope = Literal["read", "submit", "operate"]
"""read: see all experiments. submit: also submit experiments, and change its own. operate: everything, also to those of
others."""
OPERATOR = "operator"
"""The name of the server's own token, which no other has."""
_has_tokens = has_fields({"tokens": (list,)})
_is_token = has_fields(
    {"name": (str,), "scope": (str,), "hash": (str,), "quota": (dict,), "created": NUMBER, "revoked": OPTIONAL_NUMBER}
)
_is_quota = has_fields(
    dict.fromkeys(("slots", "slot_hours", "usd", "experiments", "priority"), OPTIONAL_NUMBER)
    | {"prices": (dict,), "sandbox": (bool, NoneType)}
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, without its secret."""

    name: str  # of it and of the owner of its experiments; never used again, so that nobody inherits them
    scope: Scope
    hash: str = field(repr=False)
    quota: Quota = field(default_factory=Quota)
    created: float = 0.0  # Unix time in s
    revoked: float | None = None

    @property
    def owner(self) -> str:
        """The owner of its experiments, as the queue names it."""
        return "" if self.name == OPERATOR else self.name

    @property
    def cookie(self) -> str:
        """What a browser with this token sends: not the token itself, as it sends cookies to all servers on a host."""
        return hmac.new(self.hash.encode(), b"dray cookie", hashlib.sha256).hexdigest()


class Tokens:
    """The tokens of a running server: its own, and those of the file, as it is now. Thread-safe.

    If the file can't be read, `all` raises a `DamagedFile`, and so do the others for a token that is not the server's.
    """

    def __init__(self, results: Path, own: str) -> None:
        assert own, "a server without a token is open to everybody on the machine"
        self._file = results / STATE / FILE
        self._own = Token(name=OPERATOR, scope="operate", hash=hash_of(own))
        self._known: tuple[object, dict[str, Token]] = (None, {})

    def bearer(self, token: str) -> Token | None:
        """The valid token with this secret."""
        given = hash_of(token)
        return self._find(lambda each: _equal(given, each.hash))

    def cookie(self, value: str) -> Token | None:
        """The valid token of a browser's cookie."""
        return self._find(lambda each: _equal(value, each.cookie))

    def quota(self, owner: str) -> Quota:
        """The quota of an owner, revoked or not. While the file can't be read, it is what it was."""
        with suppress(DamagedFile):
            self.all()
        found = self._known[1].get(owner)
        return Quota() if found is None else found.quota

    def all(self) -> Mapping[str, Token]:
        """The tokens of the file, by name."""
        try:
            with rows.readable(self._file):
                found = self._file.stat()
        except FileNotFoundError:
            return {}
        version = (found.st_mtime_ns, found.st_ino, found.st_size)
        if self._known[0] != version:
            self._known = version, read(self._file)
        return self._known[1]

    def _find(self, matches: Callable[[Token], bool]) -> Token | None:
        if matches(self._own):
            return self._own
        found = [each for each in self.all().values() if matches(each)]  # all: the time taken tells nothing
        return next((each for each in found if each.revoked is None), None)


class Account(TypedDict):
    """A token, and what its experiments use."""

    name: str  # operator: the server's own
    scope: Scope
    quota: Quota
    used: Mapping[str, float]  # slots and experiments now, slot_hours and usd ever
    # what the experiments that are queued or running may still spend of their budgets: slot_hours, usd
    reserved: Mapping[str, float]
    left: Mapping[str, float | None]  # of each limit; null: there is none


class DatedAccount(Account):
    created: float
    revoked: float | None


def account(token: Token, use: Use) -> Account:
    return {
        "name": token.name,
        "scope": token.scope,
        "quota": token.quota,
        "used": {"slots": use.slots, **use.used, "experiments": use.experiments},
        "reserved": use.reserved,
        "left": use.left(token.quota),
    }


def dated_account(token: Token, use: Use) -> DatedAccount:
    return {**account(token, use), "created": token.created, "revoked": token.revoked}


def read(file: Path) -> dict[str, Token]:
    """The tokens in a file, by name."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        with rows.readable(file), os.fdopen(os.open(file, flags), "rb") as opened:
            found = os.fstat(opened.fileno())
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                what = "others can read or change it, so it may not be yours; chmod 600 it if it is"
                raise DamagedFile(f"{file} can't be read: {what}")
            content = rows.parse_document(opened.read(), file, _has_tokens)
    except FileNotFoundError:
        return {}
    for each in content["tokens"]:
        if what := _is_token(each) or _is_quota(each["quota"]):
            raise rows.unreadable(file, f"in tokens, {what}")
    return {each["name"]: Token(**{**each, "quota": Quota(**each["quota"])}) for each in content["tokens"]}


def create(results: Path, name: str, scope: str, quota: Quota) -> str:
    """Create a token, and return its secret. A `ConfigError` lists all faults."""
    faults = quota.faults()
    if not _NAME.fullmatch(name) or name == OPERATOR:
        what = "must be 1 to 63 letters, digits, '.', '_' or '-', begin with a letter or digit, and not be 'operator'"
        faults.append(Fault("NAME", f"{what}, got {name!r:.80}"))
    if scope not in get_args(Scope):
        faults.append(Fault("scope", f"must be one of {', '.join(get_args(Scope))}, got {scope!r:.40}"))
    elif scope != "submit" and quota != Quota():
        faults.append(Fault("scope", f"is {scope}, which has no quota; only submit has"))
    secret = secrets.token_urlsafe(32)
    with _changing(results) as tokens:
        if name in tokens:
            faults.append(Fault("NAME", f"{name} exists, or did: it owns experiments; give another name"))
        if faults:
            raise ConfigError(faults, "The token")
        tokens[name] = Token(name=name, scope=scope, hash=hash_of(secret), quota=quota, created=time.time())  # type: ignore[arg-type]
    return secret


def revoke(results: Path, name: str) -> None:
    """Refuse a token's requests from now on. Its experiments go on."""
    with _changing(results) as tokens:
        if name not in tokens:
            raise ConfigError(
                [Fault("NAME", f"there is no token {name!r:.80}; see: dray serve token list")], "The token"
            )
        if tokens[name].revoked is None:
            tokens[name] = replace(tokens[name], revoked=time.time())


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


@contextmanager
def _changing(results: Path) -> Iterator[dict[str, Token]]:
    """The tokens, which are written at the end of the block unless it raises."""
    directory = results / STATE
    results.mkdir(parents=True, exist_ok=True)
    private.make_directory(directory)
    with (directory / "tokens.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tokens = read(directory / FILE)
        before = dict(tokens)
        yield tokens
        if tokens != before:
            with private.replaced(directory / FILE) as unnamed, private.create(unnamed) as file:
                json.dump({"tokens": [asdict(each) for each in tokens.values()]}, file, indent=1)


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))
