"""The fields of an experiment config, as Determined names them, each with its type, bounds and default.

What needs more than one field to judge stands in ``rules.py``; how a fault is worded, in ``faults.py``.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    SecretStr,
    Tag,
    model_validator,
)

from dray.experiment.command import is_class, parse_entrypoint
from dray.experiment.determined_fields import actions
from dray.experiment.length import Length, LengthUnit, parse_length
from dray.masking import masked, texts
from dray.storage import Location, bucket_uri

Variant: TypeAlias = Literal["stopping", "promotion"]
Mode: TypeAlias = Literal["aggressive", "standard", "conservative"]
MAX_SEED = 2**32 - 1


def _entrypoint(raw: object) -> object:
    parse_entrypoint(raw)
    return raw


#: What stands in Determined's older configs, and what does its work now.
_SUCCESSORS = {
    "sync_halving": "asha (its max_length, num_rungs and divisor mean the same)",
    "adaptive": "adaptive_asha",
    "adaptive_simple": "adaptive_asha",
    "manual": "custom, with a method of your own",
    "pbt": "adaptive_asha, or a method of your own",
}

#: The method that is given from Python, as in Determined.
CUSTOM = "custom"


def _method(raw: object) -> object:
    if isinstance(raw, str) and raw in _SUCCESSORS:
        raise ValueError(f"{raw} is no more, in Determined neither; use {_SUCCESSORS[raw]}")
    if isinstance(raw, str) and not is_class(raw) and raw not in SEARCHER_FIELDS:
        near = difflib.get_close_matches(raw, SEARCHER_FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "for example name: asha"
        raise ValueError(f"must be one of {', '.join(SEARCHER_FIELDS)}, or module:Class, got {raw!r}; {hint}")
    return raw


def _named_sampler(raw: object) -> object:
    if isinstance(raw, str):
        return {"name": raw}
    return {field: value for field, value in raw.items() if value is not None} if isinstance(raw, dict) else raw


def _named_loggers(raw: object) -> object:
    """A list of names, or of names with fields, as one mapping."""
    named: dict[object, object] = {}
    for each in raw if isinstance(raw, list) else [raw]:
        if isinstance(each, str):
            named.setdefault(each, {})
        elif isinstance(each, Mapping):
            named |= {name: {} if fields is None else fields for name, fields in each.items()}
        else:
            return raw
    return named


def _whole_if_whole(number: float) -> float:
    # 4.0 and 4 are one divisor; as an integer, the rungs are computed exactly.
    return int(number) if number == int(number) else number


def _length(raw: object) -> Length:
    return parse_length(raw, minimum=1)


def _period(raw: object) -> Length | None:
    # Determined writes "no period" as {batches: 0}.
    length = None if raw is None else parse_length(raw, minimum=0)
    return length if length is not None and length.value > 0 else None


def _as_text(raw: object) -> object:
    return os.fspath(raw) if isinstance(raw, os.PathLike) else raw


def _no_number(raw: object) -> object:
    if isinstance(raw, int) and not isinstance(raw, bool):
        raise ValueError(
            f"must be the directory of a trial, as RESULTS/trial_{raw}, got {raw}: experiments share no numbers here"
        )
    return raw


def _storage_of(raw: object) -> object:
    if isinstance(raw, str | os.PathLike):
        return _storage(raw)
    if isinstance(raw, dict) and raw.get("type") == "shared_fs" and "storage_path" not in raw:
        # What storage_path was called once.
        raw = {("storage_path" if name == "checkpoint_path" else name): value for name, value in raw.items()}
    where = raw.get("storage_path") if isinstance(raw, Mapping) else None
    # Its credentials are fields of their own, which are not stored.
    return {**raw, **_storage(where)} if isinstance(raw, dict) and isinstance(where, str) and "://" in where else raw


def _without_credentials(url: str) -> str:
    """Urls are stored, and shown."""
    if "@" in url or "?" in url:
        raise ValueError("must hold no user, password or token, for it is stored; leave these to the environment")
    return url


def _bucket(name: str) -> str:
    if ":" in name or "@" in name:
        raise ValueError("must be the name alone; credentials are access_key and secret_key, or the environment's")
    return name


def _storage(raw: str | os.PathLike[str]) -> dict[str, Any]:
    """Ray's way to say where: a path, or a URI with what its filesystem needs to know."""
    if not os.fspath(raw):
        raise ValueError("must not be empty; for example checkpoint_storage: s3://bucket/results")
    where = Location.of(raw)
    if where.is_local:
        return {"type": "directory", "container_path": where.uri}
    for name, _ in where.secrets:
        if name not in SECRETS:
            raise ValueError(f"{name} can't be given in the URI of a storage; leave it to the environment")
    return {"type": "uri", "storage_path": where.uri, **dict(where.secrets)}


