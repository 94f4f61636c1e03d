"""How the trial's class, or the program that trains it, is loaded on the workers."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dray.code.archive import Archived
from dray.code.load import load_entrypoint
from dray.compat import install_if_absent
from dray.config.entrypoint import ClassName, Entrypoint
from dray.errors import EntrypointError, ImportRaisedError
from dray.imports import is_installed, use_model_dir
from dray.script import Script

if TYPE_CHECKING:
    from dray.pytorch import PyTorchTrial

# Here too, not only where code is imported: unpickling a class that was sent by value may import `determined`.
install_if_absent()


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDirectory:
    """Loads ``entrypoint`` from a directory on this machine, or from one that was sent to the workers."""

    entrypoint: Entrypoint
    directory: str | Archived

    def place(self) -> Path:
        if not isinstance(self.directory, str):
            return self.directory.place()
        if not (place := Path(self.directory).resolve()).is_dir():
            what = f"no such directory any more: {place}; restore it (a variant's: add its patch again)"
            raise EntrypointError([("code", what)])
        return place

    def __call__(self) -> type[PyTorchTrial] | Script:
        return load_entrypoint(self.entrypoint, self.place())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A pickled class of a script or a notebook, which other processes can't import.

    The class is unpickled only when its directory is on the path, so that its imports work and an error is reported
    clearly.
    """

    name: str
    pickled: bytes
    home: Archived | None  # the directory that the class imports from, if it was sent

    def place(self) -> None:
        """Returns None: the code of the class is not in a directory."""

    def __call__(self) -> type[PyTorchTrial]:
        try:
            if self.home is not None:
                directory = self.home.place()
                use_model_dir(directory)
                os.chdir(directory)
            return pickle.loads(self.pickled)  # type: ignore[no-any-return]
        except Exception as error:
            what = (
                f"{self.name} can't be loaded on a worker: {type(error).__name__}: {error}; what it imports must be in "
                "the directory of the script that defines it, or installed on all nodes"
            )
            raise ImportRaisedError([("trial", what)]) from None


def place_of(trial: type[PyTorchTrial]) -> tuple[ClassName, Path] | None:
    """Entrypoint and model directory of a class that others can import; None for a class of a script or notebook."""
    module = sys.modules.get(trial.__module__)
    file = getattr(module, "__file__", None)
    if trial.__module__ == "__main__" or file is None or "<locals>" in trial.__qualname__:
        return None
    return ClassName(trial.__module__, trial.__qualname__), _root(trial.__module__, file)


def home_of(trial: type[PyTorchTrial]) -> Path | None:
    """The directory that a class of a script or a notebook may import from; None for a class of an installed package.

    This is the script's directory, or the one with the outermost package of ``python -m``, or a notebook's working
    directory.
    """
    module = sys.modules.get(trial.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return Path.cwd()
    if is_installed(file):
        return None
    spec = getattr(module, "__spec__", None)
    return _root(spec.name if spec is not None else trial.__module__, file)


def _root(module: str, file: str) -> Path:
    """The directory that a module in this file, with this dotted name, is imported from."""
    path = Path(file).resolve()
    return path.parents[module.count(".") + (path.name == "__init__.py")]
