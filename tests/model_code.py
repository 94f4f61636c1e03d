"""Imports of model code in this process, undone for the tests that follow."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from dray import imports


@contextlib.contextmanager
def imports_undone() -> Iterator[None]:
    """Forget the model code that is imported in the block, and restore sys.path."""
    path = list(sys.path)
    try:
        yield
    finally:
        imports.forget_model_dir()
        sys.path[:] = path
