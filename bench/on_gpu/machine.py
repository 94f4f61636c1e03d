"""The hardware and versions of this machine."""

from __future__ import annotations

import subprocess

import torch
from _measure import stamp


def main(tiny: bool) -> None:
    """Stamp it."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    stamp("machine", torch=torch.__version__, cuda=torch.version.cuda, gpus=gpus, driver=_driver() if gpus else None)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"
