"""The section ``checkpoint_storage``: where experiments and checkpoints are stored, and how many of these are kept."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from dray.config.determined_fields import NO_MORE
from dray.config.section import Directory, Section, Url
from dray.storage import Location, bucket_uri


def _bucket(name: str) -> str:
    if ":" in name or "@" in name:
        raise ValueError("must be only a name; give credentials as access_key and secret_key, or in the environment")
    return name


Bucket: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_bucket)]
Secret: TypeAlias = Annotated[SecretStr | None, Field(exclude=True)]


def _storage(raw: str | os.PathLike[str]) -> dict[str, Any]:
    """The section for a path, or a URI with its filesystem's options, as in Ray."""
    if not os.fspath(raw):
        raise ValueError("must not be empty; for example checkpoint_storage: s3://bucket/results")
    where = Location.of(raw)
    if where.is_local:
        return {"type": "directory", "container_path": where.uri}
    for name, _ in where.secrets:
        if name not in SECRETS:
            raise ValueError(f"{name} can't be given in a storage URI; set it in the environment")
    return {"type": "uri", "storage_path": where.uri, **dict(where.secrets)}


def storage_of(raw: object) -> object:
    """The section for a path or a URI, and for its older spellings."""
    if isinstance(raw, str | os.PathLike):
        return _storage(raw)
    if isinstance(raw, dict) and raw.get("type") == "shared_fs" and "checkpoint_path" in raw:
        # The old name of storage_path. If both are given, it has no effect, as in Determined.
        raw = {"storage_path": raw["checkpoint_path"], **raw}
        del raw["checkpoint_path"]
    where = raw.get("storage_path") if isinstance(raw, Mapping) else None
    # A URI's credentials become fields of their own, which are not stored.
    return {**raw, **_storage(where)} if isinstance(raw, dict) and isinstance(where, str) and "://" in where else raw


def _normal(prefix: str) -> str:
    """A prefix as Determined uses it: a/b for /a/.//b/."""
    if ".." in prefix.split("/"):
        raise ValueError(f"must not contain .., got {prefix!r}; write the path itself")
    return posixpath.normpath(f"/{prefix}").strip("/")


def _kind(raw: object) -> object:
    if raw == "hdfs":
        raise ValueError(NO_MORE["checkpoint_storage.hdfs_url"])
    return raw


class CheckpointStorage(Section):
    """Where experiments and checkpoints are stored, and how many checkpoints are kept.

    Experiments are in a directory that every node sees, or only their checkpoints are in an object store. The section
    may also be just a path or a URI: ``s3://bucket/results``. ``to_dict`` never has its secrets; if there are none,
    those of the environment are used.
    """

    type: Annotated[Literal["directory", "shared_fs", "s3", "gcs", "azure", "uri"] | None, BeforeValidator(_kind)] = (
        Field(default=None, description="the kind of storage", examples=["directory"])
    )
    container_path: Directory | None = Field(
        default=None, description="the directory; ignored for shared_fs", examples=["/mnt/results"]
    )
    host_path: Directory | None = Field(default=None, description="the shared directory", examples=["/mnt/results"])
    storage_path: Directory | None = Field(
        default=None, description="the directory, or the URI", examples=["/mnt/results"]
    )
    bucket: Bucket | None = Field(default=None, description="the bucket", examples=["my-bucket"])
    prefix: Annotated[str, AfterValidator(_normal)] | None = Field(
        default=None, description="prefix in the bucket", examples=["results"]
    )
    endpoint_url: Url | None = Field(
        default=None, description="URL of an S3-compatible store, if not Amazon's", examples=["http://minio:9000"]
    )
    access_key: Secret = Field(default=None, description="S3 access key", examples=["AKIA..."])
    secret_key: Secret = Field(default=None, description="S3 secret key", examples=["..."])
    session_token: Secret = Field(default=None, description="S3 session token, with temporary keys", examples=["..."])
    container: str | None = Field(default=None, min_length=1, description="Azure container", examples=["results"])
    account_url: Url | None = Field(
        default=None,
        description="URL of the Azure account",
        examples=["https://me.blob.core.windows.net"],
    )
    connection_string: Secret = Field(default=None, description="Azure connection string", examples=["..."])
    credential: Secret = Field(default=None, description="Azure credential, with account_url", examples=["..."])
    account_key: Secret = Field(default=None, description="Azure account key, with a URI", examples=["..."])
    sas_token: Secret = Field(default=None, description="Azure SAS token, with a URI", examples=["..."])
    save_experiment_best: int = Field(
        default=0, ge=0, description="number of the experiment's best checkpoints to keep", examples=[1]
    )
    save_trial_best: int = Field(
        default=1, ge=0, description="number of each trial's best checkpoints to keep", examples=[1]
    )
    save_trial_latest: int = Field(
        default=1, ge=0, description="number of each trial's latest checkpoints to keep", examples=[1]
    )

    def at(self, where: str | os.PathLike[str]) -> CheckpointStorage:
        """The same numbers of checkpoints in another place.

        Raises:
            ValueError: the place is invalid.
        """
        return CheckpointStorage(**{**_storage(where), **{name: getattr(self, name) for name in _RETENTION}})

    @property
    def location(self) -> Location | None:
        """Its location, None if not set; a ``shared_fs``'s ``storage_path`` is below its ``host_path``."""
        match self.type:
            case "s3":
                where = bucket_uri("s3", self.bucket, self.prefix, self.endpoint_url)
            case "gcs":
                where = bucket_uri("gs", self.bucket, self.prefix)
            case "azure":
                account = (self.account_url or "").rpartition("://")[2].partition(".")[0]
                where = f"az://{self.container}" + (f"?account_name={account}" if account else "")
            case "uri":
                where = self.storage_path or ""
            case _:
                parts = [part for part in (self.host_path, self.container_path, self.storage_path) if part is not None]
                return Location.of(Path(*parts).expanduser()) if parts else None
        secrets = {name: getattr(self, name) for name in SECRETS}
        given = tuple((name, value.get_secret_value()) for name, value in secrets.items() if value is not None)
        return Location(Location.of(where).uri, given)


#: Fields of ``checkpoint_storage`` that are never shown or stored.
SECRETS = (
    "access_key", "secret_key", "session_token", "connection_string", "credential", "account_key", "sas_token"
)  # fmt: skip


_RETENTION = ("save_experiment_best", "save_trial_best", "save_trial_latest")


#: The fields of each type of ``checkpoint_storage``, the first of them required.
STORAGE_FIELDS: dict[str | None, tuple[str, ...]] = {
    None: ("type", *_RETENTION),
    "directory": ("type", "container_path", "storage_path", *_RETENTION),
    "shared_fs": ("host_path", "storage_path", "type", *_RETENTION),
    "s3": ("bucket", "prefix", "access_key", "secret_key", "session_token", "endpoint_url", "type", *_RETENTION),
    "gcs": ("bucket", "prefix", "type", *_RETENTION),
    "azure": ("container", "connection_string", "account_url", "credential", "type", *_RETENTION),
    "uri": ("storage_path", *SECRETS, "type", *_RETENTION),
}