def _labels(raw: object) -> object:
    # Older configs have them as the names of a mapping.
    return list(raw) if isinstance(raw, Mapping) else raw


def _records(raw: object) -> object:
    # Determined writes "not said" as 0.
    return None if raw == 0 and not isinstance(raw, bool) else raw


def _precision(raw: object) -> object:
    if raw == "O3":
        raise ValueError("O3, which computes all in float16, has no counterpart; write O1, which takes care of losses")
    return raw


#: What Determined calls the devices of slots; gpu is an older word for cuda.
DEVICES = ("cpu", "cuda", "gpu", "rocm")


def _variables(raw: object) -> object:
    """A list of ``NAME=VALUE``, or a mapping; or one of these for each kind of device."""
    if not isinstance(raw, Mapping):
        return _named(raw, "")
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if name in DEVICES and not isinstance(value, str):
            found[name] = {} if value is None else _named(value, f"{name}: ")
        else:
            found |= _named({name: value}, "")
    return found


def _named(raw: object, where: str) -> dict[str, str]:
    """Values, which may be secrets, are in no message."""
    if isinstance(raw, list):
        pairs = [line.partition("=") if isinstance(line, str) else ("", "", "") for line in raw]
        wrong = [str(place) for place, (name, sign, _) in enumerate(pairs, start=1) if not name or not sign]
        if wrong:
            raise ValueError(f"{where}must be a list of NAME=VALUE, which number {', '.join(wrong)} of it is not")
        return {name: value for name, _, value in pairs}
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}must be a list of NAME=VALUE, or a mapping, got a {type(raw).__name__}")
    found = {}
    for name, value in raw.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ValueError(f"{where}must have names of variables, got {name!r}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            told = f"{where}{name} must be text, got a {type(value).__name__}; write it in quotes"
            raise ValueError(told)
        found[name] = str(value)
    return found


_ACTIONS = ("cancel_retries", "exclude_node", "signal", "send_webhook")
_OF_A_POLICY = ("pattern", "action", "actions", "policy", "signal", "name")


def _policies(raw: object) -> object:
    """Those that say something here, which is to start no trial again."""
    if not isinstance(raw, list):
        return raw
    kept = []
    for number, policy in enumerate(raw):
        if not isinstance(policy, Mapping) or not isinstance(pattern := policy.get("pattern"), str):
            raise ValueError(f"number {number} must have a pattern; for example {_POLICY}")
        for field in policy:
            if field not in _OF_A_POLICY:
                near = difflib.get_close_matches(str(field), _OF_A_POLICY, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_OF_A_POLICY)}"
                raise ValueError(f"number {number} has an unknown field {field}; {hint}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"number {number}: {pattern!r} is no regular expression of Python's: {error}") from None
        asked = actions(policy)
        for action in asked:
            if action not in _ACTIONS:
                raise ValueError(f"number {number}: action must be one of {', '.join(_ACTIONS)}, got {action!r}")
        if not asked:
            raise ValueError(f"number {number} says nothing of what to do; for example {_POLICY}")
        if "cancel_retries" in asked:
            kept.append({"pattern": pattern, "action": "cancel_retries"})
    return kept


_POLICY = "{pattern: CUDA out of memory, action: cancel_retries}"

_as_dict = PlainSerializer(lambda length: None if length is None else length.to_dict())
MaxLength: TypeAlias = Annotated[Length, BeforeValidator(_length), _as_dict]
Period: TypeAlias = Annotated[Length | None, BeforeValidator(_period), _as_dict]
Seconds: TypeAlias = Annotated[float, Field(gt=0), AfterValidator(_whole_if_whole)]
Directory: TypeAlias = Annotated[str, BeforeValidator(_as_text), Field(min_length=1)]
Url: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_without_credentials)]
Bucket: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_bucket)]
Secret: TypeAlias = Annotated[SecretStr | None, Field(exclude=True)]


