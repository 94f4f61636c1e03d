"""TensorBoard and optuna-dashboard for experiments, started when somebody asks for them."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

from dray.records.directory import ExperimentDirectory
from dray.report.ui import free_port, start_dashboard, start_tensorboard

PORT = 6006


class Boards:
    """Each is started once, and runs until the server ends; only browsers on its machine reach them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Path, dict[str, str | None]] = {}

    def start(self, directory: ExperimentDirectory) -> dict[str, str | None]:
        """The addresses of both; None for one that is not installed.

        Raises:
            ExperimentError: no port is free.
        """
        with self._lock:
            found = self._found.setdefault(directory.path, {"tensorboard": None, "optuna_dashboard": None})
            if found["tensorboard"] is None:
                found["tensorboard"] = start_tensorboard(directory.path, free_port(PORT))
            if found["optuna_dashboard"] is None and importlib.util.find_spec("optuna_dashboard") is not None:
                found["optuna_dashboard"] = start_dashboard(directory.path, free_port(PORT + 1))
            return dict(found)
