"""The results directory, in a module of its own, so that commands find the server without further imports."""

from __future__ import annotations

import os
from pathlib import Path


def results_root() -> Path:
    """The results directory: ``DRAY_HOME``, else ``~/dray_results``."""
    return Path(os.environ.get("DRAY_HOME", "~/dray_results")).expanduser()
