"""The path below which a reverse proxy serves the server, as ``--root-path`` gives it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from dray.errors import ConfigError

_PATH = re.compile(r'(/(?!\.{1,2}(/|$))[^/{}?#"<>\\\x00-\x1f\x7f]+)*')


@dataclass(frozen=True, slots=True)
class RootPath:
    """Where browsers find the server.

    Attributes:
        path: such as ``/lab/dray``; "" if there is none. The server answers below it and below "/", for proxies that
            strip it.
        origin: of the proxy, such as ``https://hub.example.org``; "" if unknown.
    """

    path: str = ""
    origin: str = ""

    @classmethod
    def parse(cls, given: str) -> RootPath:
        """From a path, or the whole address; `ConfigError` if it is neither.

        >>> RootPath.parse("https://hub.example.org/user/a b/dray/")
        RootPath(path='/user/a%20b/dray', origin='https://hub.example.org')
        """
        try:
            parts = urlsplit(given)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
            _ = parts.port  # which fails if it is no number
        except ValueError:
            is_address, parts = False, urlsplit("")
        path = unquote(parts.path).rstrip("/")
        is_path = given.startswith("/") and not parts.netloc
        has_more = bool(parts.query or parts.fragment)
        if not (is_address or is_path) or has_more or not _PATH.fullmatch(path) or not given.isprintable():
            what = "must be a path such as /lab/dray, or a whole address such as https://hub.example.org/lab/dray"
            raise ConfigError([("--root-path", f"{what}, got {given[:100]!r}")], "The command")
        return cls(quote(path, safe="/!$&'()*+,;=:@"), f"{parts.scheme}://{parts.netloc}".lower() * is_address)

    @property
    def hosts(self) -> frozenset[str]:
        """The name of the proxy's host, without a port, if it is known."""
        return frozenset({urlsplit(self.origin).hostname or ""} - {""})

    @property
    def address(self) -> str:
        """The whole address; "" if only the path is known."""
        return self.origin and self.origin + self.path
