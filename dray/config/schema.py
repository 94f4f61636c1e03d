"""The fields of an experiment config, with Determined's names, each with its type, bounds and default.

Small sections are in ``sections.py``, each larger one has its own module. Rules about several fields are in
``rules.py``, the wording of faults in ``faults.py``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    ValidationInfo,
    field_validator,
)

from dray.config.entrypoint import Entrypoint, as_written, parse_entrypoint
from dray.config.length import Period
from dray.config.log_policies import LogPolicy, policies
from dray.config.notify import Notify
from dray.config.resources import Resources, SlotRange, even_sizes
from dray.config.searcher import BY_METHOD, ClassSearcher, Searcher
from dray.config.section import ConfigNotes, Section, int_if_whole, named
from dray.config.sections import (
    Budget,
    Environment,
    Loggers,
    LoggersForm,
    Optimizations,
    Profiling,
    Repeat,
    Reproducibility,
    named_loggers,
    price_list,
)
from dray.config.storage import CheckpointStorage, Storage
from dray.masking import masked, texts
from dray.script import Script
from searchers.space import Space, parse, spaces_in_lists

OWN = ("/", "/dev", "/proc", "/tmp")
"""Directories of which each sandbox has its own."""


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError(f"must be an absolute path, the same on all nodes, got {path!r}")
    if (found := os.path.normpath(path)) in OWN:
        raise ValueError(f"can't be {found}, of which each sandbox has its own; name what is needed in it")
    return found


class Isolation(Section):
    """Isolation of a trial's code from the rest of its machine. ``isolation: sandbox`` is short for ``{name:
    sandbox}``."""

    place: ClassVar[str] = "isolation"

    name: Literal["none", "sandbox"] = Field(
        default="none",
        description="sandbox: each trial runs in its own process, without network access. It sees only its code, its "
        "directory, and the installed programs and libraries, and can write only to its directory. Needs bubblewrap",
        examples=["sandbox"],
    )
    read: list[Annotated[str, AfterValidator(_absolute)]] = Field(
        default_factory=list,
        description="other files and directories that a trial in a sandbox may read, such as its data",
        examples=[["/data/cifar"]],
    )

    @property
    def is_sandbox(self) -> bool:
        return self.name == "sandbox"


IsolationField: TypeAlias = Annotated[
    Isolation, BeforeValidator(named, json_schema_input_type=Literal["none", "sandbox"] | Isolation)
]


MAX_NAME = 200
_IN_LIST = (
    "a list is a constant, with any spaces in it, as in Determined; give the space a name of its own to search it"
)


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"must be one line of printable characters, got {name!r:.60}")
    return name


def _labels(raw: object) -> object:
    # In older configs they are the keys of a mapping.
    return list(raw) if isinstance(raw, Mapping) else raw


Labels: TypeAlias = Annotated[
    list[str],
    BeforeValidator(
        _labels, json_schema_input_type=list[str] | Annotated[dict[str, Any], Field(description="its names")]
    ),
]


def _records(raw: object) -> object:
    # Determined writes 0 for "not set".
    return None if raw == 0 and not isinstance(raw, bool) else raw


def _with_text_names(value: Any) -> Any:
    """A copy in which all names are text: a config is sent to a trial's code as JSON."""
    if isinstance(value, Mapping):
        return {
            name if isinstance(name, str) else json.dumps(name): _with_text_names(item) for name, item in value.items()
        }
    return [_with_text_names(item) for item in value] if isinstance(value, list) else value


def _without_spaces_in_lists(spec: Any) -> Any:
    """A hyperparameter in which each list that contains a space is an explicit constant."""
    if isinstance(spec, Mapping) and "type" not in spec:
        return {name: _without_spaces_in_lists(item) for name, item in spec.items()}
    return {"type": "const", "val": spec} if isinstance(spec, list) and spaces_in_lists(spec, "") else spec


def _name_of(fields: dict[str, Any]) -> str:
    """The default name of an experiment: the class's name, or that of the program's file."""
    entrypoint: Entrypoint | None = fields.get("entrypoint")
    if entrypoint is None:
        return "experiment"
    if isinstance(entrypoint, Script):
        return entrypoint.module or Path(str(entrypoint.file)).stem
    return entrypoint.name


Free: TypeAlias = Annotated[dict[str, Any], BeforeValidator(_with_text_names)]  # a mapping that is the user's own
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=1_000_000_000), AfterValidator(int_if_whole)]


