"""The config of a new experiment, as a client has sent it, which is read outside of the server's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.code import archive
from dray.config.storage import SECRETS
from dray.config.yaml_file import check_limits, mapping_in, with_values
from dray.errors import ConfigError, Invalid
from dray.masking import MASK, PLACES, leaves
from dray.records.directory import ExperimentDirectory
from dray.records.secrets import unmasked, with_secrets
from dray.serve.quota import ORIGIN, Quota, Use, fitted
from dray.storage.disk import scratch
from searchers.errors import FieldError

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig

_REMOVED = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What the token that submits an experiment may use."""

    quota: Quota
    use: Use  # what its other experiments use


@dataclass(frozen=True, slots=True)
class Read:
    """A checked config. `by_quota`, `missing_secrets`: see `dray.serve.control.Submitted`."""

    config: ExperimentConfig
    by_quota: Mapping[str, Any] = field(default_factory=dict)
    missing_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The config of a new experiment.

    Attributes:
        config: the text of a YAML file; or, of a fork, fields with their new values.
        forked: the directory of the experiment that is forked.
        is_owner: whether the fork may have that experiment's secrets.
    """

    config: str | Mapping[str, Any]
    forked: Path | None = None
    is_owner: bool = False

    @contextmanager
    def code(self) -> Iterator[Path]:
        """A copy of the code of the experiment that is forked, within the block. Without any it is `Invalid`: its
        class was sent from a notebook, say."""

        assert self.forked is not None
        directory = ExperimentDirectory(self.forked)
        if not directory.has_code:
            raise Invalid(f"{self.forked.name} has no copy of its code, so nothing else can run it")
        with scratch("fork") as code:
            archive.copy(directory.code, code)
            yield code

    def read(self, allowance: Allowance | None = None) -> Read:
        """Parse and check the config. A `ConfigError` lists all faults."""
        from dray.config.load import load_config
        from dray.config.rules import beyond_sandbox

        if isinstance(self.config, str):
            content = mapping_in(self.config, ORIGIN)
        else:
            assert self.forked is not None
            content = with_values(ExperimentDirectory(self.forked).config().to_dict(), self.config)
        try:
            check_limits(content)
        except FieldError as error:
            raise ConfigError(error.faults, ORIGIN) from None
        missing: list[str] = []
        if self.forked is not None:
            content, missing = _with_secrets_of(ExperimentDirectory(self.forked), content, is_owner=self.is_owner)
        by_quota: dict[str, Any] = {}
        if allowance is not None:
            content, by_quota = fitted(content, allowance.quota, allowance.use)
        config = load_config(content)
        if allowance is not None and allowance.quota.sandbox and (faults := beyond_sandbox(config)):
            raise ConfigError(faults, ORIGIN)
        return Read(config, by_quota, tuple(missing))


def _with_secrets_of(
    directory: ExperimentDirectory, content: Mapping[Any, Any], *, is_owner: bool
) -> tuple[dict[Any, Any], list[str]]:
    """A fork's config with the secrets of an experiment in place of the masks; for others than its owner without them,
    and their names."""
    stored = directory.config()
    plain, new = stored.to_dict(), dict(content)
    masked = {place: _masked_in(content, place) for place in PLACES}
    missing = [] if is_owner else [name for names in masked.values() for name in names]
    known = unmasked(with_secrets(stored, directory.secrets_file)) if is_owner and any(masked.values()) else {}
    for (section, field_), names in masked.items():
        if names:
            there = known.get(section, {}).get(field_) if is_owner else _REMOVED
            value = _unmasked(new[section][field_], there)
            new[section] = {**new[section], field_: None if value is _REMOVED else value}
    notify = new.get("notify")
    if not is_owner and isinstance(notify, Mapping):
        if notify.get("command") and {**notify, "url": None} == {**plain["notify"], "url": None}:
            missing.append("notify.command")
        if any(name.startswith("notify.") for name in missing):
            del new["notify"]  # the owner's receiver: it would be told about the experiments of others
    credentials = dict(directory.storage.secrets) if directory.storage_file.exists() else {}
    where = new.get("checkpoint_storage")
    if credentials and isinstance(where, Mapping) and _place(where) == _place(plain["checkpoint_storage"]):
        if is_owner:
            new["checkpoint_storage"] = {**credentials, **where}
        elif not credentials.keys() & where.keys():
            missing += [f"checkpoint_storage.{name}" for name in credentials]
            del new["checkpoint_storage"]
    return new, missing


def _masked_in(content: Mapping[Any, Any], place: tuple[str, str]) -> list[str]:
    section = content.get(place[0])
    secret = section.get(place[1]) if isinstance(section, Mapping) else None
    return [path for path, value in leaves(secret, ".".join(place)) if value == MASK]


def _unmasked(value: Any, known: Any) -> Any:
    """A secret field with the real values in place of the masks; `_REMOVED` in place of one: without it."""
    if isinstance(value, Mapping):
        of = known if isinstance(known, Mapping) else dict.fromkeys(value, known if known is _REMOVED else None)
        found = {name: _unmasked(each, of.get(name)) for name, each in value.items()}
        return {name: each for name, each in found.items() if each is not _REMOVED}
    if isinstance(value, list):
        each_of = known if isinstance(known, list) else [known if known is _REMOVED else None] * len(value)
        pairs = zip(value, [*each_of, *[None] * len(value)], strict=False)
        return [each for each in (_unmasked(*pair) for pair in pairs) if each is not _REMOVED]
    return known if value == MASK and known is not None else value


def _place(section: Mapping[Any, Any]) -> dict[Any, Any]:
    """What says where a store is."""
    return {name: value for name, value in section.items() if name not in SECRETS and not str(name).startswith("save_")}
