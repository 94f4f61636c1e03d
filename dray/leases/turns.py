"""Whose turn it is: the trials that get the next group of a shape, and the groups that must be left for others."""

from __future__ import annotations

import math
from collections.abc import Collection

from dray.leases.lease import Client, Group
from dray.leases.shares import TINY


def waiting(clients: Collection[Client], shape: str, *, used: bool) -> list[tuple[Client, int]]:
    """Clients with a trial that waits for a group of this shape, and that trial, in the order of their turns.
    `used`: whether the group has run other trials."""
    found = [
        (each, trial)
        for each in clients
        if each.shape == shape and (trial := each.next_trial(used=used)) is not None and _is_in_turn(each, clients)
    ]
    return sorted(found, key=lambda each: (each[0].priority, each[0].lead))


def _is_in_turn(client: Client, clients: Collection[Client]) -> bool:
    """Whether the limit of a client's account lets it have another group. While the next client of the account in turn
    needs more slots than are left, its others get none, or they would take each slot that returns."""
    if client.account_slots is None:
        return True
    mates = (each for each in clients if each.account == client.account and each.next_trial() is not None)
    first = min(mates, key=lambda each: (each.priority, each.lead))
    return _account_room(client, clients) >= 1 and _account_room(first, clients) >= 1


def _account_room(client: Client, clients: Collection[Client]) -> float:
    """The number of further groups that the limit of a client's account allows."""
    if client.account_slots is None:
        return math.inf
    held = sum(each.slots / each.unit for each in clients if each.account == client.account)
    return math.floor((client.account_slots - held) / (client.size / client.unit) + TINY)


def outranked(clients: Collection[Client], groups: Collection[Group], shape: str) -> list[Group]:
    """The groups of a shape that must be left for waiting trials with a higher priority."""
    groups = [group for group in groups if group.shape == shape and not group.retiring]
    leases = [group.lease for group in groups if group.lease is not None]
    leases.sort(key=lambda lease: (-lease.client.priority, -lease.number))
    yielding = sum(group.lease is None or group.lease.state in ("moving", "leaving") for group in groups)
    found: list[Group] = []
    for client, _ in waiting(clients, shape, used=True):
        room = math.inf if client.max_slots is None else (client.max_slots - client.slots) // client.size
        renewed = sum(ended is not None for trial, ended in client.new.items() if trial in client.queue)
        wanted = int(min(len(client.queue) - renewed, room, _account_room(client, clients)))
        wanted, yielding = wanted - yielding, max(yielding - wanted, 0)
        for lease in leases:
            if wanted <= 0 or lease.client.priority <= client.priority:
                break
            if lease.state == "running" and lease.group not in found:
                found.append(lease.group)
                wanted -= 1
    return found


def ends_first(group: Group) -> tuple[bool, bool, int, int]:
    """Sort key: groups that end anyway, idle ones, then those with trials of the lowest priority, the latest first."""
    lease = group.lease
    priority, number = (0, 0) if lease is None else (lease.client.priority, lease.number)
    return not group.retiring, lease is not None, -priority, -number
