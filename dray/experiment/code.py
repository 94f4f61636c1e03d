"""The trial's class on its way to the workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.experiment.entrypoint import load_trial_class
from dray.experiment.errors import EntrypointError

if TYPE_CHECKING:
    from dray.pytorch import PyTorchTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDirectory:
    """Imports ``entrypoint`` from a directory; None: from the worker's own path, where Ray has unpacked the code."""

    entrypoint: str
    directory: str | None

    def __call__(self) -> tuple[type[PyTorchTrial], Path | None]:
        """The class, and the directory of its code."""
        if self.directory is not None:
            return load_trial_class(self.entrypoint, self.directory), Path(self.directory)
        module, _, _ = self.entrypoint.partition(":")
        for entry in sys.path:
            if (file := Path(entry, *module.split("."))).with_suffix(".py").exists() or (file / "__init__.py").exists():
                return load_trial_class(self.entrypoint, entry), Path(entry)
        raise EntrypointError([("entrypoint", f"no module {module} on this worker; looked in {', '.join(sys.path)}")])


@dataclass(frozen=True, slots=True, kw_only=True)
class ByValue:
    """A class of a script or a notebook, which no other process can import: it travels pickled."""

    trial: Any

    def __call__(self) -> tuple[type[PyTorchTrial], Path | None]:
        """The class; its code is in no directory."""
        return self.trial, None


def place_of(trial: type[PyTorchTrial]) -> tuple[str, Path] | None:
    """Entrypoint and model directory of a class that others can import; None for one of a script or a notebook."""
    module = sys.modules.get(trial.__module__)
    file = getattr(module, "__file__", None)
    if trial.__module__ == "__main__" or file is None or "<locals>" in trial.__qualname__:
        return None
    path = Path(file).resolve()
    depth = trial.__module__.count(".") + (path.name == "__init__.py")
    return f"{trial.__module__}:{trial.__qualname__}", path.parents[depth]
