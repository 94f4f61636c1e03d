"""What an experiment config keeps secret, and how it is kept out of whatever is written.

Secret are the values below ``data.secrets``, at any depth, as in Determined, those of environment variables, and the
credentials of ``checkpoint_storage``. A trial's code gets the true ones; no file of the experiment has them but one for
its owner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

MASK = "********"
"""What stands where a secret was, as in Determined."""
SHORTEST = 8
"""Of the texts that are looked for in code, in characters: a shorter one could be any word of a program."""

PLACES = (("data", "secrets"), ("environment", "environment_variables"))
"""Where in a config secrets are: below these fields of these sections."""
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment config with ``MASK`` for each value that is secret; the names stay."""
    found = dict(config)
    for section, field in PLACES:
        inner = found.get(section)
        if isinstance(inner, Mapping) and field in inner:
            found[section] = {**inner, field: _masked(inner[field])}
    return found


def _masked(secret: Any) -> Any:
    if isinstance(secret, Mapping):
        return {name: _masked(value) for name, value in secret.items()}
    if isinstance(secret, list | tuple):
        return [_masked(value) for value in secret]
    return None if secret is None else MASK


def leaves(secret: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each value below a place of secrets that is not null, with its path."""
    if isinstance(secret, Mapping):
        for name, value in secret.items():
            yield from leaves(value, f"{path}.{name}")
    elif isinstance(secret, list | tuple):
        for number, value in enumerate(secret):
            yield from leaves(value, f"{path}.{number}")
    elif secret is not None:
        yield path, secret


def texts(config: Mapping[str, Any]) -> list[str]:
    """The secrets of a config as they are looked for: lines, for a file in YAML has a key's lines each indented.

    Of environment variables those whose names say that they are secret: others are paths and numbers, which code has
    on its own account.
    """
    found: list[Any] = []
    for section, field in PLACES:
        inner = config.get(section)
        each = leaves(inner.get(field) if isinstance(inner, Mapping) else None, "")
        found += [value for name, value in each if section == "data" or _SECRET_NAME.search(name)]
    return [
        line.strip()
        for value in found
        for line in str(value).splitlines()
        if len(line.strip()) >= SHORTEST and not isinstance(value, bool)
    ]


def forms(secret: Sequence[str]) -> list[bytes]:
    """These texts as files have them, the longest first.

    As they are, as JSON, Python and YAML write them between quotes, and as a URI has them.
    """
    found = set()
    for text in secret:
        in_json = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (True, False)]
        found |= {each.encode() for each in (text, *in_json, text.replace("'", "''"), quote(text, safe=""))}
    return sorted(found, key=lambda form: (-len(form), form))


def hidden(content: bytes, secret: Sequence[str]) -> bytes:
    """A file's content with an x for each byte of these texts: all else stays in its place."""
    for form in forms(secret):
        content = content.replace(form, b"x" * len(form))  # a word, in whatever language the file is
    return content


def hidden_text(text: str, secret: Sequence[str]) -> str:
    """The same of a message."""
    return hidden(text.encode(errors="surrogateescape"), secret).decode(errors="surrogateescape")
