"""The server's decisions: its experiments, the worker groups that it lends to them, and their connections.

Pure: `dray.serve.manager.Manager`, or a simulation, passes messages of other processes in and carries out the effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dray.groups.lender import GroupKind, Lender
from dray.leases.desk import CLIENT_CALLS
from dray.leases.effects import Reply, Tell
from dray.leases.messages import ClientLeft
from dray.leases.shares import Demand
from dray.rpc.calls import Call, Session
from dray.rpc.wire import checked
from dray.serve import effects
from dray.serve.control import ACTIVE, QueueState, Share
from dray.serve.lanes import Lanes
from dray.serve.queue import Item, Queue
from dray.serve.queue_order import Part, effects_of, next_of, order_of, why_waits
from dray.serve.quota import Quota
from dray.serve.scheduler import Scheduler, experiment_of


class ServerCore:
    """A `Scheduler` and a `Lender`.

    Args:
        lend: makes the lender from the function that takes its effects.
        perform: carries out an effect that leaves this object, such as starting a process.
        quota_of: the quota of the token of this name.
        lanes: the record of what each slot trained.
    """

    def __init__(
        self,
        queue: Queue,
        lend: Callable[[Callable[[Any], None]], Lender],
        perform: Callable[[Any], None],
        *,
        quota_of: Callable[[str], Quota] = lambda owner: Quota(),
        lanes: Lanes | None = None,
    ) -> None:
        self.lanes = lanes or Lanes()
        self._effects: list[Any] = []
        self._perform = perform
        self.lender = lend(self._effects.append)
        self.scheduler = Scheduler(
            queue,
            self._effects.append,
            is_preempted=self.lender.is_preempted,
            why_waits=self._why_waits,
            quota_of=quota_of,
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
        self.lanes.on(effect)
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

    # ------------------------------------------------------------------ what is known
    def _why_waits(self, demand: Demand) -> str:
        lender = self.lender
        wait = lender.groups_wait(demand)
        return why_waits(demand, lender.demands.values(), lender.given, lender.most_slots(demand.kind), wait)

    def queue(self, seconds: float) -> QueueState:
        """The queue, and what the slots did in the last `seconds`."""
        entries = sorted(self.scheduler.experiments(), key=lambda each: (each.state == "PAUSED", each.share.priority))
        return QueueState(
            entries=[each for each in entries if each.state in (*ACTIVE, "PAUSED")],
            next=next_of({experiment_of(run): self._place(run, each) for run, each in self.lender.demands.items()}),
            slots=self.lender.slots(),
            lanes=self.lanes.view(seconds, self.lender.slots_up()),
        )

    def foresee(self, shares: Mapping[str, Share], ask: Callable[[Item], Demand | None]) -> list[str]:
        """What will happen if experiments get these shares, in sentences.

        `ask`: guesses the demand of an experiment whose process is not connected.
        """
        return effects_of(self.parts({}, ask), self.parts(shares, ask), shares)

    def parts(self, shares: Mapping[str, Share], ask: Callable[[Item], Demand | None]) -> dict[str, Part]:
        """Each experiment's part of the slots if experiments have these shares: divided on copies, by the code that
        divides."""
        lender, up = self.lender, self.scheduler.supposed(shares)
        demands = dict(lender.demands)
        asked = {experiment_of(run) for run in demands}
        guesses = [each for item in up if item.name not in asked and (each := ask(item)) is not None]
        demands |= {each.name: each for each in guesses}
        share_of = {item.name: item.share for item in up}
        for run, demand in demands.items():
            if (share := share_of.get(experiment_of(run))) is not None:
                most = None if share.max_slots is None else share.max_slots * demand.unit
                new = replace(demand, priority=share.priority, weight=share.weight, max_slots=most)
                demands[run] = new
        given = lender.supposed(demands.values())
        return {
            experiment_of(run): Part(
                slots=given.get(run, 0) * demand.size / demand.unit,
                has=demand.has * demand.size / demand.unit,
                priority=demand.priority,
                first=self._place(run, demand),
                is_up=run in lender.demands,
            )
            for run, demand in demands.items()
        }

    def _place(self, run: str, demand: Demand) -> tuple[float, ...] | None:
        client = self.lender.desk.clients.get(run)
        return order_of(demand, 0.0 if client is None else client.had)
