"""The section ``notify``: who is told when the experiment ends."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import AfterValidator, Field

from dray.config.section import Section
from dray.masking import MASK

Outcome: TypeAlias = Literal["completed", "failed", "stopped"]


def _web_address(url: str) -> str:
    """Check that it is one. It is a secret, so the message doesn't contain it."""
    if not url.startswith(("http://", "https://")) and url != MASK:
        raise ValueError("must be a URL that begins with https:// or http://")
    return url


class Notify(Section):
    """Tell somebody when the experiment has ended: by a webhook, a command, or both."""

    place: ClassVar[str] = "notify"

    url: Annotated[str, AfterValidator(_web_address)] | None = Field(
        default=None,
        repr=False,
        description="a webhook that gets a POST request with JSON: experiment, state, text. It is a secret, and never "
        "stored with the config or shown",
        examples=["https://hooks.slack.com/services/T0/B0/XXXX"],
    )
    command: str | None = Field(
        default=None,
        min_length=1,
        description="a shell command on the driver's machine, with DRAY_NOTIFY_EXPERIMENT, DRAY_NOTIFY_STATE and "
        "DRAY_NOTIFY_TEXT in its environment",
        examples=['notify-send "$DRAY_NOTIFY_TEXT"'],
    )
    states: list[Outcome] = Field(
        default_factory=lambda: list(get_args(Outcome)),
        min_length=1,
        description="the ends to tell of",
        examples=[["completed", "failed"]],
    )
