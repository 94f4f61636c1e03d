"""Searches of trials: words and conditions, one grammar for the page, the API and the tools of agents.

A search has terms with spaces between them, which a trial must all meet: a word, which its number, state, code or
hyperparameters contain, or a condition: ``lr<0.01``, ``lr < 0.01``, ``optimizer=adam|sgd``, ``state!=running``,
``accuracy>0.9``, ``"a name"=2``. Names and values with spaces or signs are in quotes.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dray.serve.answers import BadInput
from dray.text import shown

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
    """The words and conditions of a search; `BadInput` if a part of it is neither.

    >>> parsed("adam lr < 0.01 optimizer=adam|sgd")[1:]
    [Condition(name='lr', sign='<', values=('0.01',)), Condition(name='optimizer', sign='=', values=('adam', 'sgd'))]
    """
    if len(search) > MOST_CHARACTERS:
        raise BadInput(f"at most {MOST_CHARACTERS:,} characters, got {len(search):,}")
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
            raise BadInput(f"can't read {search[at:][:40]!r}; write conditions with spaces, as in lr<=0.01 net=a|b")
    return found


def check(condition: Condition, values: Sequence[Any]) -> None:
    """Check that a condition makes sense for a field with these values; else `BadInput`."""
    known = [value for value in values if value is not None]
    if condition.sign not in _COMPARE:
        return
    if known and not any(map(_is_number, known)):
        example = f"{_quoted(condition.name)}={_quoted(shown(known[0]))}"
        raise BadInput(f"{condition.name[:60]} has no order, so write it as {example}")
    if condition.limit is None:
        text = "|".join(condition.values)
        raise BadInput(
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
