"""Events, actions and hyperparameters as strict JSON for the journal; NaN and infinities are encoded as strings.

Numbers of other types (NumPy's, `Decimal`, a tensor of one element) become ints and floats here. Other types are
rejected, so that `from_json(to_json(x))` is exactly the value that a replay sees.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, cast, get_args

from searchers.errors import IllegalEvent
from searchers.events import (
    Action,
    Create,
    Done,
    Event,
    Exited,
    Reason,
    Reported,
    Requested,
    Source,
    Started,
    assert_never,
)

FLOAT = "$float"  # the journal's key for a non-finite float among the hyperparameters
KINDS = frozenset(
    {"start", "started", "reported", "exited", "extended", "requested"}
)  # values of "event" in a search's records


def event_to_json(event: Event) -> dict[str, object]:
    """Encode an event, e.g. `{"event": "reported", "trial": 3, "step": 4, "value": 0.31}`. A value of True becomes 1.0.

    Raises:
        IllegalEvent: A field has the wrong type, or is too large for a float.

    >>> event_to_json(Reported(trial=3, step=4, value=float("nan")))
    {'event': 'reported', 'trial': 3, 'step': 4, 'value': 'nan'}
    """
    try:
        trial = operator.index(event.trial)
    except TypeError:
        raise IllegalEvent(f"a trial's number must be an integer >= 0, got {event.trial!r:.80}") from None
    match event:
        case Started():
            return {"event": "started", "trial": int(trial)}
        case Reported(step=step, value=value):
            try:
                at = number_to_json(_number(step))
            except ValueError as error:
                raise IllegalEvent(f"the step of trial {trial} {error}") from None
            measured = _measured_to_json(value, f"the value of trial {trial} at step {at}")
            record = {"event": "reported", "trial": int(trial), "step": at, "value": measured}
            if event.metrics:
                name = f"a metric of trial {trial} at step {at}"
                record["metrics"] = [_measured_to_json(each, name) for each in event.metrics]
            if event.batches is not None:
                record["batches"] = operator.index(event.batches)
            return record
        case Exited(reason=reason):
            if reason not in get_args(Reason):
                known = ", ".join(get_args(Reason))
                raise IllegalEvent(f"trial {trial} exited with {reason!r:.80}, which must be one of {known}")
            return {"event": "exited", "trial": int(trial), "reason": reason}
        case _:
            assert_never(event)


def _measured_to_json(value: object, name: str) -> object:
    try:
        return None if value is None else number_to_json(float(_number(value, or_bool=True)))
    except ValueError as error:
        raise IllegalEvent(f"{name} {error}") from None


def event_from_json(record: Mapping[str, object]) -> Event:
    """Decode an event, ignoring other keys (`actions`, `hparams`). Raises `ValueError` if it is not a valid event."""
    match record.get("event"), record.get("trial"):
        case "started", int(trial):
            return Started(trial=trial)
        case "reported", int(trial):
            step, value = number_from_json(record.get("step")), number_from_json(record.get("value"))
            metrics = record.get("metrics", [])
            if step is not None and isinstance(metrics, list):
                several, batches = tuple(map(number_from_json, metrics)), cast("int | None", record.get("batches"))
                return Reported(
                    trial=trial,
                    step=step,
                    value=value,
                    metrics=several,
                    batches=batches,
                    skips=bool(record.get("skips")),
                )
        case "exited", int(trial):
            for reason in get_args(Reason):
                if record.get("reason") == reason:
                    return Exited(trial=trial, reason=reason)
    raise ValueError(f"not an event of a search: {dict(record)}")


def action_to_json(action: Action) -> dict[str, object]:
    """Encode an action, e.g. `{"action": "stop", "trial": 7}`."""
    if isinstance(action, Done):
        return {"action": "done", "reason": action.reason}
    record: dict[str, object] = {"action": type(action).__name__.lower(), "trial": operator.index(action.trial)}
    if not isinstance(action, Create):
        return record
    repeat = {} if action.repeat is None else {"repeat": {"trial": action.repeat.trial, "seed": action.repeat.seed}}
    return record | _beginning_to_json(action) | repeat


def request_to_json(request: Requested) -> dict[str, object]:
    """Encode a request, e.g. `{"event": "requested", "source": {"trial": 7, "step": 4}, "hparams": {"lr": 0.1}}`.

    Raises:
        IllegalEvent: A field has the wrong type.
    """
    record: dict[str, object] = {"event": "requested", **({"id": request.id} if request.id else {})}
    try:
        if request.trial is not None:
            return {**record, "trial": operator.index(request.trial)}
        return {**record, **_beginning_to_json(request)}
    except (TypeError, ValueError) as error:
        raise IllegalEvent(f"the request can't be recorded: {error}") from None


def request_from_json(record: object) -> Requested:
    """Decode a request, ignoring other keys. Raises `ValueError` if it is not a valid one."""
    if not isinstance(record, Mapping) or not _is_index(trial := record.get("trial")):
        raise ValueError(f"not a request: {record}")
    return Requested(id=str(record.get("id", "")), trial=trial, **_beginning_from_json(record))


def _beginning_to_json(new: Requested | Create) -> dict[str, object]:
    found: dict[str, Any] = {}
    if new.source is not None:
        step = number_to_json(_number(new.source.step))
        found["source"] = {"trial": operator.index(new.source.trial), "step": step}
        if new.source.batches is not None:
            found["source"] |= {"batches": operator.index(new.source.batches)}
    if new.hparams is not None:
        found["hparams"] = hparams_to_json(new.hparams)
    if new.code is not None:
        found["code"] = str(new.code)
    return found


def _beginning_from_json(record: Mapping[str, object]) -> dict[str, Any]:
    source, hparams, code = None, hparams_from_json(record.get("hparams")), record.get("code")
    match record.get("source"):
        case {"trial": int(trial), "step": int() | float() as step, **others} if _is_index(others.get("batches")):
            source = Source(trial=trial, step=step, batches=cast("int | None", others.get("batches")))
        case None:
            pass
        case other:
            raise ValueError(f"not a source: {other!r}")
    if not isinstance(hparams, dict | None):
        raise ValueError(f"hparams must be a mapping, got {hparams!r}")
    if not isinstance(code, str | None):
        raise ValueError(f"code must be a name, got {code!r}")
    return {"source": source, "hparams": hparams, "code": code}


def repeats_in(record: Mapping[str, Any]) -> list[int]:
    """Return the trials of a record's actions that are repeats."""
    return [action["trial"] for action in record.get("actions") or () if action.get("repeat")]