class _Section(BaseModel):
    # strict: "64" is not a number and 1 is not true, a config that says so is mistaken.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def variant_of(stop_once: bool) -> Variant:
    """What Determined's ``stop_once`` says."""
    return "stopping" if stop_once else "promotion"


class SamplerChoice(_Section):
    """Where hyperparameters come from."""

    name: str = Field(
        default="random",
        min_length=1,
        description="random, tpe, gp, cmaes, a sampler of Optuna, or module:Class",
        examples=["tpe"],
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the sampler", examples=["{n_startup_trials: 20}"]
    )


#: What ``time_metric`` may name that no trial has to report.
OWN_TIMES: tuple[LengthUnit, ...] = ("batches", "epochs")


class Searcher(_Section):
    """Which trials run, and for how long.

    ``stop_once`` is another spelling of ``variant`` in what is read; ``load_config`` leaves ``variant`` alone.
    """

    name: Annotated[str, BeforeValidator(_method)] = Field(description="the search method", examples=["asha"])
    metric: str = Field(
        min_length=1, description="the validation metric that the search compares", examples=["validation_loss"]
    )
    smaller_is_better: bool = Field(default=True, description="whether the metric is to fall", examples=[True])
    max_length: MaxLength | None = Field(
        default=None, description="how long a trial trains at most", examples=["{epochs: 16}"]
    )
    max_trials: int | None = Field(default=None, ge=1, description="how many trials there are", examples=[64])
    max_concurrent_trials: int = Field(
        default=16, ge=0, description="how many trials run at once at most, 0 for no limit", examples=[16]
    )
    divisor: Annotated[float, AfterValidator(_whole_if_whole)] = Field(
        default=4, gt=1, description="one trial in so many goes on at each rung", examples=[4]
    )
    num_rungs: int | None = Field(
        default=None, ge=1, description="how many lengths trials are compared at", examples=[3]
    )
    variant: Variant = Field(
        default="stopping",
        description="what happens at a rung: a trial is stopped, or paused and perhaps promoted later",
        examples=["promotion"],
    )
    stop_once: bool | None = Field(
        default=None, description="Determined's variant: true is stopping, false is promotion", examples=[True]
    )
    max_time: int | None = Field(
        default=None, ge=1, description="how long a trial trains at most, counted by time_metric", examples=[600]
    )
    time_metric: str | None = Field(
        default=None,
        min_length=1,
        description="what max_time and the rungs count by: batches, epochs, or a validation metric",
        examples=["seconds"],
    )
    mode: Mode = Field(default="standard", description="how many brackets there are", examples=["standard"])
    max_rungs: int = Field(default=5, ge=1, description="how many rungs a bracket has at most", examples=[5])
    bracket_rungs: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=list, description="how many rungs each bracket has, instead of mode", examples=["[3, 2]"]
    )
    sampler: Annotated[SamplerChoice, BeforeValidator(_named_sampler)] = Field(
        default_factory=SamplerChoice, description="where hyperparameters come from", examples=["tpe"]
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the class that name names", examples=["{max_trials: 64}"]
    )
    points: list[dict[str, Any]] = Field(
        default_factory=list, description="hyperparameters of the first trials", examples=["[{lr: 0.01}]"]
    )

    source_trial_id: Annotated[str | None, BeforeValidator(_as_text), BeforeValidator(_no_number)] = Field(
        default=None,
        min_length=1,
        description="the directory of a trial, with whose latest checkpoint every trial begins",
        examples=["/mnt/results/digits/trial_7"],
    )
    source_checkpoint_uuid: Annotated[str | None, BeforeValidator(_as_text)] = Field(
        default=None,
        min_length=1,
        description="a checkpoint, dray's or Determined's, with which every trial begins: its directory, or UUID in "
        "checkpoint_storage",
        examples=["/mnt/results/digits/trial_7/checkpoint_352"],
    )

    @property
    def length(self) -> int | None:
        """The most that a trial trains, in the unit that the search counts in."""
        if self.max_time is not None:
            return self.max_time
        return None if self.max_length is None else self.max_length.value

    @property
    def counted_length(self) -> Length | None:
        """``max_length``, or a ``max_time`` that counts batches or epochs, which every trial knows by itself."""
        unit = next((own for own in OWN_TIMES if own == self.time_metric), None)
        return self.max_length if unit is None or self.max_time is None else Length(unit=unit, value=self.max_time)

    @property
    def counted_by(self) -> str | None:
        """The validation metric that length is counted by; None for what every trial knows by itself."""
        return self.time_metric if self.max_time is not None and self.time_metric not in OWN_TIMES else None

    def of_length(self, length: int) -> Searcher:
        """The same with another ``length``, in the unit that it counts in."""
        if self.max_time is not None:
            return self.model_copy(update={"max_time": length})
        unit: LengthUnit = "batches" if self.max_length is None else self.max_length.unit
        return self.model_copy(update={"max_length": Length(unit=unit, value=length)})


