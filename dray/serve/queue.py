"""The experiments that were submitted to a server, in a journal that survives the server.

It records only the user's wishes for each experiment, and how it ended. The experiment's own journal has its progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from dray.serve.control import Share
from dray.serve.refusals import NotSubmitted, has_ended
from searchers.errors import DamagedFile
from searchers.journal import Journal
from searchers.rows import NUMBER, by_kind, damaged_line, has_fields

ItemState = Literal["run", "pause", "stop", "COMPLETED", "ERROR"]
"""The state that the user wants for an experiment, or the outcome of its search."""

_ENDED = ("COMPLETED", "ERROR")


_fields_of = by_kind(
    "event",
    {
        "submitted": {"path": (str,), "time": NUMBER, "share": (dict,), "owner": (str, NoneType)}
        | {"budget": (dict, NoneType), "request": (str, NoneType)},
        "wanted": {"wanted": (str,), "error": (str, NoneType)},
        "ended": {"state": (str,), "error": (str,)},
        "died": {"error": (str,), "has_trained": (bool,)},
        "extended": {"extension": (dict,), "budget": (dict, NoneType)},
        "share": {"share": (dict,)},
        "annotated": {"tags": (list,), "notes": (str,)},
        "spent": {"spent": (dict,)},
    },
    {"name": (str,)},
)
_share = has_fields({"priority": (int,), "weight": NUMBER, "max_slots": (int, NoneType)})


def check(record: Any) -> str:
    """What is wrong with a record of the queue; "" if it may have been written."""
    if what := _fields_of(record):
        return what
    if (state := record.get("wanted") or record.get("state") or "run") not in get_args(ItemState):
        return f"its state is {state!r:.60}"
    if (share := record.get("share")) is not None and (what := _share(share)):
        return f"in share, {what}"
    for name in ("budget", "spent"):
        if any(type(total) not in NUMBER for total in (record.get(name) or {}).values()):
            return f"{name} is {record[name]!r:.60}"
    return ""


def open_queue(journal: Journal) -> Queue:
    """The queue that a server's journal records; `DamagedFile` if it can't be read."""
    return Queue(Journal.read(journal.path, check), journal.append, where=journal.path)


@dataclass(slots=True, kw_only=True)
class Item:
    """An experiment that was submitted."""

    name: str  # its directory's name
    path: Path
    submitted: float  # Unix time in s
    share: Share
    state: ItemState = "run"
    error: str = ""  # one line: why it has ended, or its process last died
    restarts: int = 0  # how often in a row its process has died
    # New values of max_trials, max_length or limits, applied at its next start
    extension: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    notes: str = ""
    owner: str = ""  # the name of the token that submitted it; "": the server's own
    budget: dict[str, float] = field(default_factory=dict)  # its totals, by names of `dray.serve.quota.UNITS`
    spent: dict[str, float] = field(default_factory=dict)  # when its process last ended
    request: str = ""  # the id of the request that created it, if that may be sent again


class Queue:
    """The items, in the order of submission. `append` writes a record to the journal; if it raises, nothing changes.

    Attributes:
        deleted_spent: what each owner's deleted experiments had spent.
    """

    def __init__(
        self,
        records: Iterable[Mapping[str, Any]],
        append: Callable[[Mapping[str, Any]], None],
        *,
        where: object = "queue",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._items: dict[str, Item] = {}
        self.deleted_spent: dict[str, dict[str, float]] = {}
        self._append, self._clock = append, clock
        for line, record in enumerate(records, start=1):
            try:
                self._apply(record)
            except (LookupError, TypeError):  # such as an experiment that was never submitted
                raise DamagedFile(damaged_line(where, line, f"it does not fit those before: {record}")) from None

    def add(
        self,
        path: Path,
        share: Share,
        *,
        owner: str = "",
        budget: Mapping[str, float] | None = None,
        request: str = "",
    ) -> Item:
        """Add an experiment, in the state "run"."""
        record = {"event": "submitted", "path": str(path), "time": self._clock(), "share": asdict(share)}
        record |= {"request": request} if request else {}
        self._note(record | ({"owner": owner, "budget": dict(budget or {})} if owner else {}), path.name)
        return self._items[path.name]

    def move(self, name: str, state: ItemState, error: str = "") -> None:
        """Move an experiment to the state that is wanted, or that its search has ended in. "run" clears its error and
        its restarts. After the end of its search "run" alone is allowed; other states are `WrongState`."""
        before = self.item(name).state
        if before in _ENDED and state != "run":
            raise has_ended(name, before)
        if state in _ENDED:
            self._note({"event": "ended", "state": state, "error": error}, name)
        else:
            self._note({"event": "wanted", "wanted": state} | ({"error": error} if error else {}), name)

    def died(self, name: str, error: str, *, has_trained: bool) -> None:
        """Record the death of an experiment's process. `has_trained`: since the process started."""
        self._note({"event": "died", "error": error, "has_trained": has_trained}, name)

    def extend(self, name: str, extension: Mapping[str, Any], budget: Mapping[str, float] | None = None) -> None:
        """Queue an experiment again, with more or longer trials, or other limits. `budget`: its new totals, if any."""
        known = {} if budget is None else {"budget": dict(budget)}
        self._note({"event": "extended", "extension": dict(extension), **known}, name)

    def opened(self, name: str) -> None:
        """Record that a process has applied the experiment's extension. Applying it twice would change nothing."""
        if self._items[name].extension:
            self.extend(name, {})

    def change(self, name: str, change: Mapping[str, Any]) -> None:
        """Change fields of an experiment's share, its tags or its notes."""
        item = self.item(name)
        share = asdict(item.share)
        if not share.keys().isdisjoint(change):
            share |= {field: value for field, value in change.items() if field in share}
            self._note({"event": "share", "share": share}, name)
        if "tags" in change or "notes" in change:
            words = {"tags": list(change.get("tags", item.tags)), "notes": change.get("notes", item.notes)}
            self._note({"event": "annotated", **words}, name)

    def spent(self, name: str, spent: Mapping[str, float]) -> None:
        """Record what an experiment has spent."""
        self._note({"event": "spent", "spent": dict(spent)}, name)

    def remove(self, name: str) -> None:
        """Forget an experiment whose directory was deleted."""
        self._note({"event": "removed"}, name)

    def item(self, name: str) -> Item:
        """The item of this name; `NotSubmitted` if there is none."""
        if (item := self.find(name)) is None:
            raise NotSubmitted(name)
        return item

    def find(self, name: str) -> Item | None:
        """The item of this name, if there is one."""
        return self._items.get(name)

    def supposed(self, shares: Mapping[str, Share]) -> Queue:
        """A copy in which experiments have these shares; it is not recorded."""
        other = Queue((), lambda record: None)
        other._items = {name: replace(item, share=shares.get(name, item.share)) for name, item in self._items.items()}
        return other

    def items(self) -> list[Item]:
        """All items, in the order of submission."""
        return list(self._items.values())

    def _note(self, record: dict[str, Any], name: str) -> None:
        record |= {"name": name}
        self._append(record)
        self._apply(record)

    def _apply(self, record: Mapping[str, Any]) -> None:
        name, event = str(record["name"]), record["event"]
        if event == "submitted":
            self._forget(name)  # a deleted one may have had the same name
            share, path = Share(**record["share"]), Path(record["path"])
            item = self._items[name] = Item(name=name, path=path, submitted=record["time"], share=share)
            item.owner, item.budget = record.get("owner") or "", record.get("budget") or {}
            item.request = record.get("request") or ""
            return
        item = self._items[name]
        match event:
            case "wanted":
                item.state, item.error = record["wanted"], record.get("error", item.error)
            case "ended":
                item.state, item.error = record["state"], record["error"]
            case "died":
                item.restarts = 1 if record["has_trained"] else item.restarts + 1
                item.error = record["error"]
            case "extended":
                item.extension = record["extension"]
                item.budget = record.get("budget", item.budget)
                item.state = "run" if item.extension else item.state
            case "share":
                item.share = Share(**record["share"])
            case "annotated":
                item.tags, item.notes = tuple(record["tags"]), record["notes"]
            case "spent":
                item.spent = record["spent"]
            case "removed":
                self._forget(name)
        if item.state == "run" and (event == "wanted" or record.get("extension")):
            item.error, item.restarts = "", 0

    def _forget(self, name: str) -> None:
        item = self._items.pop(name, None)
        if item is not None and item.owner:
            gone = self.deleted_spent.setdefault(item.owner, {})
            gone |= {unit: gone.get(unit, 0.0) + spent for unit, spent in item.spent.items()}


def extended(before: Mapping[str, Any], extension: Mapping[str, Any]) -> dict[str, Any]:
    """An extension that no process has applied yet, with a further one.

    >>> extended({"max_trials": 8, "budget": {"usd": 5}}, {"budget": {"slot_hours": 2}})
    {'max_trials': 8, 'budget': {'usd': 5, 'slot_hours': 2}}
    """
    found = dict(before) | dict(extension)
    for name in ("budget", "prices"):
        if isinstance(before.get(name), Mapping) and isinstance(extension.get(name), Mapping):
            found[name] = before[name] | extension[name]
    return found
