"""Locations of files: a local directory, or a prefix in an object store.

A remote location is a URI with the filesystem's options in the query, such as
`s3://bucket/results?endpoint_override=minio:9000&scheme=http`. Secrets are kept apart, and never shown.
S3 and GCS are accessed by pyarrow; all others (`az://`, `abfs://`, ...) by fsspec.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

_REMOTE = re.compile(r"([a-z][a-z0-9+.-]+)://([^?]*)(?:\?(.*))?", re.IGNORECASE | re.DOTALL)
_S3 = ("region", "scheme", "endpoint_override", "role_arn", "tls_ca_file_path")
_S3_SECRETS = ("access_key", "secret_key", "session_token")
_SECRET = re.compile(r".*(key|secret|token|password|passphrase|credential|connection_string)s?", re.IGNORECASE)
_GCS = ("scheme", "endpoint_override", "project_id", "anonymous")
REQUEST_TIMEOUT_S = 30.0  # a busy store takes longer than pyarrow's default for S3, 3 s


def bucket_uri(scheme: str, bucket: str | None, prefix: str | None, endpoint_url: str | None = None) -> str:
    """The URI of a prefix in a bucket.

    >>> bucket_uri("s3", "bucket", "/results/", "http://minio:9000/")
    's3://bucket/results?endpoint_override=minio:9000&scheme=http'
    """
    place = "/".join(part.strip("/") for part in (bucket, prefix) if part)
    protocol, _, host = (endpoint_url or "").rpartition("://")
    query = f"?endpoint_override={host.rstrip('/')}&scheme={protocol or 'https'}" if endpoint_url else ""
    return f"{scheme}://{place}{query}"


@dataclass(frozen=True, slots=True)
class Location:
    """A local directory, or a prefix in an object store."""

    uri: str  # `s3://bucket/prefix?region=...`, or the path of a local directory
    # (name, value): access_key and secret_key for S3, account_key for Azure, ... Default: those of the environment
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, where: str | os.PathLike[str] | Location) -> Location:
        """Make a location of a path or a URI, which may contain credentials (`s3://KEY:SECRET@bucket`,
        `?account_key=...`).

        Raises:
            ValueError: the URI is invalid.
        """
        if isinstance(where, Location):
            return where
        text = os.fspath(where).removeprefix("file://")
        match = _REMOTE.fullmatch(text)
        if match is None:
            return cls(str(Path(text).expanduser()))
        scheme, place, query = match.group(1).lower(), match.group(2).strip("/"), match.group(3) or ""
        arguments = parse_qsl(query, keep_blank_values=True)
        secrets = [(name, value) for name, value in arguments if _SECRET.fullmatch(name)]
        if ":" in place.partition("/")[0]:  # bucket names have no colon; a secret may contain a slash
            pair, at, rest = place.partition("@")
            if scheme != "s3" or not at:
                raise ValueError(
                    f"{scheme}://...:... is not a valid location; write {scheme}://BUCKET/PREFIX, for S3 also "
                    "s3://KEY:SECRET@BUCKET/PREFIX"
                )
            key, _, secret = pair.partition(":")
            secrets += [("access_key", unquote(key)), ("secret_key", unquote(secret))]
            place = rest
        if not place:
            raise ValueError(f"{scheme}://{place} has no bucket; write {scheme}://BUCKET/PREFIX")
        options = [(name, value) for name, value in arguments if not _SECRET.fullmatch(name)]
        known = {"s3": _S3 + _S3_SECRETS, "gs": _GCS, "gcs": _GCS}.get(scheme)
        for name, _ in arguments:
            if known is not None and name not in known:
                raise ValueError(f"{scheme}://{place} has an unknown option {name!r}; known are {', '.join(known)}")
        return cls(f"{scheme}://{place}" + (f"?{urlencode(options)}" if options else ""), tuple(secrets))

    @property
    def is_local(self) -> bool:
        return _REMOTE.fullmatch(self.uri) is None

    @property
    def path(self) -> Path:
        assert self.is_local, f"{self.uri} is not a local directory"
        return Path(self.uri)

    @property
    def name(self) -> str:
        return self.uri.partition("?")[0].rpartition("/")[2]

    def child(self, *names: str) -> Location:
        base, mark, query = self.uri.partition("?") if not self.is_local else (self.uri, "", "")
        return Location("/".join((base.rstrip("/"), *names)) + mark + query, self.secrets)

    def with_secrets_of(self, other: Location) -> Location:
        """This location with the other's secrets, if it has none of its own and is in the same store."""
        here, there = (_REMOTE.fullmatch(each.uri) for each in (self, other))
        if self.secrets or here is None or there is None:
            return self
        stores = {(*each.group(1, 3), each.group(2).partition("/")[0]) for each in (here, there)}  # with the bucket
        return Location(self.uri, other.secrets) if len(stores) == 1 else self

    def filesystem(self) -> tuple[Any, str]:
        """The `pyarrow.fs.FileSystem`, which all locations in a store share, and the path in it."""
        from pyarrow.fs import LocalFileSystem

        match = _REMOTE.fullmatch(self.uri)
        if match is None:
            return LocalFileSystem(), str(self.path)
        scheme, place, query = match.group(1), match.group(2), match.group(3) or ""
        return _filesystem(scheme, place.partition("/")[0], query, self.secrets), place

    def __str__(self) -> str:
        return self.uri


@lru_cache(maxsize=32)
def _filesystem(scheme: str, bucket: str, query: str, secrets: tuple[tuple[str, str], ...]) -> Any:
    from pyarrow import fs

    options: dict[str, Any] = {**dict(parse_qsl(query, keep_blank_values=True)), **dict(secrets)}
    match scheme:
        case "s3":
            # AWS tools read these variables, pyarrow does not.
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            if endpoint and "endpoint_override" not in options:
                protocol, _, options["endpoint_override"] = endpoint.rstrip("/").rpartition("://")
                options.setdefault("scheme", protocol or "https")
            if "region" not in options and "endpoint_override" not in options:
                options["region"] = _region(bucket)
            return fs.S3FileSystem(
                **options,
                request_timeout=REQUEST_TIMEOUT_S,
                connect_timeout=REQUEST_TIMEOUT_S / 3,
                # dray itself retries, for longer.
                retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=2),
                # Writes a small file with one request.
                allow_delayed_open=True,
            )
        case "gs" | "gcs":
            if "anonymous" in options:
                options["anonymous"] = options["anonymous"].lower() == "true"
            return fs.GcsFileSystem(**options, retry_time_limit=timedelta(seconds=REQUEST_TIMEOUT_S))
    import fsspec

    try:
        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(scheme, **options)))
    except ImportError as error:
        hint = "; for Azure: pip install 'dray-train[azure]'" if scheme in ("az", "abfs", "abfss") else ""
        raise ImportError(f"{scheme}:// needs a package that is not installed: {error}{hint}") from error


def _region(bucket: str) -> str | None:
    from pyarrow.fs import resolve_s3_region

    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        return region
    try:
        return str(resolve_s3_region(bucket))
    except OSError:  # using the bucket raises a better error
        return None