_COMMON = frozenset({"name", "metric", "smaller_is_better", "max_length", "source_trial_id", "source_checkpoint_uuid"})
_GRID = _COMMON | {"max_concurrent_trials"}
_RANDOM = _GRID | {"max_trials", "sampler", "points"}
_HALVING = _RANDOM | {"divisor", "variant", "stop_once", "max_time", "time_metric"}
_ASHA = _HALVING | {"num_rungs"}
_ADAPTIVE = _HALVING | {"mode", "max_rungs", "bracket_rungs"}

_CUSTOM = _COMMON | {"sampler", "points", "max_time", "time_metric"}
_OWN = _CUSTOM | {"options"}

#: The fields under ``searcher`` that each method uses.
SEARCHER_FIELDS: dict[str, frozenset[str]] = {
    "single": _COMMON,
    "random": _RANDOM,
    "grid": _GRID,
    "asha": _ASHA,
    "async_halving": _ASHA,
    "adaptive_asha": _ADAPTIVE,
    CUSTOM: _CUSTOM,
}


def searcher_fields(name: str) -> frozenset[str]:
    """The fields under ``searcher`` that a method uses: one of dray's, or a class of the user's."""
    return _OWN if is_class(name) else SEARCHER_FIELDS[name]


class SlotRange(_Section):
    """As many slots as there are just now, within bounds; where one trial runs at a time."""

    min: int = Field(ge=1, description="the fewest workers that a trial waits for", examples=[1])
    max: int = Field(ge=1, description="the most workers that train a trial", examples=[4])


def _slots_form(raw: object) -> str:
    return SLOT_FORMS[isinstance(raw, Mapping | SlotRange)]


#: The two ways to say how many slots, as pydantic's locations of errors name them.
SLOT_FORMS = ("as a number", "as a range")
SlotsPerTrial: TypeAlias = Annotated[
    Annotated[int, Field(ge=1), Tag(SLOT_FORMS[0])] | Annotated[SlotRange, Tag(SLOT_FORMS[1])],
    Discriminator(_slots_form),
]


