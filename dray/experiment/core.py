"""One run of an experiment without what is around it: the driver, the lender of its groups, and what they tell each
other.

Pure, like both of them: `dray.experiment.run.Run`, or a simulation, passes on what other processes say, and carries out
what is for the world outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dray.desk import messages
from dray.desk.connection import Call
from dray.desk.effects import Reply, Tell
from dray.desk.messages import Message, TrialLeft
from dray.desk.wire import checked
from dray.experiment import driver, effects
from dray.experiment.driver import ExperimentDriver
from dray.experiment.open_search import OpenSearch
from dray.groups.lender import GroupKind, Lender

if TYPE_CHECKING:
    from dray.groups.lent import LentGroups

OWN = (messages.WorkerArrived, messages.GroupReady, messages.GroupRetired, messages.GroupEnded)
"""What the desk tells the owner of the groups alone; what concerns a lease it tells both the owner and the driver."""


@dataclass(frozen=True, slots=True)
class ReadLogs:
    """Read what the logs of a trial that failed say, which may take seconds; then `RunCore.logs_read`."""

    left: TrialLeft


class RunCore:
    """An `ExperimentDriver` and a `Lender`, or a connection with a server's.

    Args:
        name: of the run, unique at the desk.
        write: writes records to the journal, together, and forces them to the disk if one waits for that.
        perform: carries out an effect for the world outside, or shows a message.
        resume: says how to resume the experiment, for errors.

    Attributes:
        effects: what was decided, and is not carried out.
        lender: of the groups, to be set; it emits its effects to `effects.append`.
    """

    lender: Lender | LentGroups

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
        self._reading, self._perform = 0, perform

    def begin(self, kind: GroupKind, share: Mapping[str, Any]) -> None:
        """Queue the trials that can run, for groups of this kind. The first call."""
        if isinstance(self.lender, Lender):
            self.lender.add(self._name, kind, None, share)
        self.driver.begin(self._records)
        self._records.clear()

    @property
    def is_drained(self) -> bool:
        """Whether no trial has workers, or has failed without its end being decided."""
        return self.driver.is_drained and not self._reading

    def take(self, call: Call) -> None:
        """A worker or Tune's handle calls."""
        if call.method in driver.CALLS:
            checked(getattr(self.driver, call.method), call, *call.args)
        else:
            self.lender.take(call)

    def hear(self, message: Message) -> None:
        """The desk has sent this message."""
        self._perform(message)
        match message:
            case TrialLeft(outcome="errored"):
                self._expect(1)
                self._perform(ReadLogs(message))
            case messages.LeaseGranted() | TrialLeft() | messages.LeaseOver() | messages.WorkerUnfit():
                self.driver.on(message)

    def logs_read(self, left: TrialLeft) -> None:
        """This is how a trial failed, with what its logs say."""
        self._expect(-1)
        self.driver.on(left)

    def _expect(self, more: int) -> None:
        """Have groups for the trials whose logs are read: they are neither queued nor leased."""
        self._reading += more
        self.lender.send("expect", self._name, self._reading)

    def settle(self) -> None:
        """Carry out what was decided: the journal's records first, then the rest in its order."""
        self.lender.step()
        while self.effects:
            decided = self.effects.copy()
            self.effects.clear()
            if records := [each for each in decided if isinstance(each, effects.Append)]:
                self._write(records)
            for each in decided:
                self.carry_out(each)

    def carry_out(self, effect: Any) -> None:
        """Pass on an effect, or have it performed."""
        match effect:
            case Reply():
                effect.send()
            case effects.Append():  # is written
                pass
            case effects.ToDesk(method, args):
                self.lender.send(method, self._name, *args)
            case Tell(client, message):
                if client == self._name or isinstance(message, OWN):
                    self.hear(message)
            case _:
                self._perform(effect)
