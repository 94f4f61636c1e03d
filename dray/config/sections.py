"""The small sections of an experiment config."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainSerializer, create_model

from dray.config.section import Section, Url
from dray.config.yaml_file import read_mapping
from dray.errors import ConfigError
from dray.text import seconds_of
from dray.training.plan import FIRST_TRACED

MAX_SEED = 2**32 - 1
_MAX_REPEATED = 1000


class Optimizations(Section):
    """Gradient aggregation and exchange, and precision. ``aggregation_frequency`` and ``mixed_precision`` are for trial
    classes. A program sets the first in ``pytorch.init()`` and the second with ``context.experimental.use_amp()``.
    """

    place: ClassVar[str] = "optimizations"

    aggregation_frequency: int = Field(
        default=1, ge=1, description="number of batches whose gradients make one optimizer step", examples=[4]
    )
    average_aggregated_gradients: bool = Field(
        default=True, description="divide aggregated gradients by aggregation_frequency", examples=[True]
    )
    gradient_compression: bool = Field(
        default=False, description="exchange gradients between slots in float16", examples=[True]
    )
    mixed_precision: Literal["O0", "O1", "O2", "float16", "bfloat16"] = Field(
        default="O0",
        description="O0: full precision; bfloat16, float16: mixed precision, as with use_amp(); O1 and O2 mean float16",
        examples=["bfloat16"],
    )


class Profiling(Section):
    """Traces of some batches of each trial by torch's profiler, and snapshots of GPU memory.

    Both are in the trial's directory ``tensorboard``, with a file for each slot. A trial that resumes after the traced
    batches, or ends before them, has none. A program sets this with
    ``pytorch.init(exp_conf={"profiling": {"enabled": True}})``.
    """

    place: ClassVar[str] = "profiling"

    enabled: bool = Field(default=False, description="trace batches of each trial", examples=[True])
    begin_on_batch: int = Field(
        default=FIRST_TRACED, ge=0, description="the first traced batch, counted from 0", examples=[20]
    )
    end_after_batch: int | None = Field(
        default=None, ge=0, description="the last traced batch. By default, ten are traced", examples=[24]
    )


class Reproducibility(Section):
    """The seed, and determinism. With equal configs and equal seeds, ``single``, ``grid``, and ``random`` with its
    default sampler run equal searches. Searches that decide on results also depend on the order in which these arrive.
    """

    place: ClassVar[str] = "reproducibility"

    experiment_seed: int = Field(
        default_factory=lambda: secrets.randbits(31),
        ge=0,
        le=MAX_SEED,
        description="the seed for hyperparameters, initial weights and data order",
        examples=[7],
    )
    deterministic: bool = Field(
        default=False,
        description="use only torch's deterministic algorithms, so that equal trials on equal GPUs are bit-identical. "
        "They are slower, and an operation without one is an error",
        examples=[True],
    )


DEVICES = ("cpu", "cuda", "gpu", "rocm")  # Determined's names of slots' devices; gpu is an older name for cuda
_ENTRY = re.compile(r"[^=]+=.*|[A-Za-z_]\w*", re.DOTALL)
_ByName: TypeAlias = dict[str, str | None]
_Written: TypeAlias = list[str] | dict[str, str | float | None]


def _variables(raw: object) -> object:
    """A list of ``NAME=VALUE``, a mapping, or one of these for each kind of device; None unsets a variable."""
    if not isinstance(raw, Mapping):
        return _named(raw, "")
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if name in DEVICES and not isinstance(value, str):
            found[name] = {} if value is None else _named(value, f"{name}: ")
        else:
            found |= _named({name: value}, "")
    return found


def _named(raw: object, where: str) -> _ByName:
    """The variables by name. Values may be secrets, so errors don't show them."""
    if isinstance(raw, list):
        valid = [isinstance(entry, str) and _ENTRY.fullmatch(entry) is not None for entry in raw]
        if not all(valid):
            wrong = ", ".join(str(place) for place, is_valid in enumerate(valid, start=1) if not is_valid)
            raise ValueError(f"{where}must be a list of NAME=VALUE; these entries are not: {wrong} (from 1)")
        # In Determined, as in Docker's API, a name alone unsets the variable.
        return {name: value if sign else None for name, sign, value in (entry.partition("=") for entry in raw)}
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}must be a list of NAME=VALUE or a mapping, got a {type(raw).__name__}")
    found: _ByName = {}
    for name, value in raw.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ValueError(f"{where}must map names of variables to values, got the name {name!r}")
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise ValueError(f"{where}{name} must be a string, got a {type(value).__name__}; write it in quotes")
        found[name] = None if value is None else str(value)
    return found