class Resources(_Section):
    """What one trial runs on. With ``slots_per_trial: 0`` that is one slot of ``slot: cpu``."""

    slots_per_trial: SlotsPerTrial = Field(
        default=1,
        description="how many workers train one trial; {min: 1, max: 4} for as many of these as the cluster has room "
        "for, where one trial runs at a time",
        examples=[1],
    )
    max_slots: int | None = Field(
        default=None,
        ge=1,
        description="how many slots all trials of the experiment together have at most; by default all there are",
        examples=[8],
    )
    slot: Literal["gpu", "cpu"] | None = Field(
        default=None, description="what a slot is; found out from the cluster where it is not said", examples=["gpu"]
    )
    cpus_per_slot: int = Field(default=1, ge=1, description="CPUs that each worker gets", examples=[1])
    placement_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="a trial's workers on few nodes if that is possible, on one, on many if possible, each on its own",
        examples=["STRICT_PACK"],
    )
    is_single_node: bool | None = Field(
        default=None, description="Determined's placement_strategy: true is STRICT_PACK", examples=["true"]
    )
    reuse_workers: bool = Field(
        default=True,
        description="whether trials follow one another in the same processes; a new start takes seconds",
        examples=["false"],
    )

    @model_validator(mode="before")
    @classmethod
    def _in_our_words(cls, raw: object) -> object:
        if not isinstance(raw, dict):
            return raw
        raw = dict(raw)
        if isinstance(raw.get("is_single_node"), bool) and raw.pop("is_single_node"):
            raw["placement_strategy"] = "STRICT_PACK"
        if raw.get("slots_per_trial") == 0 and not isinstance(raw["slots_per_trial"], bool):
            raw |= {"slots_per_trial": 1, "slot": "cpu"}
        return raw


class Optimizations(_Section):
    """How gradients become steps. ``aggregation_frequency`` and ``mixed_precision`` are for a trial that is a class; a
    program says the one in ``pytorch.init()`` and the other with ``context.experimental.use_amp()``.
    """

    aggregation_frequency: int = Field(
        default=1, ge=1, description="batches whose gradients are added up before the optimizer steps", examples=[4]
    )
    average_aggregated_gradients: bool = Field(
        default=True, description="divide the sum of gradients by aggregation_frequency", examples=["true"]
    )
    gradient_compression: bool = Field(
        default=False, description="exchange gradients between slots in float16", examples=["true"]
    )
    mixed_precision: Annotated[Literal["O0", "O1", "O2"], BeforeValidator(_precision)] = Field(
        default="O0", description="O1 or O2: train in mixed precision, as use_amp() does; O0: don't", examples=["O1"]
    )


class Environment(_Section):
    """What trials find around them."""

    environment_variables: Annotated[dict[str, str | dict[str, str]], BeforeValidator(_variables)] = Field(
        default_factory=dict,
        description="set before any code of the trial is imported: a list of NAME=VALUE, or a mapping; or one of these "
        "for each of cpu, cuda, rocm. Values are stored and shown nowhere",
        examples=["[OMP_NUM_THREADS=4]"],
        repr=False,
    )

    def variables(self, device: Literal["cpu", "cuda", "rocm"]) -> dict[str, str]:
        """Those of trials on such devices."""
        said = self.environment_variables
        found = {name: value for name, value in said.items() if isinstance(value, str)}
        for kind in (device, "gpu") if device == "cuda" else (device,):
            mine = said.get(kind)
            found |= mine if isinstance(mine, dict) else {}
        return found


class LogPolicy(_Section):
    """What is done about a line of a trial's log."""

    pattern: str = Field(
        description="a regular expression, found in a line of what a trial that failed has printed",
        examples=["CUDA out of memory"],
    )
    action: Literal["cancel_retries"] = Field(
        description="cancel_retries: the trial is not started again", examples=["cancel_retries"]
    )


