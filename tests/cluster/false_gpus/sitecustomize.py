"""For all processes of a cluster whose GPUs are false: workers take themselves to have none, so gloo and the CPU serve.

Python imports this by itself, from a directory on its path.
"""

from __future__ import annotations

import importlib.abc
import sys


class _WhenWorkersComeToIt(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "dray.worker.process_group":
            import ray

            ray.get_gpu_ids = list


sys.meta_path.insert(0, _WhenWorkersComeToIt())
