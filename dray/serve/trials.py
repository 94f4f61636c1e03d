"""An experiment's trials for the page: a table that can be sorted and searched.

A search has terms with spaces between them, which a trial must all meet: a word, which its number, state, code or
hyperparameters contain, or a condition: ``lr<0.01``, ``lr < 0.01``, ``optimizer=adam|sgd``, ``state!=running``,
``accuracy>0.9``, ``"a name"=2``. Names and values with spaces or signs are in quotes. The page, the API and the tools
of agents have this one grammar.
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dray.errors import Invalid
from dray.records.reader import ExperimentReader
from dray.records.trial_record import TrialRecord
from dray.serve.answers import encoded
from dray.text import shown, some
from searchers.domains import parameters

MOST_CHARACTERS = 4000
_ATOM = r"""(?:"[^"]*"|'[^']*'|(?!')[^\s<>=!"|]+)"""
_CONDITION = re.compile(rf"({_ATOM})\s*(<=|>=|!=|<|>|=)\s*({_ATOM}(?:\|{_ATOM})*)(?!\S)")
_WORD = re.compile(r"""("[^"]*"|'[^']*'|(?!')[^\s<>="]+)(?!\s*[<>=])(?!\S)""")
_NO_WORD = re.compile(r"(?i)and|or|not|[&|,]+|.*[≤≥≠].*")
"""What other tools write between conditions; as a word, it would find nothing."""
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
Test = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a field: its name, the sign, and the value, or alternatives."""

    name: str
    sign: str
    values: tuple[str, ...]

    @property
    def limit(self) -> float | None:
        """The number of an order; None if there is none."""
        number = _number(self.values[0]) if len(self.values) == 1 else None
        return None if number is None or math.isnan(number) else number

    def test(self) -> Test:
        """Whether a value meets it."""
        if self.sign in _COMPARE:
            compare, limit = _COMPARE[self.sign], self.limit
            assert limit is not None, "checked before"
            return lambda value: _is_number(value) and compare(value, limit)
        wanted = [(text.lower(), _number(text)) for text in self.values]

        def equals(value: Any) -> bool:
            return any(_equals(value, text, number) for text, number in wanted)

        return equals if self.sign == "=" else lambda value: not equals(value)


def parsed(search: str) -> list[str | Condition]:
    """The words and conditions of a search; `Invalid` if a part of it is neither.

    >>> parsed("adam lr < 0.01 optimizer=adam|sgd")[1:]
    [Condition(name='lr', sign='<', values=('0.01',)), Condition(name='optimizer', sign='=', values=('adam', 'sgd'))]
    """
    if len(search) > MOST_CHARACTERS:
        raise Invalid(f"at most {MOST_CHARACTERS:,} characters, got {len(search):,}")
    found, at, end = list[str | Condition](), 0, len(search.rstrip())
    while at < end:
        if search[at].isspace():
            at += 1
        elif match := _CONDITION.match(search, at):
            name, sign, values = match.groups()
            found.append(Condition(_bare(name), sign, tuple(map(_bare, re.findall(_ATOM, values)))))
            at = match.end()
        elif (match := _WORD.match(search, at)) and not _NO_WORD.fullmatch(match[1]):
            found.append(_bare(match[1]))
            at = match.end()
        else:
            raise Invalid(f"can't read {search[at:][:40]!r}; write conditions with spaces, as in lr<=0.01 net=a|b")
    return found


def check(condition: Condition, values: Sequence[Any]) -> None:
    """Check that a condition makes sense for a field with these values; else `Invalid`."""
    known = [value for value in values if value is not None]
    if condition.sign not in _COMPARE:
        return
    if known and not any(map(_is_number, known)):
        example = f"{_quoted(condition.name)}={_quoted(shown(known[0]))}"
        raise Invalid(f"{condition.name[:60]} has no order, so write it as {example}")
    if condition.limit is None:
        text = "|".join(condition.values)
        raise Invalid(
            f"{condition.name[:60]}{condition.sign}{text[:40]}: {text[:40]!r} is not a number; write it as "
            f"{_quoted(condition.name)}{condition.sign}0.01"
        )


def _equals(value: Any, text: str, number: float | None) -> bool:
    if number is not None and _is_number(value) and not math.isnan(number):
        return math.isclose(value, number, rel_tol=1e-4)  # to the digits that the table shows
    return text in (str(value).lower(), shown(value).lower())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _bare(text: str) -> str:
    """The text without the quotes around it."""
    return text[1:-1] if text[0] in "\"'" else text


def _quoted(text: str) -> str:
    return text if re.fullmatch(_ATOM, text) else f'"{text}"'


SHORT = {"best": "best_metric", "last": "metric"}
MOST_NAMES = 60  # most fields that an error lists
HPARAMS, METRICS = "hparams.", "metrics."
RANK = "rank"
Get = Callable[[TrialRecord], Any]
_ATTRIBUTES = (
    *("state", "batches", "metric", "best_metric", "best_batches"),
    *("restarts", "started", "ended", "nan_since", "code"),
)
_FIELDS: dict[str, Get] = {
    "trial": lambda trial: trial.id,
    "duration": lambda trial: _duration(trial),
    **{name: operator.attrgetter(name) for name in _ATTRIBUTES},
}


