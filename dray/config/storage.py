"""The section ``checkpoint_storage``: the place of experiments and checkpoints, and the number of checkpoints to keep.

Each type of storage has a model with just its fields.
"""

from __future__ import annotations

import os
import posixpath
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, WithJsonSchema, model_validator
from typing_extensions import Self

from dray.config.determined_fields import CONTAINER
from dray.config.section import Directory, Kinds, Section, Url, unknown_kind
from dray.masking import MASK
from dray.storage import Location, bucket_uri


def _bucket(name: str) -> str:
    if ":" in name or "@" in name:
        raise ValueError("must be only a name; give credentials as access_key and secret_key, or in the environment")
    return name


def _normal(prefix: str) -> str:
    """A prefix as Determined normalizes it: a/b for /a/.//b/."""
    if ".." in prefix.split("/"):
        raise ValueError(f"must not contain .., got {prefix!r}; write the path itself")
    return posixpath.normpath(f"/{prefix}").strip("/")


def _true_secret(raw: object) -> object:
    if raw == MASK:
        raise ValueError(
            "is masked, as det experiment config shows it; write the real key, or omit it to use the environment's"
        )
    return raw


Bucket: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_bucket)]
Prefix: TypeAlias = Annotated[str, AfterValidator(_normal)]
Secret: TypeAlias = Annotated[
    SecretStr | None, Field(exclude=True), BeforeValidator(_true_secret, json_schema_input_type=str)
]

_TYPE = Field(description="the kind of storage")
_STORAGE_PATH = "the directory; for shared_fs, a directory below host_path; for uri, the URI"


class CheckpointStorage(Section):
    """The place of experiments and checkpoints, and the number of checkpoints to keep.

    Without a ``type``, the place is ``DRAY_STORAGE``, or else ``~/dray_results``. It is a directory that every node
    sees, or an object store for the checkpoints. The section may also be just a path or a URI, such as
    ``s3://bucket/results``. Its secrets are never stored or shown; without them, credentials come from the environment.
    """

    place: ClassVar[str] = "checkpoint_storage"

    type: Annotated[str | None, WithJsonSchema({"type": "null"})] = Field(
        default=None, description="the kind of storage"
    )
    save_experiment_best: int = Field(
        default=0, ge=0, description="number of the experiment's best checkpoints to keep", examples=[1]
    )
    save_trial_best: int = Field(
        default=1, ge=0, description="number of each trial's best checkpoints to keep", examples=[1]
    )
    save_trial_latest: int = Field(
        default=1, ge=0, description="number of each trial's latest checkpoints to keep", examples=[1]
    )

    @property
    def uri(self) -> str | None:
        """The path, or the URI without secrets; None if it is not set."""
        return None

    @property
    def location(self) -> Location | None:
        """The location with its secrets; None if it is not set."""
        if self.uri is None:
            return None
        secrets = {name: getattr(self, name, None) for name in SECRETS}
        given = tuple((name, value.get_secret_value()) for name, value in secrets.items() if value is not None)
        return Location(Location.of(self.uri).uri, given)

    def at(self, where: str | os.PathLike[str]) -> CheckpointStorage:
        section = _section_at(where)
        kept = {name: getattr(self, name) for name in CheckpointStorage.model_fields if name != "type"}
        return STORAGES[section["type"]].model_validate(section | kept)


class DirectoryStorage(CheckpointStorage):
    """A directory that every node sees."""

    type: Literal["directory"] = _TYPE
    container_path: Directory | None = Field(
        default=None,
        description="the directory, by its name in Determined; there is no container",
        examples=["/mnt/results"],
    )
    storage_path: Directory | None = Field(default=None, description=_STORAGE_PATH, examples=["/mnt/results"])

    @model_validator(mode="after")
    def _has_one_path(self) -> Self:
        paths = [name for name in ("container_path", "storage_path") if getattr(self, name) is not None]
        if len(paths) != 1:
            raise ValueError(
                "type directory needs exactly one of container_path and storage_path, "
                f"got {' and '.join(paths) or 'none'}; for example {{type: directory, container_path: /mnt/results}}"
            )
        return self

    @property
    def uri(self) -> str | None:
        return str(Path(self.container_path or self.storage_path or "").expanduser())


class SharedFSStorage(CheckpointStorage):
    """A directory on a file system that every node mounts."""

    type: Literal["shared_fs"] = _TYPE
    host_path: Directory = Field(description="the shared directory", examples=["/mnt/results"])
    storage_path: Directory | None = Field(default=None, description=_STORAGE_PATH, examples=["checkpoints"])
    checkpoint_path: str | None = Field(
        default=None, description="older name of storage_path", examples=["checkpoints"]
    )

    @classmethod
    def ignored_fields(cls) -> dict[str, str]:
        return {**super().ignored_fields(), "container_path": CONTAINER + "the directory is host_path, on every node"}

    @classmethod
    def with_current_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        # As in Determined, it has no effect if storage_path is given.
        older = raw.pop("checkpoint_path", None)
        return raw if older is None else {"storage_path": older, **raw}

    @property
    def uri(self) -> str | None:
        return str(Path(self.host_path, self.storage_path or "").expanduser())


