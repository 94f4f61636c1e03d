"""The experiments that were submitted to a server, in a journal: one that is killed and started again has them all.

Only what users want of each is recorded here, and how it ended. Where its search is, its own journal says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from dray.serve.control import NotSubmitted, Share, State

Wanted = Literal["run", "pause", "stop"]


@dataclass(slots=True, kw_only=True)
class Item:
    """An experiment that was submitted.

    Attributes:
        name: of its directory.
        submitted: Unix time in s.
        wanted: what its user wants of it.
        ended: its search has ended like this; "" if it has not.
        error: why; one line.
        restarts: how often its process has died in a row.
        extension: to extend it to, when it starts next: max_trials, max_length.
    """

    name: str
    path: Path
    submitted: float
    share: Share
    wanted: Wanted = "run"
    ended: Literal["", "COMPLETED", "ERROR"] = ""
    error: str = ""
    restarts: int = 0
    extension: dict[str, int] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    notes: str = ""

    @property
    def is_due(self) -> bool:
        """Whether it should have a process."""
        return self.wanted == "run" and not self.ended

    def state(self, *, is_up: bool, has_slots: bool, had_slots: bool, waits: bool, is_preempted: bool) -> State:
        """Its state for users.

        Args:
            is_up: whether it has a process.
            has_slots: whether its trials have slots now.
            had_slots: whether they have had some since the process started.
            waits: whether trials could run if there were slots.
            is_preempted: whether others have its slots; if not, their processes have died.
        """
        if self.ended:
            return self.ended
        if self.wanted != "run":
            if is_up:
                return "STOPPING"
            return "PAUSED" if self.wanted == "pause" else "STOPPED"
        if has_slots or (had_slots and not waits):  # without trials it decides what is next, or ends
            return "RUNNING"
        if had_slots:
            return "PREEMPTED" if is_preempted else "RESTARTING"
        return "RESTARTING" if self.restarts else "QUEUED"


class Queue:
    """The items, in the order of submission. `append` writes a record to the journal; if it raises, nothing has
    changed."""

    def __init__(
        self,
        records: Iterable[Mapping[str, Any]],
        append: Callable[[Mapping[str, Any]], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._items: dict[str, Item] = {}
        self._append, self._clock = append, clock
        for record in records:
            self._apply(record)

    def add(self, path: Path, share: Share) -> Item:
        """Add an experiment, which is wanted to run."""
        self._note({"event": "submitted", "path": str(path), "time": self._clock(), "share": asdict(share)}, path.name)
        return self._items[path.name]

    def want(self, name: str, wanted: Wanted) -> None:
        """Its user wants it to run, to pause or to stop. To run: what ended it, and earlier deaths, are forgotten."""
        self._note({"event": "wanted", "wanted": wanted}, name)

    def end(self, name: str, state: Literal["COMPLETED", "ERROR"], error: str = "") -> None:
        """Its search has ended."""
        self._note({"event": "ended", "state": state, "error": error}, name)

    def died(self, name: str, error: str, *, has_trained: bool) -> None:
        """Its process has died, by this error (one line); `has_trained`: since its last start."""
        self._note({"event": "died", "error": error, "has_trained": has_trained}, name)

    def extend(self, name: str, extension: Mapping[str, int]) -> None:
        """It is to run again, extended."""
        self._note({"event": "extended", "extension": dict(extension)}, name)

    def opened(self, name: str) -> None:
        """It has been opened, with its extension. To extend it again in the same way changes nothing."""
        if self._items[name].extension:
            self._note({"event": "extended", "extension": {}}, name)

    def set_share(self, name: str, share: Share) -> None:
        """Set what slots it gets."""
        self._note({"event": "share", "share": asdict(share)}, name)

    def annotate(self, name: str, tags: Iterable[str], notes: str) -> None:
        """Set its tags and notes."""
        self._note({"event": "annotated", "tags": list(tags), "notes": notes}, name)

    def remove(self, name: str) -> None:
        """Forget it: its directory was deleted."""
        self._note({"event": "removed"}, name)

    def item(self, name: str) -> Item:
        """The item of this name; raises `NotSubmitted`."""
        try:
            return self._items[name]
        except KeyError:
            raise NotSubmitted(f"experiment {name} was not submitted to this server") from None

    def items(self) -> list[Item]:
        """All, in the order of submission."""
        return list(self._items.values())

    def _note(self, record: dict[str, Any], name: str) -> None:
        record |= {"name": name}
        self._append(record)
        self._apply(record)

    def _apply(self, record: Mapping[str, Any]) -> None:
        name = cast("str", record["name"])
        if record["event"] == "submitted":
            share, path = Share(**record["share"]), Path(record["path"])
            self._items[name] = Item(name=name, path=path, submitted=record["time"], share=share)
            return
        item = self._items[name]
        match record["event"]:
            case "wanted":
                item.wanted = record["wanted"]
                if item.wanted == "run":
                    item.ended, item.error, item.restarts = "", "", 0
            case "ended":
                item.ended, item.error = record["state"], record["error"]
            case "died":
                item.restarts = 1 if record["has_trained"] else item.restarts + 1
                item.error = record["error"]
            case "extended":
                item.extension = record["extension"]
                if item.extension:
                    item.wanted, item.ended, item.error, item.restarts = "run", "", "", 0
            case "share":
                item.share = Share(**record["share"])
            case "annotated":
                item.tags, item.notes = tuple(record["tags"]), record["notes"]
            case "removed":
                del self._items[name]
