"""The model directories below `models/`: written for Determined, as its users wrote them. None of them knows dray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model directory, and how its user starts it.

    Args:
        name: of the directory.
        config: its experiment file.
        command: what its user calls without a cluster, after ``python3``, but for ``--hparams`` and their JSON; none
            where a class is the entrypoint.
        launched: the command is for torchrun, also with one process.
        shuffled: it has a data loader with ``shuffle=True``, whose order is not the same with Determined: see
            `reference.py`.
    """

    name: str
    config: str
    command: Sequence[str] = ()
    launched: bool = False
    shuffled: bool = False

    @property
    def directory(self) -> Path:
        return HERE / "models" / self.name

    @property
    def file(self) -> Path:
        return self.directory / self.config

    @property
    def golden(self) -> Path:
        return GOLDEN / f"{self.name}.json"

    def read(self) -> dict[str, Any]:
        """The experiment file, as it is."""
        config: dict[str, Any] = yaml.safe_load(self.file.read_text())
        return config

    def of_slots(self, slots: int) -> dict[str, Any]:
        """The experiment file with another number of slots, which is all that differs between the ways to run it."""
        config = self.read()
        return {**config, "resources": {**config["resources"], "slots_per_trial": slots}}


MODELS = {
    model.name: model
    for model in (
        Model(name="digits_class", config="config.yaml", shuffled=True),
        Model(name="launched_script", config="random.yaml", command=["train.py", "--epochs=3"]),
        Model(
            name="core_api",
            config="adaptive.yaml",
            command=["train.py", "--epochs=4"],
            launched=True,
        ),
        Model(name="reducers", config="adaptive.yaml", shuffled=True),
        Model(name="stream", config="single.yaml"),
        Model(name="accumulated", config="random.yaml"),
    )
}