class _BucketStorage(CheckpointStorage):
    bucket: Bucket = Field(description="the bucket", examples=["my-bucket"])
    prefix: Prefix | None = Field(default=None, description="prefix in the bucket", examples=["results"])


class _S3Keys(CheckpointStorage):
    access_key: Secret = Field(default=None, description="S3 access key", examples=["AKIA..."])
    secret_key: Secret = Field(default=None, description="S3 secret key", examples=["..."])
    session_token: Secret = Field(default=None, description="S3 session token, with temporary keys", examples=["..."])


class _AzureKeys(CheckpointStorage):
    connection_string: Secret = Field(default=None, description="Azure connection string", examples=["..."])
    credential: Secret = Field(default=None, description="Azure credential, with account_url", examples=["..."])


class S3Storage(_BucketStorage, _S3Keys):
    """A bucket of S3 or of an S3-compatible store."""

    type: Literal["s3"] = _TYPE
    endpoint_url: Url | None = Field(
        default=None, description="URL of an S3-compatible store, if not Amazon's", examples=["http://minio:9000"]
    )

    @property
    def uri(self) -> str | None:
        return bucket_uri("s3", self.bucket, self.prefix, self.endpoint_url)


class GCSStorage(_BucketStorage):
    """A bucket of Google Cloud Storage."""

    type: Literal["gcs"] = _TYPE

    @property
    def uri(self) -> str | None:
        return bucket_uri("gs", self.bucket, self.prefix)


class AzureStorage(_AzureKeys):
    """A container of Azure Blob Storage."""

    type: Literal["azure"] = _TYPE
    container: str = Field(min_length=1, description="Azure container", examples=["results"])
    account_url: Url | None = Field(
        default=None, description="URL of the Azure account", examples=["https://me.blob.core.windows.net"]
    )

    @property
    def uri(self) -> str | None:
        account = (self.account_url or "").rpartition("://")[2].partition(".")[0]
        return f"az://{self.container}" + (f"?account_name={account}" if account else "")


class URIStorage(_S3Keys, _AzureKeys):
    """The URI of an object store."""

    type: Literal["uri"] = _TYPE
    storage_path: Directory = Field(description=_STORAGE_PATH, examples=["s3://my-bucket/results"])
    account_key: Secret = Field(default=None, description="Azure account key, with a URI", examples=["..."])
    sas_token: Secret = Field(default=None, description="Azure SAS token, with a URI", examples=["..."])

    @property
    def uri(self) -> str | None:
        return self.storage_path


#: The model of each type of storage.
STORAGES: dict[str, type[CheckpointStorage]] = {
    "directory": DirectoryStorage,
    "shared_fs": SharedFSStorage,
    "s3": S3Storage,
    "gcs": GCSStorage,
    "azure": AzureStorage,
    "uri": URIStorage,
}
_REMOVED = {"hdfs": "directory, with HDFS mounted, or s3, gcs or azure"}
#: Fields of ``checkpoint_storage`` that are never shown or stored.
SECRETS = (*_S3Keys.__annotations__, *_AzureKeys.__annotations__, "account_key", "sas_token")


class AnyStorage(  # type: ignore[misc]
    S3Storage, GCSStorage, AzureStorage, URIStorage, SharedFSStorage, DirectoryStorage
):
    """The fields of all types."""

    type: Annotated[str | None, unknown_kind(STORAGES, _REMOVED)] = Field(  # type: ignore[assignment]
        default=None, description="the kind of storage", examples=["directory"]
    )


BY_TYPE = Kinds("type", STORAGES, unknown=AnyStorage, absent=CheckpointStorage)


def _section_at(where: str | os.PathLike[str]) -> dict[str, Any]:
    """The section for a path, or for a URI with its filesystem's options, as in Ray."""
    if not os.fspath(where):
        raise ValueError("must not be empty; for example checkpoint_storage: s3://bucket/results")
    location = Location.of(where)
    if location.is_local:
        return {"type": "directory", "container_path": location.uri}
    for name, _ in location.secrets:
        if name not in SECRETS:
            raise ValueError(f"{name} can't be given in a storage URI; set it in the environment")
    return {"type": "uri", "storage_path": location.uri, **dict(location.secrets)}


def as_section(raw: object) -> object:
    """The section for a path or a URI; credentials in a URI become separate fields, which are not stored."""
    if isinstance(raw, str | os.PathLike):
        return _section_at(raw)
    if isinstance(raw, dict) and isinstance(where := raw.get("storage_path"), str) and "://" in where:
        return raw | _section_at(where)
    return raw


_ByType: TypeAlias = Annotated[CheckpointStorage, BY_TYPE]
Storage: TypeAlias = Annotated[
    _ByType, BeforeValidator(as_section, json_schema_input_type=Annotated[str, Field(min_length=1)] | _ByType)
]
