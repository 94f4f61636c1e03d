"""Reads a YAML file as a mapping, safely; errors name the line."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dray.config.limits import MAX_BYTES, MAX_DEPTH, MAX_VALUES, TOO_DEEP, TOO_MANY
from dray.errors import ConfigError

LONGEST_INTEGER = 100
"""As text, in binary too. Python takes a second for the digits of 100,000, and shows none of more than 4,300."""


class _TooLarge(yaml.MarkedYAMLError):
    """Valid, but no config."""


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, but ``1e-3`` is a number, ``2026-11-22`` is text, and a key given twice is an error.

    So is a file that is too large once its anchors are resolved; that is found before they are.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooLarge(problem=TOO_DEEP, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = self._size(node)
        # An anchor that is not finished contains itself.
        values, levels = self._sizes.get(id(node), (0, MAX_DEPTH + 1))
        if values > MAX_VALUES or levels > MAX_DEPTH:
            raise _TooLarge(problem=TOO_MANY if values > MAX_VALUES else TOO_DEEP, problem_mark=event.start_mark)
        return node

    def _size(self, node: yaml.Node | None) -> tuple[int, int]:
        """The values in a node, and its levels."""
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        sizes = [self._sizes[id(part)] for part in inner]
        return 1 + sum(values for values, _ in sizes), max((levels + 1 for _, levels in sizes), default=0)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > LONGEST_INTEGER:
            problem = f"must be an integer of at most 64 bits, got one of {len(node.value):,} digits"
            raise _TooLarge(problem=problem, problem_mark=node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, TypeError, AttributeError, KeyError) as error:  # as of !!timestamp 2026-99-99
            raise yaml.constructor.ConstructorError(None, None, f"{error}", node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the field {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


# PyYAML follows YAML 1.1, where a float needs a point: `lr: 1e-3` would be the text "1e-3".
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
# A date is text for Determined too, and JSON, in which hyperparameters are kept, has none.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_mapping(path: Path) -> dict[Any, Any]:
    """The mapping in the file at ``path``.

    Raises:
        ConfigError: there is no such file, or it is not readable, not YAML (with the line), or not a mapping.
    """
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
    try:
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError([_fault(error)], str(path)) from None
    if not isinstance(content, dict):
        got = "an empty file" if content is None else f"{content!r:.60}"
        raise ConfigError([("config", f"must be a mapping of fields to values, got {got}")], str(path))
    return content


def with_changes(content: Mapping[Any, Any], changes: Sequence[str]) -> dict[Any, Any]:
    """A copy with fields set to other values.

    Args:
        changes: Each ``field=value``, nested fields with dots, the value in YAML.

    Raises:
        ConfigError: one has another form, or its field is below something that is no mapping.

    >>> with_changes({"searcher": {"name": "asha"}}, ["searcher.max_trials=8", "name=digits"])
    {'searcher': {'name': 'asha', 'max_trials': 8}, 'name': 'digits'}
    """
    changed = copy.deepcopy(dict(content))
    faults = []
    for change in changes:
        path, equals, text = change.partition("=")
        *outer, name = path.strip().split(".")
        if not equals or not all([*outer, name]):
            faults.append(("--config", f"must be FIELD=VALUE, got {change!r}; for example searcher.max_trials=8"))
            continue
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            faults.append((path, f"the value is {_fault(error)[1]}, got {text!r}"))
            continue
        place: Any = changed
        for part in outer:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
            if not isinstance(place, dict):
                faults.append((path, f"{part} is {place!r}, which has no fields; set {part} itself"))
                break
        else:
            place[name] = value
    if faults:
        raise ConfigError(faults, "The command line")
    return changed


def _fault(error: yaml.YAMLError) -> tuple[str, str]:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        context = f" {error.context}" if error.context else ""
        what = error.problem if isinstance(error, _TooLarge) else f"not valid YAML{context}: {error.problem}"
        return f"line {mark.line + 1}, column {mark.column + 1}", str(what)
    return "config", f"not valid YAML: {' '.join(str(error).split())}"