class Environment(Section):
    """The environment of trials."""

    place: ClassVar[str] = "environment"

    environment_variables: Annotated[
        dict[str, str | _ByName | None],
        BeforeValidator(_variables, json_schema_input_type=_Written | dict[str, str | float | _Written | None]),
    ] = Field(
        default_factory=dict,
        description="variables to set before any code of the trial is imported: a list of NAME=VALUE (NAME alone "
        "unsets it) or a mapping, or one of these for each of cpu, cuda and rocm. Values are never stored with the "
        "config or shown",
        examples=[["OMP_NUM_THREADS=4"]],
        repr=False,
    )

    def variables(self, device: Literal["cpu", "cuda", "rocm"]) -> dict[str, str | None]:
        """The variables for trials on this device; None unsets a variable."""
        given = self.environment_variables
        found = {name: value for name, value in given.items() if not isinstance(value, dict)}
        for kind in (device, "gpu") if device == "cuda" else (device,):
            variables = given.get(kind)
            found |= variables if isinstance(variables, dict) else {}
        return found


def checked_duration(raw: object) -> object:
    """The text of a duration, such as 2h; a ValueError if it is none."""
    seconds_of(raw)
    return raw


class Budget(Section):
    """What the experiment may spend. It ends when one of these is spent."""

    place: ClassVar[str] = "budget"

    time: Annotated[str, BeforeValidator(checked_duration)] | None = Field(
        default=None,
        description="running time of the experiment. On a server, only time with slots counts",
        examples=["2h"],
    )
    slot_hours: float | None = Field(
        default=None,
        gt=0,
        description="slots times hours, from the start of the worker processes to their end",
        examples=[40],
    )
    usd: float | None = Field(default=None, gt=0, description="cost of the slot-hours by prices", examples=[200])

    @classmethod
    def with_current_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        if not raw:
            raise ValueError("must have at least one of time, slot_hours and usd")
        return raw


def _top(raw: object) -> object:
    match raw.split() if isinstance(raw, str) else []:
        case ["top", number] if number.isdecimal() and 0 < int(number) <= _MAX_REPEATED:
            return int(number)
    raise ValueError(f'must be "top" and a number from 1 to {_MAX_REPEATED}, such as top 4; got {raw!r:.60}')


class _Repeat(Section):
    """The best trials are trained again with other seeds, before one of them is called the best."""

    place: ClassVar[str] = "repeat"

    seeds: int = Field(
        default=3, ge=1, le=1000, description="how often each of them is trained again, up to max_length", examples=[3]
    )

    @property
    def top(self) -> int:
        """The number of trials that are trained again."""
        number: int = vars(self)["for"]
        return number


if TYPE_CHECKING:
    Repeat = _Repeat
else:  # a field named "for" can't be written in a class
    Repeat = create_model(
        "Repeat",
        __base__=_Repeat,
        __doc__=_Repeat.__doc__,
        __module__=__name__,
        **{
            "for": (
                Annotated[
                    int,
                    BeforeValidator(_top, json_schema_input_type=str),
                    PlainSerializer(lambda number: f"top {number}", return_type=str),
                ],
                Field(
                    default="top 4",
                    validate_default=True,
                    description="which trials are trained again: top and a number from 1 to 1000",
                    examples=["top 4"],
                ),
            )
        },
    )


def price_list(raw: object) -> object:
    """Prices by slot type, or those in a YAML file."""
    if not isinstance(raw, str | Path):
        return raw
    try:
        return read_mapping(Path(raw).expanduser())
    except ConfigError as error:
        raise ValueError("; ".join(fault.what for fault in error.faults)) from None


class MLflow(Section):
    """MLflow runs: one for the experiment, and a nested one for each trial."""

    place: ClassVar[str] = "loggers.mlflow"

    tracking_uri: Url | None = Field(
        default=None,
        description="URI of the tracking server; MLFLOW_TRACKING_URI by default",
        examples=["http://mlflow:5000"],
    )
    experiment_name: str | None = Field(
        default=None,
        min_length=1,
        description="MLflow experiment; by default, the name of this experiment",
        examples=["digits"],
    )


class WandB(Section):
    """Runs in Weights & Biases: one for each trial, grouped by experiment."""

    place: ClassVar[str] = "loggers.wandb"

    project: str | None = Field(
        default=None, min_length=1, description="the project; by default, the experiment's name", examples=["digits"]
    )
    entity: str | None = Field(default=None, min_length=1, description="a user or a team", examples=["my-team"])
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="offline: write to the experiment's directory, for wandb sync; WANDB_MODE by default",
        examples=["offline"],
    )


class Loggers(Section):
    """Experiment trackers to log to. A list works too: ``[mlflow, wandb]``."""

    place: ClassVar[str] = "loggers"

    mlflow: MLflow | None = Field(default=None, description="MLflow", examples=[{"tracking_uri": "http://mlflow:5000"}])
    wandb: WandB | None = Field(default=None, description="Weights & Biases", examples=[{"project": "digits"}])


_LoggerForm: TypeAlias = Literal["mlflow", "wandb"] | Loggers
LoggersForm: TypeAlias = _LoggerForm | list[_LoggerForm]


def named_loggers(raw: object) -> object:
    """A list of names, or of names with fields, as a mapping."""
    named: dict[object, object] = {}
    for each in raw if isinstance(raw, list) else [raw]:
        if isinstance(each, str):
            named.setdefault(each, {})
        elif isinstance(each, Mapping):
            named |= {name: {} if fields is None else fields for name, fields in each.items()}
        else:
            return raw
    return named