class CheckpointStorage(_Section):
    """Where experiments and their checkpoints are kept, and how many of these.

    In a directory that every node sees, or else the checkpoints in an object store. Instead of all this a path or a URI
    can be given, as ``s3://bucket/results``. Secrets are never part of ``to_dict``; where there are none here, those of
    the environment are used.
    """

    type: Literal["directory", "shared_fs", "s3", "gcs", "azure", "uri"] | None = Field(
        default=None, description="the kind of storage", examples=["directory"]
    )
    container_path: Directory | None = Field(default=None, description="the directory", examples=["/mnt/results"])
    host_path: Directory | None = Field(default=None, description="the shared directory", examples=["/mnt/results"])
    storage_path: Directory | None = Field(
        default=None, description="the directory, or the URI", examples=["/mnt/results"]
    )
    bucket: Bucket | None = Field(default=None, description="the bucket", examples=["my-bucket"])
    prefix: str | None = Field(default=None, description="where in the bucket", examples=["results"])
    endpoint_url: Url | None = Field(
        default=None, description="of an S3 that is not Amazon's", examples=["http://minio:9000"]
    )
    access_key: Secret = Field(default=None, description="of S3", examples=["AKIA..."])
    secret_key: Secret = Field(default=None, description="of S3", examples=["..."])
    session_token: Secret = Field(default=None, description="of S3, with keys that are lent", examples=["..."])
    container: str | None = Field(default=None, min_length=1, description="Azure's container", examples=["results"])
    account_url: Url | None = Field(
        default=None,
        description="Azure's account",
        examples=["https://me.blob.core.windows.net"],
    )
    connection_string: Secret = Field(default=None, description="of Azure", examples=["..."])
    credential: Secret = Field(default=None, description="of Azure, with account_url", examples=["..."])
    account_key: Secret = Field(default=None, description="of Azure, in a URI", examples=["..."])
    sas_token: Secret = Field(default=None, description="of Azure, in a URI", examples=["..."])
    save_experiment_best: int = Field(
        default=0, ge=0, description="how many of the experiment's best checkpoints are kept", examples=[1]
    )
    save_trial_best: int = Field(
        default=1, ge=0, description="how many of each trial's best checkpoints are kept", examples=[1]
    )
    save_trial_latest: int = Field(
        default=1, ge=0, description="how many of each trial's latest checkpoints are kept", examples=[1]
    )

    def at(self, where: str | os.PathLike[str]) -> CheckpointStorage:
        """As many checkpoints in another place.

        Raises:
            ValueError: there can't be such a place.
        """
        return CheckpointStorage(**{**_storage(where), **{name: getattr(self, name) for name in _RETENTION}})

    @property
    def location(self) -> Location | None:
        """Where it is, None if that is not said; ``storage_path`` of a ``shared_fs`` lies below its ``host_path``."""
        match self.type:
            case "s3":
                where = bucket_uri("s3", self.bucket, self.prefix, self.endpoint_url)
            case "gcs":
                where = bucket_uri("gs", self.bucket, self.prefix)
            case "azure":
                account = (self.account_url or "").rpartition("://")[2].partition(".")[0]
                where = f"az://{self.container}" + (f"?account_name={account}" if account else "")
            case "uri":
                where = self.storage_path or ""
            case _:
                parts = [part for part in (self.host_path, self.container_path, self.storage_path) if part is not None]
                return Location.of(Path(*parts).expanduser()) if parts else None
        secrets = {name: getattr(self, name) for name in SECRETS}
        given = tuple((name, value.get_secret_value()) for name, value in secrets.items() if value is not None)
        return Location(Location.of(where).uri, given)


#: Fields of ``checkpoint_storage`` that are shown and stored nowhere.
SECRETS = (
    "access_key", "secret_key", "session_token", "connection_string", "credential", "account_key", "sas_token"
)  # fmt: skip
_RETENTION = ("save_experiment_best", "save_trial_best", "save_trial_latest")
#: The fields of each type of ``checkpoint_storage``, the first of them required.
STORAGE_FIELDS: dict[str | None, tuple[str, ...]] = {
    None: ("type", *_RETENTION),
    "directory": ("type", "container_path", "storage_path", *_RETENTION),
    "shared_fs": ("host_path", "storage_path", "type", *_RETENTION),
    "s3": ("bucket", "prefix", "access_key", "secret_key", "session_token", "endpoint_url", "type", *_RETENTION),
    "gcs": ("bucket", "prefix", "type", *_RETENTION),
    "azure": ("container", "connection_string", "account_url", "credential", "type", *_RETENTION),
    "uri": ("storage_path", *SECRETS, "type", *_RETENTION),
}


class MLflow(_Section):
    """Where MLflow keeps the runs: one for the experiment, and one below it for each trial."""

    tracking_uri: Url | None = Field(
        default=None,
        description="of the tracking server; that of MLFLOW_TRACKING_URI by default",
        examples=["http://mlflow:5000"],
    )
    experiment_name: str | None = Field(
        default=None,
        min_length=1,
        description="MLflow's experiment; by default of this one's name",
        examples=["digits"],
    )


