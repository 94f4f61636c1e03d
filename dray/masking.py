"""The secrets of an experiment's config, and masking them in all output.

Secrets are the values in ``data.secrets`` at any depth, as in Determined, the values of environment variables,
``notify.url``, and the credentials of ``checkpoint_storage``. A trial's code gets the real values; no file of the
experiment has them, except one that only its owner can read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

MASK = "********"  # replaces a secret, as in Determined
MIN_SECRET_LENGTH = 8  # characters; shorter secrets are not masked, because they could be any word of a program

PLACES = (("data", "secrets"), ("environment", "environment_variables"), ("notify", "url"))
"""The (section, field) pairs of a config that contain secrets."""
_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """An experiment's config with each secret value replaced with ``MASK``; names stay."""
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
    """Yield each value of a secret field that is not null, with its path."""
    if isinstance(secret, Mapping):
        for name, value in secret.items():
            yield from leaves(value, f"{path}.{name}")
    elif isinstance(secret, list | tuple):
        for number, value in enumerate(secret):
            yield from leaves(value, f"{path}.{number}")
    elif secret is not None:
        yield path, secret


def texts(config: Mapping[str, Any]) -> list[str]:
    """The secrets of a config as texts to search for: single lines, because YAML indents each line of a key.

    Environment variables count only if their name suggests a secret: other values are paths and numbers, which code may
    contain anyway.
    """
    found: list[Any] = []
    for section, field in PLACES:
        inner = config.get(section)
        each = leaves(inner.get(field) if isinstance(inner, Mapping) else None, "")
        found += [value for name, value in each if section != "environment" or _SECRET_NAME.search(name)]
    return [
        line.strip()
        for value in found
        for line in str(value).splitlines()
        if len(line.strip()) >= MIN_SECRET_LENGTH and not isinstance(value, bool)
    ]


def forms(secret: Sequence[str]) -> list[bytes]:
    """The forms in which files may contain these texts, the longest first: unchanged, as quoted in JSON, Python and
    YAML, and as in a URI."""
    found = set()
    for text in secret:
        in_json = [json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (True, False)]
        found |= {each.encode() for each in (text, *in_json, text.replace("'", "''"), quote(text, safe=""))}
    return sorted(found, key=lambda form: (-len(form), form))


def hidden(content: bytes, secret: Sequence[str]) -> bytes:
    """A file's content with each byte of these texts replaced with an x, so that offsets stay the same."""
    for form in forms(secret):
        content = content.replace(form, b"x" * len(form))  # x's are a valid word in any language
    return content


def hidden_text(text: str, secret: Sequence[str]) -> str:
    """A message with each byte of these texts replaced with an x."""
    return hidden(text.encode(errors="surrogateescape"), secret).decode(errors="surrogateescape")
