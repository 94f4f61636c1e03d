"""The use of an NVIDIA GPU, from the library of its driver (NVML)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def busy_percent(device: torch.device, library: Any = None) -> float:
    """The share of time in which a kernel ran on a GPU lately. `library`: by default, the driver's.

    Raises:
        OSError: there is no such library.
        RuntimeError: it does not tell, for example for a part of a GPU (MIG).
    """
    nvml = library or _library()
    uuid = torch.cuda.get_device_properties(device).uuid
    handle, rates = ctypes.c_void_p(), _Rates()
    _check(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle)))
    _check(nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)))
    return float(rates.gpu)


@functools.cache
def _library() -> Any:
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    _check(nvml.nvmlInit_v2())
    return nvml


def _check(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"NVML returned error {code}")
