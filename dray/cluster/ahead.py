"""Work that is done ahead of need, in processes of a small cluster that would idle otherwise.

A module of its own: a process that runs a function imports the function's module first, and this one brings nothing.
"""

from __future__ import annotations

import importlib


def load(module: str) -> None:
    """Import a module, so that the actor that this process becomes next finds it loaded."""
    importlib.import_module(module)
