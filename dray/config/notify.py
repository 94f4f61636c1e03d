"""The section ``notify``: who is told about what happens to an experiment, or to all experiments of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from dray.config.section import Section
from dray.config.sections import checked_duration
from dray.masking import MASK

Outcome: TypeAlias = Literal["completed", "failed", "stopped"]
AlertKind: TypeAlias = Literal["completed", "failed", "stopped", "trial_failed", "no_gain", "budget", "idle"]


def _web_address(url: str) -> str:
    """Check that a secret URL is one. The error doesn't show it."""
    if not url.startswith(("http://", "https://")) and url != MASK:
        raise ValueError("must be a URL that begins with https:// or http://")
    return url


class Notify(Section):
    """Alerts about what happens to the experiment: by a webhook, a command, or both."""

    place: ClassVar[str] = "notify"

    url: Annotated[str, AfterValidator(_web_address)] | None = Field(
        default=None,
        repr=False,
        description="a webhook that gets a POST request with JSON: experiment, event, text, time, id. It is a secret, "
        "and never stored with the config or shown",
        examples=["https://hooks.slack.com/services/T0/B0/XXXX"],
    )
    command: str | None = Field(
        default=None,
        min_length=1,
        description="a shell command on the driver's machine, with the same JSON on its standard input, and "
        "DRAY_NOTIFY_EXPERIMENT, DRAY_NOTIFY_EVENT, DRAY_NOTIFY_TEXT and so on in its environment",
        examples=['notify-send "$DRAY_NOTIFY_TEXT"'],
    )
    states: list[Outcome] = Field(
        default_factory=lambda: list(get_args(Outcome)),
        min_length=1,
        description="the outcomes of the experiment to notify about",
        examples=[["completed", "failed"]],
    )
    failed_trials: bool = Field(
        default=True,
        description="notify when a trial has failed for good: once for each line of your code at which trials fail",
        examples=[False],
    )
    no_gain: int | None = Field(
        default=None,
        ge=1,
        description="notify when this many trials in a row have ended without a better metric",
        examples=[20],
    )
    budget: float = Field(
        default=0.9, gt=0, le=0.99, description="notify when this share of the budget is spent", examples=[0.8]
    )

    @property
    def has_receiver(self) -> bool:
        return self.url is not None or self.command is not None

    def wants(self, kind: AlertKind, level: float | None = None) -> bool:
        """Whether this is to be told. `level`: the number of trials without a gain, or the share of the budget."""
        match kind:
            case "completed" | "failed" | "stopped":
                wanted = kind in self.states
            case "trial_failed":
                wanted = self.failed_trials
            case "no_gain":
                wanted = level == self.no_gain
            case "budget":
                wanted = level == self.budget
            case "idle":
                wanted = True
        return wanted and self.has_receiver


class ServerNotify(Notify):
    """Alerts about all experiments of a server, and about its slots."""

    idle: Annotated[str, BeforeValidator(checked_duration)] | None = Field(
        default=None, description="notify when slots have been idle for this long", examples=["10m"]
    )


@dataclass(frozen=True, slots=True)
class Watched:
    """What has to be watched for while an experiment runs: all that one of its receivers wants."""

    failed_trials: bool = False
    no_gain: tuple[int, ...] = ()
    budget: tuple[float, ...] = ()

    @classmethod
    def by(cls, wanted: Notify | None) -> Watched:
        if wanted is None or not wanted.has_receiver:
            return cls()
        gains = () if wanted.no_gain is None else (wanted.no_gain,)
        return cls(failed_trials=wanted.failed_trials, no_gain=gains, budget=(wanted.budget,))

    def __or__(self, other: Watched) -> Watched:
        return Watched(
            failed_trials=self.failed_trials or other.failed_trials,
            no_gain=tuple(sorted({*self.no_gain, *other.no_gain})),
            budget=tuple(sorted({*self.budget, *other.budget})),
        )
