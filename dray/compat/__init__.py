"""Makes ``import determined`` give dray, so that code written for Determined runs unchanged.

An experiment does so wherever the real package is not installed. In your own script:

.. code-block:: python

    import dray.compat

    dray.compat.install()

    import determined as det
    from determined import pytorch

Its modules and objects are dray's own: ``determined.pytorch is dray.pytorch``. Parts without a counterpart in dray
(Keras, DeepSpeed, the REST client) can be imported, and raise `NotSupported` at their first use.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from dray.compat.names import COUNTERPARTS, MEMBERS, MODULES, missing

log = logging.getLogger(__name__)

T = TypeVar("T")

# A directory with only the package `determined`. On sys.path, even processes that have not imported dray find it, such
# as spawned DataLoader workers.
PATH = Path(__file__).parent / "path"
_INIT = PATH / "determined" / "__init__.py"


class NotSupported(RuntimeError):
    """A program uses a part of Determined without a counterpart in dray. The message names the replacement."""


class NoSuchAttribute(NotSupported, AttributeError):
    """`NotSupported` for an attribute of a class that dray has, so that `hasattr()` is false."""


def lacks(path: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class of dray's: attributes that only Determined's class has (`names.MEMBERS`) raise
    `NoSuchAttribute`."""

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
    """Make ``import determined`` give dray, even if the real package is installed.

    Raises:
        RuntimeError: the real package has been imported already.
    """
    if (place := _real()) is not None:
        raise RuntimeError(
            f"Determined's own package is already imported, from {place}; call dray.compat.install() before the first "
            "`import determined`"
        )
    finder.whole = True
    install_if_absent()
    importlib.import_module("determined")


def install_if_absent() -> None:
    """Make ``import determined`` give dray, unless there is another package of this name."""
    # At the end of sys.path, so that any other package of this name is found first.
    if str(PATH) not in sys.path:
        sys.path.append(str(PATH))
    if sys.meta_path[0] is not finder:
        sys.meta_path[:] = [finder, *(each for each in sys.meta_path if each is not finder)]


def path_for_children() -> str:
    """The entry of PYTHONPATH with which child processes get dray for ``import determined``.

    "" if another package of this name is installed, which the entry would hide.
    """
    spec = PathFinder.find_spec("determined", [entry for entry in sys.path if entry != str(PATH)])
    return str(PATH) if spec is None or spec.origin is None else ""


def _real() -> str | None:
    module = sys.modules.get("determined")
    if module is None or _is_ours(module):
        return None
    return getattr(module, "__file__", None) or "an unknown place"


def real_package_hint() -> str:
    """The part of an error message about Determined's own package, with the cure, if it was imported; else ""."""
    place = _real()
    if place is None or not hasattr(sys.modules["determined"], "__path__"):
        return ""
    return (
        f"it imports Determined's own package ({place}), which is also installed; pip uninstall determined, so "
        "that `import determined` gives dray"
    )


def find(name: str) -> Any:
    if name in MODULES:
        return importlib.import_module(name)
    if name in COUNTERPARTS:
        module, _, attribute = COUNTERPARTS[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
    if missing(name) is not None:
        return _stand_in(name)
    module, _, attribute = name.rpartition(".")
    raise AttributeError(f"module {module!r} (provided by dray) has no attribute {attribute!r}")


class StandIn(ModuleType):
    """Stands for a module, class or function that dray lacks: it may be imported and referenced, but not used."""

    def __init__(self, name: str) -> None:
        super().__init__(name, missing(name))
        self.__path__: list[str] = []  # makes it a package, so that Python looks for submodules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name.endswith("_"):  # Python and notebooks probe any object for these
            raise AttributeError(f"{self.__name__} has no attribute {name!r}")
        return find(f"{self.__name__}.{name}")

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSupported(f"{self.__name__}: {missing(self.__name__)}")

    __call__ = __mro_entries__ = __iter__ = __contains__ = __getitem__ = __enter__ = __exit__ = _refuse

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
    """A stand-in for a missing name. For an exception, a class that is never raised, so that `except` accepts it."""
    made: Any
    if name.endswith(("Error", "Exception")) or name.startswith("determined.errors."):
        made = type(name.rpartition(".")[2], (Exception,), {"__module__": name.rpartition(".")[0]})
    else:
        made = StandIn(name)
    return _stand_ins.setdefault(name, made)


class _Finder(MetaPathFinder):
    """Finds the submodules of dray's `determined` and, after `install`, `determined` itself."""

    whole = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
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
                # Otherwise `determined.pytorch.trainer` would be found in dray's directory, and loaded a second time.
                raise ModuleNotFoundError(f"No module named {name!r}: neither Determined nor dray has it", name=name)
        elif package == "dray" and rest.startswith(("core.", "pytorch.")):
            # `from determined.pytorch import deepspeed` uses the module's own name, which is dray's.
            if MODULES.get(f"determined.{rest}") == name:
                return None
            name = f"determined.{rest}"
        else:
            return None
        if name in MODULES or missing(name) is not None:
            return ModuleSpec(name, _Loader(), is_package=True)
        return None


def _warn_of(spec: ModuleSpec | None) -> None:
    # A warning at the import, because mixing its objects with dray's may fail only after long training.
    if spec is not None and spec.submodule_search_locations and spec.origin not in (None, str(_INIT)):
        log.warning(
            "Determined's own package (%s) is imported, which does not work with dray; pip uninstall determined, so "
            "that `import determined` gives dray",
            spec.origin,
        )


class _Loader(Loader):
    """Loads the existing module, or a stand-in."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = (
            importlib.import_module(MODULES[spec.name]) if spec.name in MODULES else _stand_in(spec.name)
        )
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's spec, with which it would be reloaded under the other name.
        if self._spec is not None:
            module.__spec__ = self._spec


finder = _Finder()
# Names of Determined's private modules also exist below dray (`dray.pytorch._trainer`), even without `install`. The
# finder comes last, so that it costs other imports nothing.
sys.meta_path.append(finder)


def _is_ours(module: ModuleType | None) -> bool:
    return getattr(module, "__file__", None) == str(_INIT)