def row(trial: TrialRecord) -> bytes:
    if "row" not in trial.derived:
        trial.derived["row"] = encoded(trial.to_json())
    found: bytes = trial.derived["row"]
    return found


def find(
    trials: Iterable[TrialRecord],
    reader: ExperimentReader,
    *,
    sort: str = "trial",
    descending: bool = False,
    search: str = "",
) -> list[TrialRecord]:
    """The trials that match a search, sorted.

    Args:
        sort: a field, or "hparams." and the dotted name of a hyperparameter, or "metrics." and a metric's kind and name
            with a dot between them, or "rank" for the order in which they are given. Missing values come last in both
            orders.
        descending: the largest first.
        search: words and conditions that trials must all meet, see `dray.serve.trials`.
        reader: that of the trials.
    """
    found = list(trials)
    try:
        for matches in [_matcher(term, reader) for term in parsed(search)]:
            found = [trial for trial in found if matches(trial)]
    except Invalid as error:
        raise Invalid(f"search: {error}; the fields are {some(_names(reader), MOST_NAMES)}") from None
    if sort == RANK:
        return found[::-1] if descending else found
    get = _FIELDS.get(sort)
    if sort.startswith(HPARAMS):
        get = _hparam(sort.removeprefix(HPARAMS))
    if sort.startswith(METRICS):
        get = last_value(reader, sort.removeprefix(METRICS))
    if get is None:
        raise Invalid(
            f"sort={sort[:80]}: there is no such column; it must be one of rank, {', '.join(_FIELDS)}, hparams.NAME or "
            "metrics.KIND.NAME"
        )
    numbers: list[TrialRecord] = []
    texts: list[TrialRecord] = []
    missing: list[TrialRecord] = []
    for trial in found:
        value = get(trial)
        if isinstance(value, float | int):
            (numbers if value == value else missing).append(trial)
        else:
            (missing if value is None else texts).append(trial)
    # The keys are no tuples: so many new ones would start Python's garbage collector. Sorting is stable.
    numbers.sort(key=get, reverse=descending)
    texts.sort(key=lambda trial: str(get(trial)), reverse=descending)
    return [*texts, *numbers, *missing] if descending else [*numbers, *texts, *missing]


def _hparam(name: str) -> Get:
    return lambda trial: trial.hparams.get(name)


def last_value(reader: ExperimentReader, name: str) -> Get:
    kind, _, metric = name.partition(".")
    if (kind, metric) not in reader.metrics:
        raise Invalid(f"metric {name[:80]}: no trial has reported it")
    last = reader.last.of((kind, metric))
    return lambda trial: last.get(trial.id)


def _duration(trial: TrialRecord) -> float | None:
    """Seconds from its first start to its end, or until now."""
    return None if trial.started is None else (trial.ended or time.time()) - trial.started


def _text(trial: TrialRecord) -> str:
    """The text of a trial that a search looks through, in lower case."""
    if "text" not in trial.derived:
        words = f"{trial.id} {trial.state} {trial.word} {trial.code or ''} {shown(trial.hparams)}"
        trial.derived["text"] = words.lower()
    found: str = trial.derived["text"]
    return found


def _matcher(term: str | Condition, reader: ExperimentReader) -> Callable[[TrialRecord], bool]:
    """A predicate for trials: they contain the word, or meet the condition."""
    if isinstance(term, str):
        text = term.lower()
        return lambda trial: text in _text(trial)
    get = _field(term.name, reader)
    check(term, [get(trial) for trial in reader.trials.values()])
    test = term.test()
    if term.name == "state":  # also by the words of the page
        return lambda trial: (
            test(trial.state) or test(trial.word) if term.sign == "=" else test(trial.state) and test(trial.word)
        )
    return lambda trial: test(get(trial))


def _field(name: str, reader: ExperimentReader) -> Get:
    """What a condition is about: a field, a hyperparameter, or a metric, by its name or with its kind before it. The
    searcher's metric is the best value, others are last values. `Invalid` if there is no such field."""
    if field := _FIELDS.get({**SHORT, reader.metric: "best_metric"}.get(name, name)):
        return field
    if name.removeprefix(HPARAMS) in _hparams(reader):
        return _hparam(name.removeprefix(HPARAMS))
    named = name.removeprefix(METRICS)
    for metric in (named, f"validation.{named}", f"training.{named}"):
        if tuple(metric.split(".", 1)) in reader.metrics:
            return last_value(reader, metric)
    raise Invalid(f"there is no field {name[:60]}")


def _names(reader: ExperimentReader) -> list[str]:
    """What conditions can be on."""
    metrics = [f"{kind}.{name}" for kind, name in sorted(reader.metrics)]
    return list(dict.fromkeys([*SHORT, *_FIELDS, *_hparams(reader), reader.metric, *metrics]))


def _hparams(reader: ExperimentReader) -> dict[str, None]:
    """Hyperparameters, also those that no trial has yet."""
    searched = (re.sub(r"\[\d+\]", "", each.name) for each in parameters(reader.config.space.root))
    return dict.fromkeys((*reader.hparam_names, *searched))