class ExperimentConfig(Section):
    """A checked experiment config, made by ``load_config``."""

    entrypoint: Annotated[
        Entrypoint | None,
        PlainValidator(parse_entrypoint, json_schema_input_type=str | list[str]),
        PlainSerializer(as_written),
    ] = Field(
        default=None, description="the trial class, or the program that trains", examples=["model_def:DigitsTrial"]
    )
    name: Annotated[str, AfterValidator(_printable)] = Field(
        default_factory=_name_of,
        validate_default=True,
        min_length=1,
        max_length=MAX_NAME,
        description="the experiment's name",
        examples=["digits-asha"],
    )
    description: str = Field(default="", description="a description, for people", examples=["a first sweep"])
    labels: Labels = Field(default_factory=list, description="labels, for people", examples=[["digits", "sweep"]])
    data: Free = Field(
        default_factory=dict,
        description="any data for the trial's code. Values below data.secrets are never stored with the config or "
        "shown",
        examples=[{"path": "/data"}],
        repr=False,
    )
    hyperparameters: Free = Field(
        default_factory=dict,
        validate_default=True,
        description="the hyperparameters: constants, and spaces to search",
        examples=[{"global_batch_size": 64}],
    )
    searcher: Annotated[Searcher, BY_METHOD] = Field(
        description="the search method and its settings",
        examples=[{"name": "single", "metric": "validation_loss", "max_length": {"epochs": 16}}],
    )
    budget: Budget | None = Field(
        default=None, description="what the experiment may spend", examples=[{"time": "2h", "slot_hours": 40}]
    )
    prices: Annotated[
        dict[str, Annotated[float, Field(ge=0)]] | None,
        BeforeValidator(price_list, json_schema_input_type=dict[str, float] | str),
    ] = Field(
        default=None,
        description="US dollars per slot-hour, by GPU type as Ray names it, with -spot for spot nodes, and CPU for "
        "slots without a GPU. Or the path of a YAML file with these prices",
        examples=[{"A100": 2.9, "A100-spot": 1.1}],
    )
    until: Annotated[dict[str, float], Field(min_length=1)] | None = Field(
        default=None,
        description="targets for the searcher's metrics. The experiment ends when a validation of a trial reaches all "
        "of them",
        examples=[{"validation_loss": 0.05}],
    )
    patience: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="end the experiment when this many trials in a row have completed or were stopped without "
        "improving the best value of the searcher's metric",
        examples=[50],
    )
    repeat: Repeat | None = Field(
        default=None,
        description="train the best trials again with other seeds before choosing the best one",
        examples=[{"seeds": 3, "for": "top 4"}],
    )
    resources: Resources = Field(
        default_factory=Resources, description="the slots that a trial runs on", examples=[{"slots_per_trial": 1}]
    )
    optimizations: Optimizations = Field(
        default_factory=Optimizations,
        description="gradient aggregation and mixed precision",
        examples=[{"aggregation_frequency": 4}],
    )
    environment: Environment = Field(
        default_factory=Environment,
        description="the environment of trials",
        examples=[{"environment_variables": ["OMP_NUM_THREADS=4"]}],
    )
    isolation: IsolationField = Field(
        default_factory=Isolation,
        description="isolation of a trial's code from the rest of its machine",
        examples=["sandbox"],
    )
    scheduling_unit: int = Field(
        default=100,
        ge=1,
        description="number of batches between reports of training metrics, for a trial class",
        examples=[100],
    )
    records_per_epoch: Annotated[
        Annotated[int, Field(ge=1)] | None,
        BeforeValidator(_records, json_schema_input_type=Annotated[int, Field(ge=0)]),
    ] = Field(
        default=None,
        description="number of records in an epoch; used only if the training data loader has no length",
        examples=[50000],
    )
    perform_initial_validation: bool = Field(
        default=False, description="validate before the first batch, for a trial class", examples=[True]
    )
    min_validation_period: Period = Field(
        default=None, description="validate at least this often", examples=[{"epochs": 1}]
    )
    min_checkpoint_period: Period = Field(
        default=None, description="save a checkpoint at least this often", examples=[{"epochs": 1}]
    )
    checkpoint_policy: Literal["best", "all", "none"] = Field(
        default="best",
        description="when a validation is followed by a checkpoint. best: if it is the experiment's best so far; all: "
        "always; none: never",
        examples=["best"],
    )
    checkpoint_format: Literal["sharded", "full"] = Field(
        default="sharded",
        description="for models that are sharded over slots. sharded: each slot saves its shards; full: the model is "
        "gathered into state-dict.pth",
        examples=["full"],
    )
    checkpoint_storage: Storage = Field(
        default_factory=CheckpointStorage,
        description="where experiments and checkpoints are stored; by default DRAY_STORAGE, or else ~/dray_results",
        examples=[{"type": "directory", "container_path": "/mnt/results"}],
    )
    max_restarts: int = Field(default=5, ge=0, description="maximum number of restarts of a trial", examples=[5])
    profiling: Profiling = Field(
        default_factory=Profiling,
        description="traces and memory snapshots of some batches",
        examples=[{"enabled": True}],
    )
    stop_on_nan: bool = Field(
        default=False,
        description="stop a trial when it first reports a loss that is NaN or infinite. Otherwise, only ASHA stops "
        "it, at its next rung, where NaN ranks last",
        examples=[True],
    )
    log_policies: Annotated[list[LogPolicy], AfterValidator(policies)] = Field(
        default_factory=list,
        description="reactions to lines in the log of a failed trial",
        examples=[[{"pattern": "CUDA out of memory", "action": "cancel_retries"}]],
    )
    hang_timeout_s: Seconds = Field(
        default=7200,
        description="restart a trial after this many seconds without progress. 0: never",
        examples=[600],
    )
    collective_timeout_s: Annotated[float, Field(ge=1, le=1_000_000_000), AfterValidator(int_if_whole)] = Field(
        default=600,
        description="restart a trial after its slots have waited for one another for this many seconds in a "
        "collective, such as the exchange of gradients",
        examples=[1800],
    )
    loggers: Annotated[Loggers, BeforeValidator(named_loggers, json_schema_input_type=LoggersForm)] = Field(
        default_factory=Loggers, description="experiment trackers to log to", examples=[["mlflow", "wandb"]]
    )
    notify: Notify = Field(
        default_factory=Notify,
        description="alerts when the experiment ends, fails, no longer improves, or has nearly spent its budget",
        examples=[{"command": 'notify-send "$DRAY_NOTIFY_TEXT"'}],
    )
    reproducibility: Reproducibility = Field(
        default_factory=Reproducibility, description="the seed, and determinism", examples=[{"experiment_seed": 7}]
    )

    _space: Space = PrivateAttr()

    @field_validator("hyperparameters")
    @classmethod
    def _parsed(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        hyperparameters = {name: _without_spaces_in_lists(spec) for name, spec in given.items()}
        if (notes := info.context) is not None:
            notes.ignored.update(dict.fromkeys(spaces_in_lists(given, "hyperparameters"), _IN_LIST))
            # Stored before parsing, because rules read it even if it is invalid.
            notes.given["hyperparameters"] = hyperparameters
            notes.given["space"] = parse(hyperparameters)
        return hyperparameters

    def model_post_init(self, notes: ConfigNotes | None, /) -> None:
        self._space = parse(self.hyperparameters) if notes is None else notes.given["space"]

    @property
    def space(self) -> Space:
        return self._space

    @property
    def slots_per_trial(self) -> tuple[int, ...]:
        """The possible numbers of workers of a trial, in order: those of a range that divide ``global_batch_size``
        evenly, or a single number."""
        asked = self.resources.slots_per_trial
        if not isinstance(asked, SlotRange):
            return (asked if isinstance(asked, int) else 1,)
        return even_sizes(asked, constant(self.hyperparameters["global_batch_size"]), self.resources.max_slots)

    def to_dict(self) -> dict[str, Any]:
        """The config as plain lists, mappings and scalars, with all defaults filled in and without its secrets.

        ``load_config(config.to_dict()) == config`` for a config without secrets, also through a YAML file.
        """
        return self._plain(self.model_dump(mode="python", exclude_none=True))

    def written(self) -> dict[str, Any]:
        """``to_dict`` without the fields that have their defaults: what somebody had to write."""
        found = self._plain(self.model_dump(mode="python", exclude_none=True, exclude_defaults=True))
        return {name: value for name, value in found.items() if value not in ({}, [])}

    def _plain(self, dumped: dict[str, Any]) -> dict[str, Any]:
        # Here None is a value, which `exclude_none` must not drop.
        if isinstance(self.searcher, ClassSearcher):
            dumped["searcher"]["options"] = self.searcher.options
        if self.searcher.metrics is not None:
            dumped["searcher"].pop("smaller_is_better", None)  # each metric has its own
        dumped["hyperparameters"], dumped["data"] = self.hyperparameters, self.data
        return masked(dumped)

    def for_code(self) -> dict[str, Any]:
        """``to_dict`` for a trial's code, with Determined's values for fields that are not set."""
        defaults = {
            "min_validation_period": {"batches": 0},
            "min_checkpoint_period": {"batches": 0},
            "records_per_epoch": 0,
        }
        return {**defaults, **self.to_dict()}

    @property
    def secrets(self) -> list[str]:
        """The secret texts, which no file of the experiment may contain."""
        storage = self.checkpoint_storage.location
        keys = dict(storage.secrets) if storage is not None else {}
        environment = {"environment_variables": self.environment.environment_variables}
        data = {"secrets": [self.data.get("secrets"), keys, self.notify.url]}
        return texts({"data": data, "environment": environment})


def constant(spec: Any) -> Any:
    return spec.get("val") if isinstance(spec, Mapping) else spec
