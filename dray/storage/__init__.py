"""The checkpoint store: write aside, commit all or nothing, verify, fall back."""

from dray.storage.checkpoints import (
    CheckpointError,
    CheckpointStore,
    commit,
    determined_state,
    latest_checkpoint,
    list_checkpoints,
    stage,
    verify,
)

__all__ = [
    "CheckpointError",
    "CheckpointStore",
    "commit",
    "determined_state",
    "latest_checkpoint",
    "list_checkpoints",
    "stage",
    "verify",
]
