"""What requests give: the parameters of queries and the fields of bodies with their limits, which the API's description
is generated from (docs/openapi.py)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from dray.errors import Invalid
from dray.serve.lanes import KEEP_S

MAX_CURVES = 200
"""Most trials whose curves an answer has."""
MAX_INCLUDED = 100
"""Most trials that a request for figures may ask for."""
MAX_ROWS, MAX_COLUMNS = 500, 20  # most rows of a page of trials, and metrics as columns


def trials_in(text: str) -> tuple[int, ...]:
    """The trials of a selection.

    >>> trials_in("3,17-19")
    (3, 17, 18, 19)
    """
    found = dict[int, None]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()) or len(part) > 20:
            raise ValueError("must be numbers and ranges of numbers, such as 3,17-20")
        found |= dict.fromkeys(range(int(first), min(int(last or first), int(first) + MAX_CURVES) + 1))
        if len(found) > MAX_CURVES:
            raise ValueError(f"at most {MAX_CURVES} at a time")
    return tuple(found)


def _listed(text: str) -> tuple[int, ...]:
    texts = [each for each in text.split(",") if each]
    if len(texts) > MAX_INCLUDED or not all(each.isascii() and each.isdecimal() and len(each) <= 9 for each in texts):
        raise ValueError(f"must be at most {MAX_INCLUDED} whole numbers with commas")
    return tuple(sorted({int(each) for each in texts}))


def _limit(text: str) -> int | None:
    return None if text in ("", "none") else int(text)


def _one_line(text: str) -> str:
    if "\n" in text:
        raise ValueError("must be on one line")
    return text


def _text_of(read: Any) -> Any:
    """A value that is written as text."""
    return PlainValidator(read), WithJsonSchema({"type": "string"})


Flag = Annotated[bool, PlainValidator(lambda text: text == "1"), WithJsonSchema({"type": "string", "enum": ["0", "1"]})]
Whole = Annotated[int, Field(ge=0, le=10**18)]
Trial = Annotated[int, Field(ge=0, le=10**9)]
Selection = Annotated[tuple[int, ...], PlainValidator(trials_in), WithJsonSchema({"type": "string"})]
Listed = Annotated[tuple[int, ...], PlainValidator(_listed), WithJsonSchema({"type": "string"})]
Priority = Annotated[int, Field(ge=1, le=99)]
Weight = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]
Slots = Annotated[int, Field(ge=1)]


# --------------------------------------------------------------------------------------------------------- queries
class Query(BaseModel):
    """Parameters, as text; others are ignored."""

    model_config = ConfigDict(frozen=True)


class Now(Query):
    now: Flag = False  # read it anew; else it may be half a second old


class TrialsQuery(Query):
    # a field, hparams.NAME, or metrics.KIND.NAME for the last value of a metric; or rank: those that have validated,
    # best first
    sort: str = "trial"
    descending: Flag = False
    # words, and conditions on fields, hyperparameters and metrics, all of which must hold: lr < 0.01 optimizer=adam|sgd
    # state!=running accuracy>0.9 best<=0.3 training.loss>1; what can't be read, and unknown fields, are errors
    search: str = ""
    state: str = ""  # states of which a trial must have one, as words with commas between them: failed,pruned
    code: str = ""  # variants of the code likewise
    rung: str = ""  # numbers of rungs reached likewise
    facets: Flag = False  # with 1, what state, code and rung would leave
    ids: Flag = False  # with 1, the numbers of all matches in place of rows
    # metrics as further columns, such as training.loss
    metric: Annotated[list[str], Field(max_length=MAX_COLUMNS)] = []
    # hyperparameters as JSON: those that have started, the nearest first, each with its distance
    near: str | None = None
    offset: Whole = 0
    limit: Annotated[int, Field(ge=0, le=MAX_ROWS)] = 50


class MetricsQuery(Query):
    # the most points of a series, at least 5; without it, all. A longer series is cut into intervals, each of which
    # keeps its first, last, lowest and highest point and NaN
    points: Whole = 10**9


class LinesQuery(Query):
    line: Whole = 0  # the number of the first line, from 1; by default, the last lines
    limit: Whole = 500  # most lines, at most 2,000
    # lines with this text, in any case: matches instead of lines
    search: Annotated[str, Field(max_length=200), AfterValidator(_one_line)] = ""


class OutputQuery(LinesQuery):
    after: str = ""  # next of the previous response
    whole: Flag = False  # the whole output as a text file
    rank: Trial | None = None  # lines of this rank only, with line and total instead of next, skipped and places


class EventsQuery(Query):
    after: Whole = 0  # next of the previous response
    wait_s: Whole = 0  # the longest wait for new lines, at most 25 s


class ComparisonQuery(Query):
    a: Trial
    b: Trial
    other: Annotated[str | None, Field(alias="with")] = None  # the experiment of b, if it is another one


class Wanted(Query):
    """The curves of an answer."""

    metric: str = ""  # KIND NAME; by default, the searcher's metric
    # x; time is in seconds since the trial's first start, slot-time in seconds of its leases times their slots; by
    # default, batches or epochs as the searcher's unit
    along: Literal["", "batches", "epochs", "time", "slot-time"] = ""
    # bands: those of all trials by rung, and the curves of the best trial and of trials in no band
    show: Literal["individual", "bands"] = "individual"
    trials: Selection | None = None  # only the curves of these trials, such as 3,17-20

    @property
    def series(self) -> tuple[str, str] | None:
        """The metric's kind and name; None: the searcher's."""
        kind, _, name = self.metric.partition(" ")
        return (kind, name) if self.metric else None

    @property
    def bands(self) -> bool:
        return self.show == "bands" and self.trials is None


class FiguresQuery(Query):
    now: Flag = False  # make them anew
    # trials that are shown even if others of their rank are left out, such as 3,17; at most 100
    include: Listed = ()


class CodeQuery(Query):
    variant: str = ""  # the code of a trial


class DifferenceQuery(Query):
    other: Annotated[str | None, Field(alias="with")] = None  # the other experiment; by default the same
    a_trial: Trial | None = None  # a trial of the first; by default, the best stands for it
    b_trial: Trial | None = None  # a trial of the other


class QueueQuery(Query):
    seconds: Annotated[int, Field(ge=0, le=KEEP_S)] = 3600  # the time that the lanes show


class PreviewQuery(Query):
    name: str
    before: str | None = None  # move it before this experiment; empty: to the end
    priority: Priority | None = None
    weight: Weight | None = None
    # a whole number, or none
    max_slots: Annotated[int | None, PlainValidator(_limit), WithJsonSchema({"type": "string"})] = None


# ---------------------------------------------------------------------------------------------------------- bodies
class Body(BaseModel):
    """A JSON object without other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @property
    def given(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class Change(Body):
    """New values of some of an experiment's share, tags and notes."""

    priority: Priority = 42
    weight: Weight = 1
    max_slots: Slots | None = None
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=100)]], Field(max_length=50)] = []
    notes: Annotated[str, Field(max_length=100_000)] = ""


