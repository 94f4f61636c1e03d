"""Puts off torch's import of its compiler until something is compiled."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_DISABLED = "__dynamo_disable"
"""The attribute in which `torch._disable_dynamo` keeps what `torch._dynamo.disable` has returned."""


def defer_import_of_compiler() -> None:
    """Let torch import `torch._dynamo` when something is compiled, rather than with the first optimizer.

    The import takes as long as torch's own, a second. Call this after `init_process_group`, which clears the compiler's
    caches if it is imported.
    """
    if _NAME not in sys.modules:
        deferred = _Deferred(_NAME)
        sys.meta_path.insert(0, deferred.submodules)
        sys.modules[_NAME] = deferred


class _Deferred(ModuleType):
    """Has the two functions that torch's optimizers call, which do nothing in code that is not compiled. Any other
    attribute is the real module's, which takes this one's place."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # makes it a package, whose submodules are imported through `_Submodules`
        self.submodules = _Submodules(self)
        self._functions: list[Callable[..., Any]] = []

    def graph_break(self, *_: object, **__: object) -> None:
        pass

    def disable(self, function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        self._functions.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules asks for these
            raise AttributeError(name)
        return getattr(self.replace(), name)

    def replace(self) -> ModuleType:
        """Import the real module in place of this one."""
        with contextlib.suppress(ValueError):  # another thread was first
            sys.meta_path.remove(self.submodules)
            del sys.modules[_NAME]
            for function in self._functions:
                vars(function).pop(_DISABLED, None)  # then torch asks the real module
        return importlib.import_module(_NAME)


class _Submodules(MetaPathFinder, Loader):
    """Finds the submodules of a deferred module by importing the real one, which itself imports most of them."""

    def __init__(self, parent: _Deferred) -> None:
        self._parent = parent

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not self._parent.__path__:
            return None
        self._parent.replace()
        return ModuleSpec(name, self) if name in sys.modules else importlib.util.find_spec(name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass
