"""The trial's class, or the program that trains it, on its way to the workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.experiment.command import parse_entrypoint
from dray.experiment.entrypoint import load_entrypoint
from dray.experiment.errors import EntrypointError
from dray.experiment.modules import module_file
from dray.script import Script

if TYPE_CHECKING:
    from dray.pytorch import PyTorchTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDirectory:
    """Takes ``entrypoint`` from a directory; None: from the worker's own path, where Ray has unpacked the code."""

    entrypoint: str | list[str]
    directory: str | None

    def place(self) -> Path:
        """The directory of the code, on this machine.

        Raises:
            EntrypointError: it is not here.
        """
        if self.directory is not None:
            return Path(self.directory).resolve()
        program = parse_entrypoint(self.entrypoint)
        module = program.partition(":")[0] if isinstance(program, str) else program.module
        for entry in (Path(name).resolve() for name in sys.path):
            if (module is not None and module_file(entry, module)) or (
                isinstance(program, Script) and program.file is not None and (entry / program.file).is_file()
            ):
                return entry
        what = f"module {module}" if module is not None else f"script {program.file}"  # type: ignore[union-attr]
        raise EntrypointError([("entrypoint", f"no {what} on this worker; looked in {', '.join(sys.path)}")])

    def __call__(self) -> type[PyTorchTrial] | Script:
        """The class, or the program.

        Raises:
            EntrypointError: it is not here, or cannot be imported.
        """
        return load_entrypoint(self.entrypoint, self.place())


@dataclass(frozen=True, slots=True, kw_only=True)
class ByValue:
    """A class of a script or a notebook, which no other process can import: it travels pickled."""

    trial: Any

    def place(self) -> None:
        """Its code is in no directory."""

    def __call__(self) -> type[PyTorchTrial]:
        """The class."""
        return self.trial  # type: ignore[no-any-return]


def place_of(trial: type[PyTorchTrial]) -> tuple[str, Path] | None:
    """Entrypoint and model directory of a class that others can import; None for one of a script or a notebook."""
    module = sys.modules.get(trial.__module__)
    file = getattr(module, "__file__", None)
    if trial.__module__ == "__main__" or file is None or "<locals>" in trial.__qualname__:
        return None
    path = Path(file).resolve()
    depth = trial.__module__.count(".") + (path.name == "__init__.py")
    return f"{trial.__module__}:{trial.__qualname__}", path.parents[depth]
