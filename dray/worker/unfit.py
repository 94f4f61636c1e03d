"""Reporting that a worker can't run any trial."""

from __future__ import annotations

from dray.cluster.node_check import UnfitNode
from dray.code.startup_hook import HOOK, StartupHookFailed
from dray.errors import ConfigError, ImportRaisedError
from dray.leases.messages import Departure, Unfit
from dray.rpc.connection import Connection
from dray.worker.lease import TrialLease


def give_up(desk: Connection, client: str, group: str, error: Exception) -> None:
    """Report an error that any process in this one's place would have too, and wait until the client's run ends.
    `client`: the owner of the group, or the client whose code can't be loaded."""
    desk.broken(client, group, unfit_by(error)).result()


def unloaded(desk: Connection, group: str, lease: TrialLease, error: Exception, *, is_reused: bool) -> Departure:
    """Report that the code of a leased trial can't be loaded. If it is a variant's, this ends its trial; otherwise it
    ends the run. If this process had other code (`is_reused`), which may be why the import has failed, the trial is
    tried in a new one first."""
    if is_reused and isinstance(error, ImportRaisedError):
        return Departure(outcome="unloaded", alone=True)
    if lease.code is None or isinstance(error, UnfitNode | StartupHookFailed):
        give_up(desk, lease.client, group, error)
        return Departure(outcome="interrupted")
    faults = error.faults if isinstance(error, ConfigError) else [("entrypoint", repr(error))]
    why = "; ".join(f"{field}: {what}" for field, what in faults)
    return Departure(outcome="errored", error=f"its code can't be loaded: {why}", fatal=True)


def unfit_by(error: Exception) -> Unfit:
    """The message for the user about an error on a worker."""
    match error:
        case ConfigError():
            return Unfit(faults=error.faults, source=error.source)
        case UnfitNode() if error.trouble.kind in ("unseen", "refused"):
            return Unfit(faults=[("checkpoint_storage", str(error))], resumable=True)
        case UnfitNode():
            what = f"a trial can't run on the node that it was placed on: {error}"
            return Unfit(message=what, resumable=True)
        case StartupHookFailed():
            return Unfit(faults=[(HOOK, str(error))], source="The model's directory")
        case ImportError():
            return Unfit(message=str(error), resumable=True)
    return Unfit(message=f"a worker can't run any trial: {error!r}")
