"""The decisions of one run of an experiment: the driver, the lender of its groups, and the messages between them.

Pure: `dray.experiment.run.Run`, or a simulation, passes messages of other processes in and carries out the effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dray.experiment import driver, effects
from dray.experiment.driver import ExperimentDriver, OpenSearch
from dray.groups.lender import GroupKind, Lender
from dray.leases import messages
from dray.leases.effects import Reply, Tell
from dray.leases.messages import Message, TrialLeft
from dray.rpc.calls import Call
from dray.rpc.wire import checked

if TYPE_CHECKING:
    from dray.groups.borrowed import BorrowedGroups

OWN = (messages.WorkerArrived, messages.GroupReady, messages.GroupRetired, messages.GroupEnded)
"""Messages of the desk to the owner of the groups only. Messages about a lease go to both the owner and the driver."""


@dataclass(frozen=True, slots=True)
class ReadLogs:
    """Read the logs of a failed trial, which may take seconds, and then call `RunCore.logs_read`."""

    left: TrialLeft


class RunCore:
    """An `ExperimentDriver`, and a `Lender` or a connection to a server's lender.

    Args:
        name: the run's name, unique at the desk.
        write: writes records to the journal together, and forces them to the disk if one of them requires it.
        perform: carries out an effect that leaves this object, or shows a message.
        resume: a hint for error messages on how to resume the experiment.

    Attributes:
        effects: decisions that have not been carried out.
        lender: the lender of the groups, set by the caller; it emits its effects to `effects.append`.
    """

    lender: Lender | BorrowedGroups

    def __init__(
        self,
        name: str,
        opened: OpenSearch,
        *,
        write: Callable[[Sequence[effects.Append]], None],
        perform: Callable[[Any], None],
        resume: str = "resume it",
    ) -> None:
        self._name, self._records, self._write = name, opened.records, write
        self.effects: list[Any] = []
        self.driver = ExperimentDriver(opened, self.effects.append, resume=resume)
        self._alerts = opened.alerts
        self._reading, self._perform = 0, perform

    def begin(self, kind: GroupKind, share: Mapping[str, Any]) -> None:
        """Queue the trials that can run, for groups of this kind. This must be the first call."""
        if isinstance(self.lender, Lender):
            self.lender.add(self._name, kind, None, share)
        self.driver.begin(self._records)
        self._records.clear()

    @property
    def is_drained(self) -> bool:
        """Whether no trial has workers, or has failed and awaits the decision on its end."""
        return self.driver.is_drained and not self._reading

    def take(self, call: Call) -> None:
        """Handle a call from a worker or from Tune's handle."""
        if call.method in driver.CALLS:
            checked(getattr(self.driver, call.method), call, *call.args)
        else:
            self.lender.take(call)

    def hear(self, message: Message) -> None:
        """Handle a message from the desk."""
        self._perform(message)
        match message:
            case TrialLeft(outcome="errored"):
                self._expect(1)
                self._perform(ReadLogs(message))
            case (
                messages.LeaseGranted()
                | TrialLeft()
                | messages.GroupFreed()
                | messages.LeaseOver()
                | messages.WorkerUnfit()
            ):
                self.driver.on(message)

    def logs_read(self, left: TrialLeft) -> None:
        """Handle a trial's failure, completed from its logs."""
        self._expect(-1)
        if left.nodes and left.failure is not None and left.failure.node:  # the desk could not know
            self.lender.send("gpu_failed", self._name, left.trial, left.failure.node)
        self.driver.on(left)

    def _expect(self, more: int) -> None:
        """Reserve groups for trials whose logs are being read: these are neither queued nor leased."""
        self._reading += more
        self.lender.send("expect", self._name, self._reading)

    def settle(self) -> None:
        """Carry out all decisions: the journal's records first, then the others in order."""
        self.effects += map(effects.Append, self._alerts.due())
        self._carry_out_all()
        self.lender.step()  # last, since the desk may have been told that trials wait
        self._carry_out_all()

    def _carry_out_all(self) -> None:
        while self.effects:
            decided = self.effects.copy()
            self.effects.clear()
            if records := [each for each in decided if isinstance(each, effects.Append)]:
                raised = map(effects.Append, self._alerts.due(each.record for each in records if not each.is_alert))
                decided += (alerts := list(raised))
                self._write(records + alerts)
            for each in decided:
                self.carry_out(each)

    def carry_out(self, effect: Any) -> None:
        """Carry out one effect."""
        match effect:
            case Reply():
                effect.send()
            case effects.Append(record):  # written already
                if effect.is_alert:
                    self._perform(effects.Send(record))
            case effects.ToDesk(method, args):
                self.lender.send(method, self._name, *args)
            case Tell(client, message):
                if client == self._name or isinstance(message, OWN):
                    self.hear(message)
            case _:
                self._perform(effect)
