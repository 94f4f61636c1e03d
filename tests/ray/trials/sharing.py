"""Four trials that share a slot: they meet, one runs out of memory, and the others go on when its process is gone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from recorded import Recorded, first

MEET_S = 120.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + MEET_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


class Sharing(Recorded):
    """At its sixth batch each of four trials waits for the others; then trial 1, once, ends as ``fault`` says."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        if batch_idx == 5:
            self.meet(Path(self.context.get_hparam("meeting")))
        return super().train_batch(batch, epoch_idx, batch_idx)

    def meet(self, place: Path) -> None:
        has = {name: amount for name, amount in ray.get_runtime_context().get_assigned_resources().items() if amount}
        here = {"pid": os.getpid(), "has": has, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
        if first(str(place / f"trial_{self.trial}")):
            (place / f"{self.trial}").write_text(json.dumps(here))
            (place / f"{self.trial}").rename(place / f"trial_{self.trial}.json")
        wait_until(lambda: len(list(place.glob("*.json"))) == 4, "four trials at the same time")
        if self.trial != 1:
            pid = json.loads((place / "trial_1.json").read_text())["pid"]
            wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process of trial 1")
        elif first(str(place / "fault")):
            match self.context.get_hparam("fault"):
                case "killed":  # as the kernel's OOM killer does it
                    os.kill(os.getpid(), signal.SIGKILL)
                case "more than a quarter of the GPU":
                    total = torch.cuda.get_device_properties(self.context.device).total_memory
                    torch.empty(total // 4, dtype=torch.uint8, device=self.context.device)
                    raise AssertionError("the trial can use the others' memory")
