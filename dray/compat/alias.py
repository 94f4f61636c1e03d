"""The stand-in for Determined's package: how its names are found, and what is said of those that dray lacks."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from dray.compat.names import COUNTERPARTS, MEMBERS, MODULES, missing

log = logging.getLogger(__name__)

T = TypeVar("T")

# A directory with nothing but the package `determined` in it. As an entry of sys.path it is also found by processes
# that get no more of us than that, such as the spawned workers of a data loader.
_PATH = Path(__file__).parent / "path"
_INIT = _PATH / "determined" / "__init__.py"


class NotSupported(RuntimeError):
    """A program uses a part of Determined that dray has no counterpart for. The message says what to do instead."""


class NoSuchAttribute(NotSupported, AttributeError):
    """... and that is an attribute of something that dray has: `hasattr()` says no."""


def lacks(path: str) -> Callable[[type[T]], type[T]]:
    """Marks a class of ours: what Determined's has beside (`names.MEMBERS`) is told when it is asked for.

    Args:
        path: Determined's dotted name of the class.
    """

    def mark(ours: type[T]) -> type[T]:
        for name in MEMBERS:
            of, _, attribute = name.rpartition(".")
            if of == path:
                setattr(ours, attribute, _Lacking(name))
        return ours

    return mark


class _Lacking:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise NoSuchAttribute(f"{self._name}: {MEMBERS[self._name]}")


def install() -> None:
    """From now on ``import determined`` gives dray, also where the real package is installed.

    Raises:
        RuntimeError: the real package is imported already.
    """
    if (place := real()) is not None:
        raise RuntimeError(
            f"Determined's own package is imported already, from {place}; call dray.compat.install() before the first "
            "`import determined`"
        )
    _finder.whole = True
    install_if_absent()
    importlib.import_module("determined")


def install_if_absent() -> None:
    """From now on ``import determined`` gives dray, unless there is another package of this name, which goes first."""
    # At the end of sys.path, so that whatever else is there is found before it.
    if str(_PATH) not in sys.path:
        sys.path.append(str(_PATH))
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def real() -> str | None:
    """Where Determined's own package was imported from; None if it was not."""
    module = sys.modules.get("determined")
    if module is None or _is_ours(module):
        return None
    return getattr(module, "__file__", None) or "a place without a file"


def told_of_real() -> str:
    """For an error, where the objects of Determined's own package have come: that they are, and what to do; else ""."""
    place = real()
    if place is None or not hasattr(sys.modules["determined"], "__path__"):
        return ""
    return (
        f"it imports Determined's own package ({place}), which is installed beside dray: pip uninstall determined, and "
        "`import determined` gives dray"
    )


def find(name: str) -> Any:
    """What a dotted name of Determined's stands for.

    Raises:
        AttributeError: neither dray nor Determined has it.
    """
    if name in MODULES:
        return importlib.import_module(name)
    if name in COUNTERPARTS:
        module, _, attribute = COUNTERPARTS[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    if missing(name) is not None:
        return _stand_in(name)
    module, _, attribute = name.rpartition(".")
    raise AttributeError(f"module {module!r} (dray, in its place) has no attribute {attribute!r}")


class Missing(ModuleType):
    """In the place of a module, class or function that dray lacks: may be imported, named and caught, and not used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, missing(name))
        self.__path__: list[str] = []  # as a package, whose submodules are looked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name.endswith("_"):  # what Python and notebooks look for in anything
            raise AttributeError(f"{self.__name__} has no attribute {name!r}")
        return find(f"{self.__name__}.{name}")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(f"{self.__name__}: {missing(self.__name__)}")

    __call__ = __mro_entries__ = _refuse

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, subclass: type) -> bool:
        return False

    def __or__(self, other: object) -> Any:
        return Any  # in an annotation

    __ror__ = __or__

    def __reduce__(self) -> Any:
        return _stand_in, (self.__name__,)

    def __repr__(self) -> str:
        return f"<{self.__name__}, which dray has no counterpart for>"


_stand_ins: dict[str, Any] = {}


def _stand_in(name: str) -> Any:
    """In the place of something that is missing; of an exception, one that nobody raises, so that it can be caught."""
    made: Any
    if name.endswith(("Error", "Exception")) or name.startswith("determined.errors."):
        made = type(name.rpartition(".")[2], (Exception,), {"__module__": name.rpartition(".")[0]})
    else:
        made = Missing(name)
    return _stand_ins.setdefault(name, made)


class _Finder(MetaPathFinder):
    """Finds the modules below `determined`, where that is ours; and, after `install`, that one too.

    Attributes:
        whole: after `install`.
    """

    whole = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system asks for it."""
        package, _, rest = name.partition(".")
        if package == "determined":
            if not rest:
                if self.whole:
                    return spec_from_file_location(name, _INIT)
                _warn_of(PathFinder.find_spec(name))
                return None
            if not _is_ours(sys.modules.get(package)):
                return None
            if name not in MODULES and missing(name) is None:
                # Left to others, `determined.pytorch.trainer` would be found in the directory of ours, a second time.
                raise ModuleNotFoundError(f"No module named {name!r}: neither Determined nor dray has it", name=name)
        elif package == "dray" and rest.startswith(("core.", "pytorch.")):
            # `from determined.pytorch import deepspeed` asks the module for its name, which is dray's.
            if MODULES.get(f"determined.{rest}") == name:
                return None
            name = f"determined.{rest}"
        else:
            return None
        if name in MODULES or missing(name) is not None:
            return ModuleSpec(name, _Loader(), is_package=True)
        return None


def _warn_of(spec: ModuleSpec | None) -> None:
    # An error comes where its objects meet ours, which may be at the end of a long training, or never.
    if spec is not None and spec.submodule_search_locations and spec.origin not in (None, str(_INIT)):
        log.warning(
            "Determined's own package (%s) is imported, which knows nothing of dray: pip uninstall determined, and "
            "`import determined` gives dray",
            spec.origin,
        )


class _Loader(Loader):
    """Gives a module that is there already, or a stand-in."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """As the import system asks for it."""
        module: ModuleType = (
            importlib.import_module(MODULES[spec.name]) if spec.name in MODULES else _stand_in(spec.name)
        )
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As the import system asks for it."""
        # It has put ours there, by which the module would be reloaded under the other name.
        if self._spec is not None:
            module.__spec__ = self._spec


_finder = _Finder()


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(module, "__file__", None) == str(_INIT)


def names_in(module: str) -> Iterator[str]:
    """Names of this module of Determined's that have a counterpart."""
    return (name[len(module) + 1 :] for name in COUNTERPARTS if name.rpartition(".")[0] == module)
