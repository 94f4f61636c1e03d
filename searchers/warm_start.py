"""What an earlier search has learned, kept so that another one can start from it: a few trials and their results.

    source = Source.of_records(Journal.read(path), rungs=(1, 4, 16), name="digits-1")
    sampler = MultiFidelitySampler(space, seed=7, rungs=(2, 8, 32), sources=[source])

A source is plain data of at most 240 results, so that a search can keep it in its own journal, and does not need the
earlier search again. The spaces of the two need not be equal: hyperparameters are matched by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from searchers.domains import Categorical, Nested
from searchers.events import Event
from searchers.numeric import Double, Int, Log
from searchers.recorded import RecordedMethod
from searchers.records import EVENT_KINDS, hparams_from_json, hparams_to_json
from searchers.samplers import Sampler
from searchers.search import Search
from searchers.space import Space

Point = Mapping[str, object]

_ANY = Space(root=Nested(domains=()))
"""The space of a search that is only read; points are matched by name to the space of the search that reads it."""
_DECIDES = EVENT_KINDS | {"start", "extended"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTrial:
    """A trial of an earlier search.

    Attributes:
        hparams: Its hyperparameters, constants included.
        values: Rungs to its results there: normalised losses, see `multi_fidelity.normalised`.
    """

    hparams: Point
    values: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What an earlier search has learned.

    Attributes:
        name: For messages.
        lengths: Of its rungs, as shares of the last one, ascending; the last is 1.
        trials: Those whose results are kept.
    """

    name: str
    lengths: tuple[float, ...]
    trials: tuple[SourceTrial, ...]

    @classmethod
    def of_records(cls, records: Sequence[Mapping[str, object]], *, rungs: Sequence[float], name: str) -> Source:
        """What the search of a journal's records has learned; without trials if none has a result.

        Args:
            records: `Journal.read(path)`.
            rungs: `Method.rungs`, as last extended. If there are none, a trial's last value counts once it has
                completed.
            name: For messages.

        Raises:
            JournalError: The records are damaged.
        """
        # Here, not above: numpy and scipy take a while.
        from searchers.multi_fidelity import MultiFidelitySampler

        learner = MultiFidelitySampler(_ANY, seed=0, rungs=rungs)
        search = tell_all(records, learner)
        values: dict[int, dict[int, float]] = {}
        for trial, rung, value in learner.learned():
            values.setdefault(trial, {})[rung] = value
        lengths = tuple(sorted(set(rungs))) or (1.0,)
        return cls(
            name=name,
            lengths=tuple(length / lengths[-1] for length in lengths),
            trials=tuple(
                SourceTrial(hparams=search.trials[trial].hparams or {}, values=values[trial])
                for trial in sorted(values)
            ),
        )

    def to_json(self) -> dict[str, object]:
        """As strict JSON."""
        trials = [
            {
                "hparams": hparams_to_json(trial.hparams),
                "values": [[rung, value] for rung, value in trial.values.items()],
            }
            for trial in self.trials
        ]
        return {"name": self.name, "lengths": list(self.lengths), "trials": trials}

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> Source:
        """The inverse of `to_json`; other keys are ignored."""
        match dict(record):
            case {"name": str(name), "lengths": list(lengths), "trials": list(trials)}:
                return cls(name=name, lengths=tuple(lengths), trials=tuple(map(_trial_from_json, trials)))
        raise ValueError(f"not a source of a warm start: {dict(record)!r:.200}")

    def within(self, space: Space) -> Iterator[SourceTrial]:
        """The trials that lie in another space: no hyperparameter that both have is outside of its range there, and
        there is one that both have."""
        for trial in self.trials:
            shared = list(_shared(space.root, trial.hparams))
            if shared and all(shared):
                yield trial

    def shares_with(self, space: Space) -> bool:
        """Whether there is a hyperparameter that both have; constants don't count."""
        return any(True for trial in self.trials for _ in _shared(space.root, trial.hparams))


def tell_all(records: Sequence[Mapping[str, object]], sampler: Sampler) -> Search:
    """Tell a sampler all events of a journal, but no extension: its rungs are those at the end.

    Returns:
        The search, read-only.

    Raises:
        JournalError: The records are damaged.
    """
    start = next((record for record in records if record.get("event") == "start"), {})
    return Search.replay(
        records,
        RecordedMethod(record for record in records if record.get("event") in _DECIDES),
        _ANY,
        seed=cast("int", start.get("seed", 0)),
        smaller_is_better=bool(start.get("smaller_is_better", True)),
        log=lambda record: None,
        sampler=_Told(sampler.tell),
    )


def _shared(domain: object, value: object) -> Iterator[bool]:
    """Of each hyperparameter of a space that a point has, too, whether the point's value is within its range."""
    match domain:
        case Nested(domains=domains):
            for name, inner in domains:
                if isinstance(value, Mapping) and name in value:
                    yield from _shared(inner, value[name])
        case Categorical():
            yield domain.find(value)[0] is not None
        case Int(minval=low, maxval=high) | Double(minval=low, maxval=high) | Log(bounds=(low, high)):
            yield isinstance(value, int | float) and low <= value <= high


def _trial_from_json(record: Mapping[str, object]) -> SourceTrial:
    match dict(record):
        case {"hparams": dict(hparams), "values": list(values)}:
            return SourceTrial(hparams=cast("Point", hparams_from_json(hparams)), values=dict(values))
    raise ValueError(f"not a trial of a warm start: {dict(record)!r:.200}")


class _Told:
    """A sampler that only listens, and not to extensions."""

    def __init__(self, tell: Callable[[Event, Point], None]) -> None:
        self.tell = tell

    def ask(self, trial: int) -> dict[str, object]:
        raise NotImplementedError("this search is read-only")
