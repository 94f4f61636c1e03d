"""What the sections of an experiment config have in common."""

from __future__ import annotations

import os
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

#: Linux's.
MAX_PATH = 4096


class Section(BaseModel):
    """A mapping with these fields only."""

    # strict: "64" is not a number and 1 is not true; a config with these is wrong.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def whole_if_whole(number: float) -> float:
    """A float without a fraction as an integer: 4 for 4.0."""
    # 4.0 and 4 are the same divisor; with an integer, rungs are computed exactly.
    return int(number) if number == int(number) else number


def as_text(raw: object) -> object:
    """A path as text; other values unchanged."""
    return os.fspath(raw) if isinstance(raw, os.PathLike) else raw


def _without_credentials(url: str) -> str:
    """Check that a URL has no credentials: URLs are stored and shown."""
    if "@" in url or "?" in url:
        raise ValueError("must not contain a user, password or token, as it is stored; set these in the environment")
    return url


Url: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_without_credentials)]
Directory: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_PATH), BeforeValidator(as_text)]
#: Serialises a ``Length`` to the form of a config.
as_dict = PlainSerializer(lambda length: None if length is None else length.to_dict())
