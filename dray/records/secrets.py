"""A config's secrets in an experiment's directory, in one file that only its owner can read.

``experiment.yaml`` has ``********`` in place of each value in ``data.secrets``, the values of environment variables,
and the webhook's URL. The real values are in ``secrets.yaml``, for resuming the experiment on this machine; that file
is never copied. The credentials of a store are kept in ``storage.json`` in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dray import private
from dray.errors import ConfigError
from dray.masking import MASK, PLACES, hidden, leaves
from searchers import rows

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig

LARGEST = 16 << 20
"""Size in bytes of the largest file that is searched for secrets."""
_DATA, _VARIABLES, _WEBHOOK = (".".join(place) for place in PLACES)


def check_secrets(config: ExperimentConfig) -> None:
    """Raise `ConfigError` if a secret is masked in a config to run, which may be copied from an experiment or a
    checkpoint."""
    what = "is masked, as in an experiment's own copy of its config; write the real value"
    if faults := [(path, what) for path in _masked_in(config)]:
        raise ConfigError(faults)


def write_secrets(path: Path, config: ExperimentConfig) -> None:
    """Write a config's secrets, if it has any, to a file that only this user may read."""
    found = {place: secret for place, secret in _secrets(config).items() if secret}
    if not found:
        return
    with private.create(path) as file:
        yaml.safe_dump(found, file, sort_keys=False)


def with_secrets(config: ExperimentConfig, path: Path) -> ExperimentConfig:
    """Fill in the secrets of a config from an experiment's directory; `ConfigError` if they are not on this machine."""
    masked = _masked_in(config)
    if not masked:
        return config
    with suppress(OSError):
        path.chmod(0o600)  # it may have been written by hand
    try:
        with rows.readable(path, UnicodeDecodeError, yaml.YAMLError):
            found = yaml.safe_load(rows.read(path).decode())
    except FileNotFoundError:
        what = f"is missing: secrets stay on the machine that they were given on; write all of them to {path}"
        raise ConfigError([(name, what) for name in masked]) from None
    if not isinstance(found, dict):
        raise rows.unreadable(path, f"expected a mapping, got {found!r:.60}")
    if not found.keys() & _secrets(config).keys():  # written by hand: only the contents of data.secrets
        found = {_DATA: found}
    data, environment, notify = dict(config.data), config.environment, config.notify
    if _DATA in found:
        data["secrets"] = found[_DATA]
    if _VARIABLES in found:
        environment = environment.model_copy(update={"environment_variables": found[_VARIABLES]})
    if _WEBHOOK in found:
        notify = notify.model_copy(update={"url": found[_WEBHOOK]})
    restored = config.model_copy(update={"data": data, "environment": environment, "notify": notify})
    check_secrets(restored)
    return restored


def unmasked(config: ExperimentConfig) -> dict[str, Any]:
    """The config as from ``to_dict``, but with its secrets: for sending it, not for writing it to disk."""
    plain = config.to_dict()
    for section, field in PLACES:
        if secret := _secrets(config)[f"{section}.{field}"]:
            plain[section] = {**plain[section], field: secret}
    where = config.checkpoint_storage.location
    if where is not None:
        plain["checkpoint_storage"] = {**plain["checkpoint_storage"], **dict(where.secrets)}
    return plain


def _secrets(config: ExperimentConfig) -> dict[str, Any]:
    """The secrets, by their place in the config."""
    return {
        _DATA: config.data.get("secrets"),
        _VARIABLES: config.environment.environment_variables,
        _WEBHOOK: config.notify.url,
    }


def _masked_in(config: ExperimentConfig) -> list[str]:
    return [
        path for place, secret in _secrets(config).items() for path, value in leaves(secret, place) if value == MASK
    ]


def hide_in(directory: Path, secrets: Sequence[str]) -> list[str]:
    """Replace secrets with xxx in a copy of a model's code, which often includes the config or a driver script. Returns
    the relative paths of the changed files.

    A link to a file with a secret is replaced by a file. Files larger than `LARGEST` are not searched.
    """
    changed = []
    for path in sorted(directory.rglob("*")) if secrets else ():
        if path.is_file() and path.stat().st_size <= LARGEST:
            content = path.read_bytes()
            if (without := hidden(content, secrets)) != content:
                mode = path.stat().st_mode
                path.unlink()
                path.write_bytes(without)
                path.chmod(mode)
                changed.append(path.relative_to(directory).as_posix())
    return changed
