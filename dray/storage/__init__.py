"""Checkpoint stores, in a directory or an object store: stage, commit atomically, verify, fall back."""

from dray.storage.checkpoints import CheckpointStore, opened, store_at
from dray.storage.errors import CheckpointError, StorageError, StorageFull, writing
from dray.storage.location import Location, bucket_uri
from dray.storage.manifest import determined_state, holds_a_trial, verify
from dray.storage.remote import RemoteDirectory

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "Location",
    "RemoteDirectory",
    "StorageError",
    "StorageFull",
    "bucket_uri",
    "determined_state",
    "holds_a_trial",
    "opened",
    "store_at",
    "verify",
    "writing",
]