class WandB(_Section):
    """Where Weights & Biases keeps the runs: one for each trial, in a group for the experiment."""

    project: str | None = Field(
        default=None, min_length=1, description="the project; by default of the experiment's name", examples=["digits"]
    )
    entity: str | None = Field(default=None, min_length=1, description="a user or a team", examples=["my-team"])
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="offline: kept in the experiment's directory, for wandb sync; that of WANDB_MODE by default",
        examples=["offline"],
    )


class Loggers(_Section):
    """Where the experiment is written down as well. A list will do: ``[mlflow, wandb]``."""

    mlflow: MLflow | None = Field(default=None, description="MLflow", examples=["{tracking_uri: http://mlflow:5000}"])
    wandb: WandB | None = Field(default=None, description="Weights & Biases", examples=["{project: digits}"])


class Reproducibility(_Section):
    """What makes two experiments equal."""

    experiment_seed: int = Field(
        default_factory=lambda: secrets.randbits(31),
        ge=0,
        le=MAX_SEED,
        description="the seed of hyperparameters, initial weights and data order",
        examples=[7],
    )


class ExperimentConfig(_Section):
    """A checked experiment config. Made by ``load_config``; equal configs with equal seeds run equal searches.

    Attributes:
        entrypoint: ``module:Class``, or a program such as ``python3 train.py --epochs 1`` (also as a list of words);
            None where the trial's class is given from Python.
        hyperparameters: As written: constants and spaces, by name.
        data: Free for the user; the trial reads it with ``context.get_data_config()``. What is below ``data.secrets``
            the trial alone gets to see.
        min_validation_period: A trial validates at least this often; None: only where the search or the end asks.
        min_checkpoint_period: A trial saves at least this often; None: by ``checkpoint_policy`` and at the end.
        max_restarts: How often one trial may be started again after a failure. It is given up before that when it runs
            out of memory twice, or fails twice with the same error, in the same line, after the same number of batches.
        hang_timeout_s: A trial that for so long trains and validates no batch and saves no checkpoint is ended, with
            what its threads were doing in its log, and started again from its latest checkpoint. Its start counts, and
            so does a wait for other ranks, but no wait for an object store: choose it well above the longest of these.
            None: never.
    """

    name: str = Field(min_length=1, description="the experiment's name", examples=["digits-asha"])
    description: str = Field(default="", description="for people", examples=["a first sweep"])
    labels: Annotated[list[str], BeforeValidator(_labels)] = Field(
        default_factory=list, description="for people", examples=["[digits, sweep]"]
    )
    data: dict[str, Any] = Field(
        default_factory=dict,
        description="free for the trial; values below secrets are stored and shown nowhere",
        examples=["{path: /data}"],
        repr=False,
    )
    entrypoint: Annotated[str | list[str] | None, BeforeValidator(_entrypoint)] = Field(
        default=None, description="the trial's class, or a program", examples=["model_def:DigitsTrial"]
    )
    hyperparameters: dict[str, Any] = Field(
        default_factory=dict, description="constants and spaces", examples=["{global_batch_size: 64}"]
    )
    searcher: Searcher = Field(
        description="the search", examples=["{name: single, metric: validation_loss, max_length: {epochs: 16}}"]
    )
    resources: Resources = Field(
        default_factory=Resources, description="what a trial runs on", examples=["{slots_per_trial: 1}"]
    )
    optimizations: Optimizations = Field(
        default_factory=Optimizations,
        description="how gradients become steps",
        examples=["{aggregation_frequency: 4}"],
    )
    environment: Environment = Field(
        default_factory=Environment,
        description="what trials find around them",
        examples=["{environment_variables: [OMP_NUM_THREADS=4]}"],
    )
    scheduling_unit: int = Field(
        default=100,
        ge=1,
        description="how often the training metrics of a trial that is a class are reported, in batches",
        examples=[100],
    )
    records_per_epoch: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_records)] = Field(
        default=None,
        description="how many records an epoch has where the training data does not say it itself",
        examples=[50000],
    )
    perform_initial_validation: bool = Field(
        default=False, description="a trial that is a class validates before its first batch", examples=["true"]
    )
    min_validation_period: Period = Field(default=None, description="how often to validate", examples=["{epochs: 1}"])
    min_checkpoint_period: Period = Field(default=None, description="how often to save", examples=["{epochs: 1}"])
    checkpoint_policy: Literal["best", "all", "none"] = Field(
        default="best", description="which validations are followed by a checkpoint", examples=["best"]
    )
    checkpoint_storage: Annotated[CheckpointStorage, BeforeValidator(_storage_of)] = Field(
        default_factory=CheckpointStorage,
        description="where results are kept",
        examples=["{type: directory, container_path: /mnt/results}"],
    )
    max_restarts: int = Field(default=5, ge=0, description="restarts of one trial after failures", examples=[5])
    log_policies: Annotated[list[LogPolicy], BeforeValidator(_policies)] = Field(
        default_factory=list,
        description="what is done when a trial has failed after it printed such a line",
        examples=[f"[{_POLICY}]"],
    )
    hang_timeout_s: Seconds | None = Field(
        default=None, description="how long a trial may make no progress before it is ended", examples=[600]
    )
    loggers: Annotated[Loggers, BeforeValidator(_named_loggers)] = Field(
        default_factory=Loggers, description="where it is written down as well", examples=["[mlflow, wandb]"]
    )
    reproducibility: Reproducibility = Field(
        default_factory=Reproducibility, description="the seed", examples=["{experiment_seed: 7}"]
    )

    @property
    def slots_per_trial(self) -> tuple[int, ...]:
        """The numbers of workers that a trial may have, in order: more than one only if ``resources`` give a range.

        Those in the range among which ``global_batch_size`` can be divided evenly.
        """
        asked = self.resources.slots_per_trial
        if isinstance(asked, int):
            return (asked,)
        return even_sizes(asked, constant(self.hyperparameters["global_batch_size"]), self.resources.max_slots)

    def to_dict(self) -> dict[str, Any]:
        """The config as plain lists, mappings and scalars, with every default filled in and without its secrets.

        ``load_config(config.to_dict()) == config`` for one without secrets, also by way of a YAML file.
        """
        plain = self.model_dump(mode="python", exclude_none=True)
        used = searcher_fields(self.searcher.name)
        plain["searcher"] = {field: value for field, value in plain["searcher"].items() if field in used}
        # None is a value here, a constant like any other.
        if "options" in used:
            plain["searcher"]["options"] = self.searcher.options
        plain["hyperparameters"], plain["data"] = self.hyperparameters, self.data
        return masked(plain)

    def for_code(self) -> dict[str, Any]:
        """``to_dict`` as a trial's code gets it: with what Determined's copy of a config has where nothing is said."""
        unsaid = {
            "min_validation_period": {"batches": 0},
            "min_checkpoint_period": {"batches": 0},
            "records_per_epoch": 0,
        }
        return {**unsaid, **self.to_dict()}

    @property
    def secrets(self) -> list[str]:
        """Texts that no file may hold which the experiment leaves."""
        storage = self.checkpoint_storage.location
        keys = dict(storage.secrets) if storage is not None else {}
        environment = {"environment_variables": self.environment.environment_variables}
        return texts({"data": {"secrets": [self.data.get("secrets"), keys]}, "environment": environment})


def constant(spec: Any) -> Any:
    """The value of a hyperparameter that is constant."""
    return spec.get("val") if isinstance(spec, Mapping) else spec


def even_sizes(asked: SlotRange, batch_size: int, most: int | None) -> tuple[int, ...]:
    """The numbers of workers in a range, up to ``most``, among which a batch can be divided evenly."""
    last = min(asked.max, batch_size, asked.max if most is None else most)
    return tuple(size for size in range(asked.min, last + 1) if batch_size % size == 0)


SECTIONS: dict[tuple[str, ...], type[_Section]] = {
    (): ExperimentConfig,
    ("searcher",): Searcher,
    ("searcher", "sampler"): SamplerChoice,
    ("resources",): Resources,
    ("resources", "slots_per_trial"): SlotRange,
    ("optimizations",): Optimizations,
    ("environment",): Environment,
    ("checkpoint_storage",): CheckpointStorage,
    ("loggers",): Loggers,
    ("loggers", "mlflow"): MLflow,
    ("loggers", "wandb"): WandB,
    ("reproducibility",): Reproducibility,
}
