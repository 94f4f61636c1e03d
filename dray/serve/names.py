"""Names of experiments in URLs: those of directories directly below the results directory, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from dray.errors import NoExperiment


def experiment_path(results: Path, name: str) -> Path:
    """The directory of an experiment.

    Args:
        results: the results directory.
        name: from a URL, decoded.

    Raises:
        NoExperiment: there is none of this name: in particular, of none with a slash, and of no hidden one.
    """
    path = results / name
    if name and not name.startswith(".") and "/" not in name and "\0" not in name:
        # Links are those that `link_into_results` makes, to a directory of the same name.
        is_ours = not path.is_symlink() or Path(os.readlink(path)).name == name
        if is_ours and (path / "experiment.yaml").is_file():
            return path.resolve()
    raise NoExperiment(f"no experiment {name[:100]!r} in the results directory")