class Extension(Body):
    max_trials: Slots = 1
    max_length: Slots = 1  # in the unit of the config
    budget: dict[str, Any] | None = None  # new totals, such as {time: 4h}; others stay
    until: dict[str, Any] | None = None  # by metric
    patience: Any = None  # an integer from 1
    prices: dict[str, Any] | None = None  # new prices by slot type; others stay


def extension_of(given: Extension) -> dict[str, Any]:
    """The fields of an extension; `Invalid` if there is none."""
    if not given.given:
        raise Invalid(f"give some of {', '.join(Extension.model_fields)}")
    return given.given


class Fork(Body):
    # fields with dots and their new values, such as {searcher.max_trials: 8}; or a whole YAML file
    config: dict[str, Any] | str = {}


class NewTrial(Body):
    # hyperparameters of the trial; the others are drawn at random or, with other code, by the experiment's sampler
    hparams: dict[str, Any] = {}
    patch: str | None = None  # a unified diff of at most 512 KiB; the trial runs the experiment's code with it applied


class TrialFork(Body):
    at: str | int = "best"  # the checkpoint: best, latest, or a number of batches
    hparams: dict[str, Any] = {}  # hyperparameters of the new trial; the others are the other trial's


# --------------------------------------------------------------------------------------------------------- parsing
G = TypeVar("G", bound=BaseModel)


def query_of(model: type[G], request: web.Request) -> G:
    """The parameters of a request; `Invalid` says which one is wrong."""
    given: dict[str, Any] = dict(request.query)
    given |= {name: request.query.getall(name) for name in given if _forms(model).get(name, {}).get("type") == "array"}
    return parsed(model, given)


@cache
def _forms(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schemas of a model's fields."""
    return dict(model.model_json_schema()["properties"])


def parsed(model: type[G], given: Mapping[str, Any]) -> G:
    """What was given, checked; else `Invalid`."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name, value, forms = str(first["loc"][0]), first["input"], _forms(model)
        if first["type"] == "extra_forbidden":
            raise Invalid(f"{name[:40]} is not expected; give {', '.join(forms)}") from None
        shown = value if issubclass(model, Query) else repr(value)
        wanted = first["ctx"]["error"] if first["type"] == "value_error" else f"must be {_wanted(forms[name])}"
        what = "is missing" if first["type"] == "missing" else f"{wanted}, got {shown:.40}"
        raise Invalid(f"{name} {what}") from None


def _wanted(form: Mapping[str, Any]) -> str:
    """What a value must be, by its JSON schema, in words."""
    for each in form.get("anyOf", ()):
        return _wanted(each)
    if "enum" in form:
        return f"one of {', '.join(filter(None, form['enum']))}"
    match form.get("type"):
        case "integer":
            most = form.get("maximum", 10**9)
            return f"an integer from {form.get('minimum', 0)}" + (f" to {most}" if most < 10**9 else "")
        case "number":
            return f"a number > {form['exclusiveMinimum']:g}, at most {form['maximum']:g}"
        case "array":
            return f"a list of at most {form['maxItems']}, each {_wanted(form['items'])}"
        case "object":
            return "a JSON object"
    limits = [
        f"{word} {form[key]:,}" for word, key in (("at least", "minLength"), ("at most", "maxLength")) if key in form
    ]
    return f"text of {' and '.join(limits)} characters" if limits else "text"
