"""A trial's use of its machine over time, for views: which figures there are, with words and units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dray.records.timeline import PHASES

if TYPE_CHECKING:
    import pandas as pd

FIGURES = {
    "gpu_percent": ("GPU utilization", "% of time"),
    "gpu_memory_gb": ("GPU memory per rank", "GB"),
    "gpu_peak_memory_gb": ("GPU memory per rank at the peak", "GB"),
    "cpu_cores": ("CPU cores per trial", ""),
    "memory_gb": ("memory per trial", "GB"),
    "batches_per_second": ("batches per second", ""),
    "step_ms": ("step time", "ms"),
    "step_p99_ms": ("step time, 99th percentile", "ms"),
    "host_wait_percent": ("waiting for data", "% of training time"),
    "device_wait_percent": ("waiting for the GPU", "% of training time"),
    "records_per_second": ("records per second", ""),
    "tokens_per_second": ("tokens per second", ""),
    "mfu_percent": ("MFU", "% of the GPUs' peak"),
    "tflops_per_slot": ("TFLOP/s per slot", ""),
    "gpu_alloc_retries": ("retries of GPU allocations", ""),
    "gpu_ooms": ("times out of GPU memory", ""),
}
"""Label and unit of each figure by its name in ``system_metrics``; other names there are a phase's seconds."""


def over_time(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The figures of one trial in the order of `FIGURES`, each with ``name``, ``label``, ``unit``, ``batches``,
    ``values`` and ``times`` (Unix time in s). `rows`: the trial's, as from `dray.records.metrics.read_system`."""
    by_name = dict(iter(rows.sort_values("time", kind="stable").groupby("name")))
    return [
        {
            "name": name,
            "label": label,
            "unit": unit,
            "batches": by_name[name]["batches"].tolist(),
            "values": by_name[name]["value"].tolist(),
            "times": by_name[name]["time"].tolist(),
        }
        for name, (label, unit) in FIGURES.items()
        if name in by_name
    ]


def seconds_by_phase(rows: pd.DataFrame) -> dict[str, float]:
    """The seconds that one trial has spent in each phase, in the order of `PHASES`; phases without any are left out."""
    spent = rows.groupby("name")["value"].sum()
    return {phase: float(spent[name]) for phase in PHASES if (name := f"{phase}_s") in spent.index}
