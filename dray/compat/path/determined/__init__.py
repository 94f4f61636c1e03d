"""The package that ``import determined`` gives: Determined's names for dray's objects, see `dray.compat`."""

from __future__ import annotations

from typing import Any

from dray import compat
from dray._version import __version__ as dray_version
from dray.compat.names import COUNTERPARTS, VERSION

__version__ = f"{VERSION}+dray{dray_version}"

# `import *` gives only names that do not import torch.
__all__ = ["LOG_FORMAT", "__version__", "get_cluster_info", "import_from_path"]

compat.install_if_absent()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'determined' has no attribute {name!r}")
    value = compat.find(f"{__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    inner = {name.removeprefix("determined.") for name in COUNTERPARTS if name.count(".") == 1}
    return sorted({*globals(), *inner})
