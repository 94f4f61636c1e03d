"""The tools of the MCP server: those of `dray.agents.reading`, and those that change something.

The docstrings are what agents read about the tools.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dray.agents.answers import answer
from dray.agents.reading import Reading
from dray.config.load import parse_config, warnings_of
from dray.config.yaml_file import read_mapping, with_changes
from dray.errors import ConfigError, Invalid
from dray.serve.client import Server
from dray.serve.control import Submitted
from dray.serve.verbs.on_server import OnServer
from dray.storage.disk import scratch

MOST_PATH = 250  # most characters of a file's path


class Tools(Reading):
    """The tools, but for `submit`, which depends on where the agent is."""

    def _submit(self, config: str, directory: str, files: Mapping[str, str], changes: Mapping[str, Any]) -> str:
        if bool(directory) == bool(files):
            raise Invalid("give the code either as directory or as files, a map of paths to texts")
        with scratch("agent") as given:
            code = Path(os.path.expanduser(directory)) if directory else _written(files, given / "code")
            if not code.is_dir():
                raise Invalid(f"directory: no such directory: {directory}")
            file = code / config
            if "\n" in config:
                file = given / "experiment.yaml"
                file.write_text(config)
            elif config not in files if files else not file.is_file():
                raise Invalid(f"config: there is no file {config[:200]!r} in the code; or give the text of a YAML file")
            texts = [f"{field}={json.dumps(value, ensure_ascii=False)}" for field, value in changes.items()]
            server = self._find()
            try:
                sent = self._sent(server, file, texts, code)
            except ConfigError as error:
                faults = [(field, what.replace(f"{given}/", "")) for field, what in error.faults]
                raise ConfigError(faults, "the config" if "\n" in config else config) from None
            content = with_changes(read_mapping(file), texts)
            warnings = [f"the config {each}" for each in warnings_of(content, parse_config(content))]
        fields = {"experiment": server.read(sent.name)["number"], "name": sent.name, "state": sent.state}
        told = {"warnings": warnings} if warnings else {}
        return answer({**fields, **told, "next": "wait, then get_results"})

    @abstractmethod
    def _sent(self, server: Server, config: Path, changes: Sequence[str], code: Path) -> Submitted:
        """Submit the code of a directory, with changes to the config as `load_config` takes them."""

    # ------------------------------------------------------------------------------------------------ experiments
    def fork_experiment(self, experiment: str | int, changes: dict[str, Any]) -> str:
        """Submit an experiment's code again as a new experiment, with some fields of its config changed.

        Args:
            experiment: its number, name or a unique part of the name, or "latest".
            changes: the fields, such as {"searcher.max_trials": 8, "budget.slot_hours": 2}.
        """
        new = self._handle(experiment).fork(changes)
        return answer({"experiment": new.number, "name": new.name, "next": "wait, then get_results"})

    def extend_experiment(self, experiment: str | int, changes: dict[str, Any]) -> str:
        """Run an experiment again, even one that has ended, with more or longer trials, or with other limits.

        Args:
            experiment: its number, name or a unique part of the name, or "latest".
            changes: new values of max_trials, max_length, budget, until, patience or prices, such as
                {"max_trials": 64, "budget": {"slot_hours": 4}}.
        """
        it = self._handle(experiment)
        return answer({"name": it.name, "state": it.extend(**changes)})

    def pause_experiment(self, experiment: str | int) -> str:
        """Pause an experiment: its running trials save a checkpoint, and it waits for activate_experiment.

        Args:
            experiment: its number, name or a unique part of the name, or "latest".
        """
        it = self._handle(experiment)
        return answer({"name": it.name, "state": it.pause()})

    def activate_experiment(self, experiment: str | int) -> str:
        """Run a paused, stopped or failed experiment again, from where it ended.

        Args:
            experiment: its number, name or a unique part of the name, or "latest".
        """
        it = self._handle(experiment)
        return answer({"name": it.name, "state": it.activate()})

    def stop_experiment(self, experiment: str | int) -> str:
        """Stop an experiment: its running trials save a checkpoint, and it keeps its results.

        Args:
            experiment: its number, name or a unique part of the name, or "latest".
        """
        it = self._handle(experiment)
        return answer({"name": it.name, "state": it.stop()})

    # ----------------------------------------------------------------------------------------------------- trials
    def add_trial(self, experiment: str | int, hparams: dict[str, Any] | None = None, patch: str = "") -> str:
        """Add a trial to an experiment: with hyperparameters of your choice, with changed code, or both.

        The search ranks it at the same rungs as the others, and may stop it early. It does not count for max_trials.
        An experiment that has ended goes on. A patch is checked before anything runs.

        Args:
            experiment: its number, name or a unique part of the name, or "latest".
            hparams: hyperparameters; the search draws the others.
            patch: a unified diff of the experiment's code, as `git diff` prints it; "" for its own code.
        """
        it = self._handle(experiment)
        return _created(it.name, it.add_trial(hparams or {}, patch=patch or None))

    def fork_trial(
        self, experiment: str | int, trial: int, hparams: dict[str, Any] | None = None, at: str = "best"
    ) -> str:
        """Start a trial from a checkpoint of another one, with some hyperparameters changed.

        Args:
            experiment: its number, name or a unique part of the name, or "latest".
            trial: the number of the trial whose checkpoint it begins from.
            hparams: hyperparameters to change; the others are the other trial's.
            at: the checkpoint: "best", "latest", or the number of batches it was saved after.
        """
        it = self._handle(experiment)
        return _created(it.name, it.fork_trial(trial, at=at, hparams=hparams or {}))

    def stop_trial(self, experiment: str | int, trial: int) -> str:
        """Stop a trial; the search continues with the others.

        Args:
            experiment: its number, name or a unique part of the name, or "latest".
            trial: its number.
        """
        it = self._handle(experiment)
        return _created(it.name, it.stop_trial(trial))

    def _handle(self, experiment: str | int) -> OnServer:
        return OnServer(*self._named(experiment))


def _created(name: str, decided: Mapping[str, Any]) -> str:
    if decided["trial"] is None:
        return answer({"name": name, "trial": None, "note": "the experiment has yet to carry it out; wait for it"})
    return answer({"name": name, **decided})


def _written(files: Mapping[str, str], code: Path) -> Path:
    """The files of a map of paths to texts, written to a directory."""
    code.mkdir()
    for name, text in files.items():
        place = code / name
        if not Path(name).name or ".." in Path(name).parts or Path(name).is_absolute() or len(name) > MOST_PATH:
            raise Invalid(f"files: {name[:100]!r} must be a path within the code, such as model_def.py")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            raise Invalid(f"files: {name[:100]!r} is given as a file and as a directory") from None
        except (OSError, ValueError) as error:  # a null character, or half of a pair of surrogates
            what = error.strerror if isinstance(error, OSError) else error
            raise Invalid(f"files: {name[:100]!r} can't be written: {what}") from None
    return code
