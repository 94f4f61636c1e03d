"""Puts off torch's import of its compiler until something is compiled."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
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
    if _NAME not in sys.modules and (spec := importlib.util.find_spec(_NAME)) is not None:
        deferred = _Deferred(spec)
        sys.meta_path.insert(0, _Submodules(deferred))
        sys.modules[_NAME] = deferred


class _Deferred(ModuleType):
    """Has the two functions that torch's optimizers call, which do nothing in code that is not compiled. Any other
    attribute is the real module's, which takes this one's place."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(_NAME)
        path = list(spec.submodule_search_locations or ())  # a list of its own, by which `_Submodules` knows it
        vars(self).update(__spec__=spec, __file__=spec.origin, __path__=path)
        vars(self).update(_functions=[], _lock=threading.Lock())

    def graph_break(self, *_: object, **__: object) -> None:
        pass

    def disable(self, *given: Any, **named: Any) -> Any:
        if not named.get("wrapping", True):  # torch's own call; what a user disables may be compiled later
            with self._lock:
                if sys.modules.get(_NAME) is self:
                    self._functions.append(given[0])
                    return given[0]
        return self.replace().disable(*given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # whoever looks through all modules asks for these
            raise AttributeError(name)
        return getattr(self.replace(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.replace(), name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (_NAME,)  # as cloudpickle does with modules

    def replace(self) -> ModuleType:
        """Import the real module in place of this one."""
        with self._lock:  # released before the import, which waits for other threads' imports
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
                for function in self._functions:
                    vars(function).pop(_DISABLED, None)  # then torch asks the real module
        return importlib.import_module(_NAME)


class _Submodules(MetaPathFinder, Loader):
    """Finds the submodules of a deferred module. Loading one imports the real module, which itself imports most."""

    def __init__(self, parent: _Deferred) -> None:
        self._parent = parent

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not self._parent.__path__:
            return None
        # Not imported here: Python holds a lock meanwhile, for which all imports of other threads wait.
        if (found := PathFinder.find_spec(name, path)) is not None:
            found.loader = self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._parent.replace()
        return importlib.import_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
