"""Safe reading of YAML files; errors name the line.

Sizes are limited, so that a broken or hostile file is a short error instead of running out of memory.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dray.errors import ConfigError, Fault
from dray.text import one_line
from searchers.errors import FieldError

MAX_DEPTH = 100  # nested mappings and lists
MAX_VALUES = 100_000  # values in total, each counted wherever an anchor repeats it
MAX_BYTES = 2**20  # size of a config file
MAX_TEXT = 100_000  # characters of one value; Linux allows a few more in an environment variable
MAX_DIGITS = 1_000  # characters of a number
MAX_NUMBER = 2**64  # magnitude of integers: NumPy, Parquet and seeds take no larger ones

TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep, or contains itself"
TOO_MANY = f"has more than {MAX_VALUES:,} values, counting each where an anchor repeats it"


class _Loader(yaml.composer.Composer, yaml.CSafeLoader):
    """YAML's safe subset, but ``1e-3`` is a number, ``2026-11-22`` is text, and a key given twice is an error.

    libyaml parses, in a sixth of PyYAML's time; its own composer would crash at a nesting of 50,000 levels.
    """

    def __init__(self, text: str) -> None:
        yaml.composer.Composer.__init__(self)
        yaml.CSafeLoader.__init__(self, text)
        self._nodes = self._depth = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_VALUES:  # merges copy their values: merges of merges fill the memory
            raise yaml.constructor.ConstructorError(None, None, TOO_MANY, node.start_mark)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        mark: Any = self.peek_event().start_mark  # type: ignore[union-attr]
        if self._nodes > MAX_VALUES * 2:  # the names of fields are nodes too
            raise yaml.composer.ComposerError(None, None, TOO_MANY, mark)
        if self._depth > MAX_DEPTH + 1 and self.check_event(yaml.SequenceStartEvent, yaml.MappingStartEvent):
            raise yaml.composer.ComposerError(None, None, TOO_DEEP, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = node.tag.endswith((":int", ":float"))
        if is_number and len(node.value) > MAX_DIGITS:  # converting it takes time in proportion to the square
            problem = f"{node.value!r:.60} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, OverflowError, TypeError, AttributeError, KeyError):  # as of !!bool 5
            problem = f"{node.value!r:.60} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"the field {key.value!r} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


# PyYAML follows YAML 1.1, where a float needs a point: `lr: 1e-3` would be the text "1e-3".
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
# Dates stay text, as in Determined: hyperparameters are stored as JSON, which has no dates.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_mapping(path: Path) -> dict[Any, Any]:
    """The mapping in the file at ``path``."""
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            what = f"{path} has {size:,} bytes, too many for a config; at most {MAX_BYTES:,} are read"
            raise ConfigError([("config", what)], str(path))
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([("config", f"no such file: {path}; give the path of a YAML file")], str(path)) from None
    except IsADirectoryError:
        raise ConfigError([("config", f"{path} is a directory; give a YAML file in it")], str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([("config", f"cannot be read as UTF-8 text: {error}")], str(path)) from None
    return mapping_in(text, str(path))


def mapping_in(text: str, origin: str) -> dict[Any, Any]:
    """The mapping in the text of a YAML file. `origin`: the file, for errors."""
    content, fault = parsed(text)
    if fault is not None:
        raise ConfigError([fault], origin)
    if not isinstance(content, dict):
        got = "an empty file" if content is None else f"{content!r:.60}"
        raise ConfigError([("config", f"must be a mapping of fields to values, got {got}")], origin)
    return content


def as_yaml(value: object) -> str:
    """A value as YAML on one line.

    >>> as_yaml({"epochs": 16})
    '{epochs: 16}'
    """
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def with_changes(content: Mapping[Any, Any], changes: Sequence[str]) -> dict[Any, Any]:
    """A copy with fields set to other values.

    >>> with_changes({"searcher": {"name": "asha"}}, ["searcher.max_trials=8", "name=digits"])
    {'searcher': {'name': 'asha', 'max_trials': 8}, 'name': 'digits'}
    """
    return with_values(content, by_field(changes), "The command line")


def by_field(changes: Sequence[str]) -> dict[str, Any]:
    """Changes such as ``searcher.max_trials=8`` as a mapping from fields to values."""
    values: dict[str, Any] = {}
    faults = []
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals or not all(path.strip().split(".")):
            faults.append(("--config", f"must be FIELD=VALUE, got {change!r}; for example searcher.max_trials=8"))
            continue
        value, fault = parsed(text)
        if fault is not None:
            faults.append((path, f"the value is {fault.what}, got {text!r}"))
        else:
            values[path.strip()] = value
    if faults:
        raise ConfigError(faults, "The command line")
    return values


def with_values(content: Mapping[Any, Any], values: Mapping[str, Any], origin: str = "The request") -> dict[Any, Any]:
    """A copy with values in place of others, by their paths.

    >>> with_values({"searcher": {"name": "asha"}}, {"searcher.max_trials": 8})
    {'searcher': {'name': 'asha', 'max_trials': 8}}
    """
    changed = copy.deepcopy(dict(content))
    faults = []
    for path, value in values.items():
        *outer, name = path.split(".")
        place: Any = changed
        for part in outer:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
            if not isinstance(place, dict):
                faults.append((path, f"{part} is {place!r:.60}, which has no fields; set {part} itself"))
                break
        else:
            place[name] = value
    if faults:
        raise ConfigError(faults, origin)
    return changed


def parsed(text: str) -> tuple[Any, Fault | None]:
    """The value of a YAML text, or why it has none, with the line as its path."""
    try:
        return yaml.load(text, _Loader), None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark is not None else "config"
        context = f" {error.context}" if error.context else ""
        return None, Fault(place, f"not valid YAML{context}: {error.problem}")
    except RecursionError:
        return None, Fault("config", TOO_DEEP)
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # not only YAMLError: \UFFFFFFFF is no character
        return None, Fault("config", f"not valid YAML: {one_line(error)}")


def check_limits(source: Mapping[Any, Any]) -> None:
    """Check that a config is neither too large nor too deep, and that it can be written to a file.

    >>> check_limits({"data": {"n": [10**30]}})
    Traceback (most recent call last):
    searchers.errors.FieldError: data.n[0]: must be an integer of at most 64 bits, got one of 100 bits
    """
    faults: list[tuple[str, str]] = []
    count = itertools.count()

    def visit(value: object, *path: str) -> None:
        if next(count) > MAX_VALUES:
            raise FieldError([*faults, (path[0], TOO_MANY)])
        if len(path) > MAX_DEPTH:
            raise FieldError([*faults, (path[0], TOO_DEEP)])
        if what := _fault(value):
            faults.append((".".join(path).replace(".[", "["), what))
        if isinstance(value, Mapping):
            for name, item in value.items():
                part = name if isinstance(name, str) else f"({type(name).__name__})"
                visit(name, *path, part)
                visit(item, *path, part)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                visit(item, *path, f"[{number}]")

    visit(source)
    if faults:
        raise FieldError(faults)


def _fault(value: object) -> str:
    if isinstance(value, int) and not -MAX_NUMBER < value < MAX_NUMBER:
        return f"must be an integer of at most 64 bits, got one of {value.bit_length()} bits"
    if not isinstance(value, str):
        return ""
    if len(value) > MAX_TEXT:
        return f"must be text of at most {MAX_TEXT:,} characters, got {len(value):,}"
    if "\0" in value:
        return f"must be text without the character NUL, got {value!r:.60}"
    try:
        value.encode()
    except UnicodeEncodeError:  # YAML's "\\ud83d" is half of a surrogate pair
        return f"must be text, got {value!r:.60}, which is not valid Unicode"
    return ""
