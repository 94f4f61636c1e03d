"""The checkpoint store: write aside, commit all or nothing, verify, fall back; in a directory or an object store."""

from dray.storage.checkpoints import (
    CheckpointStore,
    commit,
    latest_checkpoint,
    list_checkpoints,
    opened,
    stage,
    store_at,
)
from dray.storage.errors import CheckpointError, StorageError, StorageFull, writing
from dray.storage.location import Location, bucket_uri
from dray.storage.manifest import determined_state, verify
from dray.storage.remote import RemoteDirectory

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "Location",
    "RemoteDirectory",
    "StorageError",
    "StorageFull",
    "bucket_uri",
    "commit",
    "determined_state",
    "latest_checkpoint",
    "list_checkpoints",
    "opened",
    "stage",
    "store_at",
    "verify",
    "writing",
]
