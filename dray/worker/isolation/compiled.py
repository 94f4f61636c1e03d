"""Keeps code compiled by ``torch.compile`` from trial to trial, as long as the next trial would compile the same.

torch guards compiled code by its dependencies: shapes, dtypes, values of attributes and globals, called functions, most
flags; but not by the compiler's settings and some others, nor by the methods of module classes. So these are compared
before a trial trains. If one differs, everything is recompiled; also after a trial that hit the recompile limit (torch
then leaves the function uncompiled), or used CUDA graphs, which hold memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import sys
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any, TypeAlias

import torch

from dray.training.trial import before_training
from dray.worker.isolation.settings import Setting

MAX_COMPILATIONS = 64
"""Compilations of one function after which everything is dropped: each costs a guard to check, and memory."""

CompilerState: TypeAlias = tuple[dict[tuple[str, str], Any], list[Any]]


class Compiled:
    """The compiled code of this process, and the settings of torch that it may depend on."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._settings = settings
        self._state: CompilerState | None = None  # the settings of the compiled code; None without any
        self._classes: dict[type, dict[str, Any]] = {}
        self._limit: int | None = None  # the trial's recompile limit; None until it trains compiled code

    @contextlib.contextmanager
    def for_a_trial(self) -> Iterator[None]:
        """Run a trial in the block, in its own thread."""
        self._limit = None
        before_training.append(self._begin)
        try:
            yield
        finally:
            before_training.remove(self._begin)
            if _backends() and not self._may_stay():
                self._forget()

    def _begin(self, models: Sequence[torch.nn.Module]) -> None:
        """Check the compiled code, after the trial has made its models and settings, and before it trains."""
        if not _backends():
            return
        state = self._state_now()
        if self._state not in (None, state) or any(_methods(kind) != known for kind, known in self._classes.items()):
            self._forget()
        self._state = state
        for kind in {kind for model in models for module in model.modules() for kind in type(module).__mro__}:
            self._classes[kind] = _methods(kind)
        config: Any = sys.modules["torch._dynamo.config"]
        if self._limit != config.recompile_limit:
            # Earlier trials' compilations do not count: as many recompilations are left as in a new process.
            self._limit = config.recompile_limit = config.recompile_limit + _compilations()

    def _may_stay(self) -> bool:
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        return (
            self._limit is not None
            and self._state == self._state_now()
            and _compilations() < min(self._limit, MAX_COMPILATIONS)
            and all(map(_is_torchs, _backends()))
            and not (trees and getattr(trees.local, "tree_manager_containers", None))
        )

    def _state_now(self) -> CompilerState:
        return _changed_settings(), [setting.get() for setting in self._settings]

    def _forget(self) -> None:
        torch._dynamo.reset()
        self._state = None
        self._classes.clear()


def _backends() -> list[Any]:
    """The backends of ``torch.compile`` since the last reset."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    # None stands for functions that are never compiled, such as an optimizer's step.
    return [] if dynamo is None else [each for each in dynamo.cached_backends.values() if each is not None]


def _compilations() -> int:
    """The greatest number of compilations of a function."""
    return max(sys.modules["torch._dynamo.convert_frame"].FRAME_COMPILE_COUNTER.values(), default=0)


def _is_torchs(backend: Any) -> bool:
    """Whether a backend is one of torch's. Any other may belong to the trial, and keep it alive."""
    home = getattr(backend if isinstance(backend, FunctionType) else type(backend), "__module__", "")
    return home.partition(".")[0] == "torch"


def _methods(kind: type) -> dict[str, Any]:
    # Without __init__, which torch.compile() replaces in nn.Module but does not compile.
    methods = {name: value for name, value in vars(kind).items() if isinstance(value, FunctionType)}
    return {name: value for name, value in methods.items() if name not in ("__init__", "__setstate__")}


def _changed_settings() -> dict[tuple[str, str], Any]:
    """The compiler's settings that were changed in this thread."""
    known = contextvars.copy_context()
    changed = {}
    for module in ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"):
        for name, entry in getattr(sys.modules.get(module), "_config", {}).items():
            variable = getattr(entry, "user_override", None)
            if not isinstance(variable, contextvars.ContextVar) or name in ("recompile_limit", "cache_size_limit"):
                continue
            # Reading a setting that is a list or a dict sets it to a copy of its default.
            if (value := known.get(variable, entry.default)) != entry.default:
                changed[module, name] = copy.deepcopy(value)
    return changed
