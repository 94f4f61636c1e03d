"""The results directory; in a module of its own, so that a command finds the server in it at once."""

from __future__ import annotations

import os
from pathlib import Path


def results_root() -> Path:
    """The default storage: ``DRAY_HOME``, else ``~/dray_results``."""
    return Path(os.environ.get("DRAY_HOME", "~/dray_results")).expanduser()
