"""How dray handles a trial's device-side assert and lack of memory, and the trial after it, without Ray."""

from __future__ import annotations

import gc
import re

from failing import BATCHES, Failing
from part import ON_GPU, Child, allocated, attempt, check, classified, raised, well

from dray import pytorch
from dray.leases.failure import users_line


def main(tiny: bool) -> None:
    """Each fault in its own process."""
    with attempt("both faults"):
        children = {fault: Child("errors", "fail", fault) for fault in ("assert", "memory")}
        for fault, child in children.items():
            well(child, fault)


def train(fault: str) -> None:
    with pytorch.init(hparams={"fault": fault}, enable_tensorboard_logging=False) as context:
        pytorch.Trainer(Failing(context), context).fit(max_length=pytorch.Batch(BATCHES))


def fail(fault: str) -> None:
    """A trial that completes, one that fails, and after the out-of-memory error one more in the same process."""
    train("none")
    gc.collect()
    before = allocated()
    error = raised(lambda: train(fault))
    wanted = {"assert": "device" if ON_GPU else "error", "memory": "oom"}[fault]
    classified(fault, error, wanted)
    if error is not None:
        # Not the number of the line: a GPU's error is raised by whatever comes next.
        line = users_line(error, None) or ["none"]
        where = re.sub(r":\d+,", ",", line[0].rpartition("/")[2])
        check(f"{fault}: the user's line", where, "failing.py, in train_batch")
        error.__traceback__ = error.__context__ = None  # its frames hold the trial
    if fault == "memory":
        check("memory: the next trial", repr(raised(lambda: train("none"))), "None")
        gc.collect()
        check("memory: bytes left by it", allocated() - before, 0)