def _is_index(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def number_to_json(value: object) -> object:
    """Encode a non-finite float as "nan", "inf" or "-inf"; return anything else unchanged."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def number_from_json(value: object) -> float | None:
    """Decode a number or None. Raises `ValueError` if the value is neither."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    raise ValueError(f'must be a number, null, "nan", "inf" or "-inf", got {value!r}')


def hparams_to_json(value: object) -> object:
    """Encode hyperparameters: a non-finite float becomes e.g. {"$float": "inf"}, a NumPy array a list.

    Raises `ValueError` for a value that JSON can't represent.
    """
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)  # converts str enums and numpy.str_
        case Mapping():
            invalid = next((name for name in value if not isinstance(name, str) or name == FLOAT), None)
            if invalid is not None:
                raise ValueError(f"a hyperparameter's name must be a string other than {FLOAT!r}, got {invalid!r:.80}")
            return {str.__str__(name): hparams_to_json(item) for name, item in value.items()}
        case list() | tuple():
            return [hparams_to_json(item) for item in value]
    as_list = getattr(value, "tolist", None)  # NumPy arrays and torch tensors
    if callable(as_list) and isinstance(plain := as_list(), list | bool | str):
        return hparams_to_json(plain)
    try:
        number = number_to_json(_number(value))
    except ValueError as error:
        raise ValueError(f"a hyperparameter {error}, a string, a bool, null, or lists and mappings of them") from None
    return {FLOAT: number} if isinstance(number, str) else number


def hparams_from_json(value: object) -> object:
    match value:
        case {"$float": number, **others} if not others:
            return number_from_json(number)
        case dict():
            return {name: hparams_from_json(item) for name, item in value.items()}
        case list():
            return [hparams_from_json(item) for item in value]
    return value


def _number(value: object, *, or_bool: bool = False) -> float:
    """Convert a number of any type to an int or a float."""
    try:
        item = getattr(value, "item", None)  # NumPy scalars and torch tensors
        found = item() if callable(item) else value
        if not isinstance(found, str | bytes) and (or_bool or not isinstance(found, bool)):
            near = float(found)  # type: ignore[arg-type]
            return int(found) if hasattr(found, "__index__") else near
    except OverflowError:
        raise ValueError("is larger than any float, but must be a number") from None
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError
        pass
    raise ValueError(f"is {value!r:.80} ({type(value).__name__}), but must be a number")
