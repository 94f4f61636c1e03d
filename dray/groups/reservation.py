"""Slots that are reserved on a Ray cluster."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from itertools import pairwise

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from dray.groups.effects import Reserve, SlotsReserved
from dray.groups.elastic import SETTLE_S

POLL_S = 0.05
"""How often a new reservation is checked; after `SETTLE_S`, every `RETRY_S`."""
RETRY_S = 1.0


class Reservation:
    """Slots that are reserved for a group that is to start, or to grow.

    There is a placement group for each step from one size to the next. While it is pending, an autoscaler sees the
    demand; once it is created, nobody else gets its resources; and it ends with the driver. `report` is called whenever
    the number of slots has changed.
    """

    def __init__(self, asked: Reserve, report: Callable[[SlotsReserved], object]) -> None:
        self._room, self._report = asked.room, report
        labels, sizes = dict(asked.slots.labels), [more - less for less, more in pairwise(asked.sizes)]
        self._steps = [
            placement_group(
                [asked.slots.resources] * slots,
                name=f"dray-room/{uuid.uuid4().hex[:8]}",
                bundle_label_selector=[labels] * slots if labels else None,
            )
            for slots in sizes
        ]
        self._is_released = threading.Event()
        threading.Thread(target=self._watch, name="dray-room", daemon=True).start()

    def release(self) -> None:
        """Release the slots."""
        self._is_released.set()
        with contextlib.suppress(ray.exceptions.RayError):  # Ray may be gone
            for step in self._steps:
                remove_placement_group(step)

    def _watch(self) -> None:
        began, before = time.monotonic(), 0
        while not self._is_released.wait(POLL_S if time.monotonic() < began + SETTLE_S else RETRY_S):
            with contextlib.suppress(ray.exceptions.RayError):
                created = (step for step in self._steps if placement_group_table(step)["state"] == "CREATED")
                if (slots := sum(step.bundle_count for step in created)) != before:
                    before = slots
                    self._report(SlotsReserved(room=self._room, slots=slots))
