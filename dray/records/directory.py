"""The directory of an experiment: everything needed to resume it and to read its results."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dray import private
from dray.code.ignore import Code, code_of
from dray.errors import ConfigError, NoExperiment
from dray.records.local_runs import reject_local_run
from dray.records.root import results_root as results_root
from dray.records.secrets import hide_in, write_secrets
from dray.storage import CheckpointStore, Location, RemoteDirectory, StorageError, store_at
from dray.storage.disk import force_to_disk
from dray.text import file_name, some
from searchers import rows
from searchers.rows import has_fields

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig

log = logging.getLogger(__name__)

_LONGEST_NAME = 200
"""Most bytes of an experiment's name in its directory's name, which also has the time; file systems allow 255."""

CODE_ID_LENGTH = 12  # hexadecimal digits in the name of a variant of the code
DIFF = "change.diff"  # a file of a variant: what it changes in the experiment's code

_is_storage = has_fields({"location": (str,), "secrets": (dict,)})

PROBE_S = 10.0
"""How long an unreachable object store is retried before a run begins."""


class ExperimentDirectory:
    """The files of one experiment.

    ::

        <path>/experiment.yaml         the config, every default filled in
               code/                   the model's code when the experiment was created, see `dray.code.ignore`
               variants/3f9c01ab52de/  code of single trials: code/, and change.diff; see `dray.experiment.variants`
               journal.jsonl           every event of the search; the source of truth
               journal.jsonl.lock      held by the driver
               metrics/                see `dray.records.metrics`
               trial_7/checkpoint_352/ see `dray.training.checkpoint.files`; or in an object store, below a like path
               trial_7/logs/           see `dray.worker.log`; trial_7/tensorboard/ and trial_7/outputs/ are beside them
               storage.json            the object store, and the config's credentials for it; only its owner can read it
               secrets.yaml            the config's secrets; only its owner can read it
               requests/               requests to the search, see `dray.experiment.requests`
               driver.json             this directory's id, in an object store see `dray.records.driver_lock`
               .overview.json          what lists show of it once it has ended, see `dray.records.listing`
               ray.log                 Ray's output in the driver's process, see `dray.cluster.ray_output`
               ray/                    Ray's own state of this experiment; never read back
               .seen-by-all            lets the nodes of a cluster check that they see this very directory
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "experiment.yaml"
        self.journal = path / "journal.jsonl"
        self.metrics = path / "metrics"
        self.code = path / "code"
        self.variants = path / "variants"
        self.ray = path / "ray"
        self.storage_file = path / "storage.json"
        self.secrets_file = path / "secrets.yaml"

    def is_gone(self) -> bool:
        """Whether it was deleted. Running processes may have written other files again, but never the config."""
        try:
            self.config_file.stat()
        except FileNotFoundError:
            return True
        except OSError:  # the file system does not answer
            pass
        return False

    def trial(self, trial_id: int) -> Path:
        return self.path / f"trial_{trial_id}"

    @property
    def has_code(self) -> bool:
        return self.code.is_dir() and any(self.code.iterdir())

    def variant(self, name: str) -> Path:
        """The directory of a variant of the code."""
        return self.variants / name

    def has_variant(self, name: str) -> bool:
        return bool(re.fullmatch(rf"[0-9a-f]{{{CODE_ID_LENGTH}}}", name)) and self.variant(name).is_dir()

    def code_of(self, variant: str | None) -> Path:
        """The code that a trial runs: a variant, or the experiment's own (None)."""
        return self.code if variant is None else self.variant(variant) / "code"

    def diff_of(self, variant: str) -> str:
        """What a variant changes in the experiment's code, as a unified diff; `NoExperiment` if there is none."""
        if not self.has_variant(variant):
            raise NoExperiment(f"{self.path.name} has no variant {variant[:40]!r} of its code")
        return (self.variant(variant) / DIFF).read_text(errors="replace")

    def changed_by(self, variant: str) -> list[str]:
        """The files that a variant changes."""
        return re.findall(r"^diff --git a/(.*) b/\1$", self.diff_of(variant), re.MULTILINE)

    def copy_code(self, code: Code, config: ExperimentConfig) -> None:
        """Copy the model's code, without the config's secrets."""
        code.copy(self.code)
        if changed := hide_in(self.code, config.secrets):
            log.warning("secrets in the experiment's copy of the code are replaced by xxx, in %s", some(changed, 3))

    @cached_property
    def storage(self) -> Location:
        """The place of the checkpoints: this directory, or an object store."""
        try:
            stored = rows.document(self.storage_file, _is_storage)
        except FileNotFoundError:
            return Location.of(self.path)
        return Location(stored["location"], tuple(stored["secrets"].items()))

    def store(self, trial_id: int) -> CheckpointStore:
        return store_at(self.storage.child(f"trial_{trial_id}"), self.trial(trial_id))

    def write_storage(self, where: Location) -> None:
        """Record that the checkpoints are in an object store."""
        with private.create(self.storage_file) as file:
            json.dump({"location": where.uri, "secrets": dict(where.secrets)}, file, indent=1)

    @classmethod
    def create(cls, path: Path, config: ExperimentConfig, code: Path | None) -> ExperimentDirectory:
        """Create the directory, with the config and a copy of the model's code. Raises `ConfigError` if it has an
        experiment already, can't be created, or the code is too large."""
        directory = cls(path)
        try:
            if directory.journal.exists():
                raise ConfigError([("path", f"{path} already has an experiment; resume it, or give another directory")])
            found = None if code is None else code_of(code, leave_out=path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            cure = "set this field, or DRAY_HOME, to a directory that you can write to"
            what = f"can't create the experiment's directory: {error}; {cure}"
            raise ConfigError([("checkpoint_storage", what)]) from None
        if found is not None:
            directory.copy_code(found, config)
        write_secrets(directory.secrets_file, config)
        where = config.checkpoint_storage.location
        if where is not None and not where.is_local:
            directory.write_storage(where.child(path.name))
        # Written last: a directory with a config is complete.
        with private.replaced(directory.config_file) as unnamed:
            unnamed.write_text(yaml.dump(config.to_dict(), Dumper=yaml.CSafeDumper, sort_keys=False))
        # The directory must reach the disk before its journal's records do.
        force_to_disk(path)
        return directory

    @classmethod
    def open(cls, path: Path) -> ExperimentDirectory:
        """The directory of an existing experiment; `NoExperiment` if there is none."""
        directory = cls(path)
        if not os.path.lexists(directory.config_file):
            reject_local_run(path)
            raise NoExperiment(f"no experiment in {path}: it has no {directory.config_file.name}")
        return directory

    def config_text(self) -> str:
        """The text of experiment.yaml."""
        return rows.read(self.config_file).decode(errors="replace")

    def config(self) -> ExperimentConfig:
        """The config that the experiment was created with; `DamagedFile` if it can't be read."""
        from dray.config.load import stored_config  # lists do without this import

        return stored_config(self.config_file)


def new_path(config: ExperimentConfig) -> Path:
    """A path for a new experiment: in the config's storage if that is a directory, else in ``DRAY_HOME`` or
    ``~/dray_results``."""
    where = config.checkpoint_storage.location
    root = where.path if where is not None and where.is_local else results_root()
    name = file_name(config.name).encode()[:_LONGEST_NAME].decode(errors="ignore")
    return (root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}").resolve()


def link_into_results(path: Path) -> None:
    """Link a new experiment into the results directory if it is elsewhere, so that its name and ``latest`` find it."""
    with suppress(OSError):  # the link exists, or the results directory is not writable, which must not stop the run
        results_root().mkdir(parents=True, exist_ok=True)
        (results_root() / path.name).symlink_to(path)


def unlink_from_results(path: Path) -> None:
    link = results_root() / path.name
    if link.is_symlink() and link.readlink() == path:
        link.unlink()


def check_storage(where: Location | None) -> None:
    """Write, read and delete a file in an object store before anything trains; `ConfigError` if that fails."""
    if where is None or where.is_local:
        return
    try:
        RemoteDirectory(where, patience_s=PROBE_S).probe()
    except StorageError as error:
        what = (
            f"{error}; check its name, and the credentials in the config or the environment (for S3, AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY)"
        )
        raise ConfigError([("checkpoint_storage", what)]) from None
