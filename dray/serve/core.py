"""The server's decisions: its experiments, the worker groups that it lends to them, and their connections.

Pure: `dray.serve.manager.Manager`, or a simulation, passes messages of other processes in and carries out the effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dray.desk.connection import Call, Session
from dray.desk.desk import CLIENT_CALLS
from dray.desk.effects import Reply, Tell
from dray.desk.messages import ClientLeft
from dray.desk.wire import checked
from dray.groups.lender import GroupKind, Lender
from dray.serve import effects
from dray.serve.queue import Queue
from dray.serve.quota import Quota
from dray.serve.scheduler import Scheduler


class ServerCore:
    """A `Scheduler` and a `Lender`.

    Args:
        lend: makes the lender from the function that takes its effects.
        perform: carries out an effect that leaves this object, such as starting a process.
        quota_of: the quota of the token of this name.
    """

    def __init__(
        self,
        queue: Queue,
        lend: Callable[[Callable[[Any], None]], Lender],
        perform: Callable[[Any], None],
        *,
        quota_of: Callable[[str], Quota] = lambda owner: Quota(),
    ) -> None:
        self._effects: list[Any] = []
        self._perform = perform
        self.lender = lend(self._effects.append)
        self.scheduler = Scheduler(
            queue, self._effects.append, is_preempted=self.lender.is_preempted, quota_of=quota_of
        )
        self._sessions: dict[str, Session] = {}
        """The connections of the experiments' processes, by the name of the run."""

    def take(self, call: Call) -> None:
        """Handle a call from an experiment's process or from a worker."""
        if call.method == "add":
            checked(self._add, *call.args)
            self._sessions[call.args[0]] = call.session
            call.answer()
        elif call.method in CLIENT_CALLS:
            if call.args and call.args[0] in self.lender.desk.clients:
                checked(getattr(self.lender.desk, call.method), *call.args)
        else:
            self.lender.take(call)

    def _add(self, run: str, kind: GroupKind, endpoint: Any, share: Mapping[str, Any]) -> None:
        self.lender.add(run, kind, endpoint, {**share, **self.scheduler.claim(run)})

    def lost(self, session: Session) -> None:
        """Handle the end of a process. The desk forgets an experiment's run once its trials have left."""
        for run in [run for run, each in self._sessions.items() if each is session]:
            self.lender.desk.remove(run)

    def settle(self) -> None:
        """Decide what is due, and carry out all effects."""
        self.lender.step()
        self.scheduler.step(self.lender.demands, self.lender.slots())
        while self._effects:  # if one fails, the rest are carried out by the next call
            self.carry_out(self._effects.pop(0))

    def carry_out(self, effect: Any) -> None:
        """Carry out one effect."""
        match effect:
            case Reply():
                effect.send()
            case Tell(client, message):
                if (session := self._sessions.get(client)) is not None:
                    session.push(message)
            case ClientLeft(client=client):
                self._sessions.pop(client, None)
                self.scheduler.left(client)
            case effects.SetShare(run, priority, weight, most):
                self.lender.desk.set_share(run, priority, weight, most)
            case effects.RemoveRun(run):
                self.lender.desk.remove(run)
            case effects.Evict(run):
                self.lender.desk.evict(run)
            case _:
                self._perform(effect)
