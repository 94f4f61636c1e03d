"""The cost of saving 50 million parameters with Adam's moments (600 MB) five times in a run.

Three variants take turns, each in a fresh process: torch.save of the same state in a hand-written loop; dray, which
writes in the background; and dray with background writing turned off. A stall is the delay of the next batch by a
checkpoint: the gap between the batches before and after it, less the median gap between batches without a checkpoint.
The time of a run is from its first batch to its end, with all five checkpoints written. The last one causes no stall,
since no batch follows: every variant waits for it at the end.

    python bench/checkpoint.py [--rounds 5] [--batches 100] [--save]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from _measure import Paper, Ran, arguments, machine, of_kind, perform, quantile, run, spread, stamp, verdict

SAVES = 5
WIDTH, LAYERS, RECORDS = 2048, 12, 16
"""Twelve square layers are 50 million weights."""
STALL, TOTAL, COPIES = 0.25, 1.05, 1.0
"""Targets: stall and time as shares of torch.save's, and extra memory in copies of the state."""

WAYS = {
    "by-hand": "torch.save, by hand",
    "background": "dray",
    "at-once": "dray, writing at once",
}


# --------------------------------------------------------------------------------------------------- in its own process
def child(way: str, batches: int, directory: Path) -> None:
    """Train and save."""
    os.environ["DRAY_HOME"] = str(directory / "home")
    # Flush the pages of earlier runs, so that this run does not pay for them.
    os.sync()
    saved = _by_hand(batches, directory) if way == "by-hand" else _dray(way, batches)
    stamp("end", peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, cpu_s=time.process_time(), **saved)


def _made() -> tuple[Any, Any, Any]:
    """A model, its optimizer, a batch."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4), torch.randn(RECORDS, WIDTH)


def _by_hand(batches: int, directory: Path) -> dict[str, Any]:
    import torch

    model, optimizer, batch = _made()
    for number in range(1, batches + 1):
        stamp("begin")
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stamp("trained")
        if number % (batches // SAVES) == 0:
            state = {"models_state_dict": [model.state_dict()], "optimizers_state_dict": [optimizer.state_dict()]}
            torch.save(state, directory / f"checkpoint_{number}.pt")
            size = (directory / f"checkpoint_{number}.pt").stat().st_size
    stamp("done")
    return {"size": size}


def _dray(way: str, batches: int) -> dict[str, Any]:
    from dray import pytorch

    if way == "at-once":
        from dray.training.checkpoint import checkpointer

        checkpointer.AT_ONCE_BYTES = sys.maxsize

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            model, optimizer, self.batch = _made()
            self.model, self.optimizer = context.wrap_model(model), context.wrap_optimizer(optimizer)

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader([0] * batches)

        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader([0])

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            stamp("begin")
            self.context.backward(self.model(self.batch).square().mean())
            self.context.step_optimizer(self.optimizer)
            stamp("trained")
            return {}

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"validation_loss": 0.0}

    with pytorch.init() as context:
        trial = Trial(context)
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(batches),
            checkpoint_period=pytorch.Batch(batches // SAVES),
            checkpoint_policy="none",
        )
        stamp("done")
        states = sorted(context.get_tensorboard_path().parent.glob("checkpoint_*/state-dict.pth"))
    assert len(states) == SAVES, states
    return {"size": states[0].stat().st_size}


# --------------------------------------------------------------------------------------------------------------- report
def stalls(ran: Ran, batches: int) -> list[float]:
    """The stalls of all checkpoints but the last, in seconds."""
    begin, trained = of_kind(ran.stamps, "begin"), of_kind(ran.stamps, "trained")
    gaps = [after.time - before.time for before, after in zip(trained, begin[1:], strict=False)]
    period = batches // SAVES
    usual = quantile([gap for number, gap in enumerate(gaps, 1) if number % period], 0.5)
    return [gaps[number * period - 1] - usual for number in range(1, SAVES)]


def total_s(ran: Ran) -> float:
    """From the first batch to the end, all checkpoints written."""
    return of_kind(ran.stamps, "done")[0].time - of_kind(ran.stamps, "begin")[0].time


def end(ran: Ran, field: str) -> Any:
    """A field of the stamp at a run's end."""
    return of_kind(ran.stamps, "end")[0].fields[field]


def report(paper: Paper, found: dict[str, list[Ran]], batches: int) -> None:
    """Print the table, and the verdict on each target."""
    by_hand = found["by-hand"]
    size_mb = end(by_hand[0], "size") / 2**20
    copy_mb = WIDTH * WIDTH * LAYERS * 3 * 4 / 2**20
    assert abs(size_mb - copy_mb) < 1, "the file by hand is the state"
    paper.say(
        f"{WIDTH * WIDTH * LAYERS / 1e6:.0f} million parameters, {size_mb:.0f} MiB by checkpoint, {batches} batches, "
        f"{SAVES} checkpoints; {len(by_hand)} rounds; median (min - max)."
    )
    paper.say()

    def share(runs: list[Ran], which: slice) -> list[float]:
        plain = [quantile(stalls(ran, batches)[which], 0.5) for ran in by_hand]
        own = [quantile(stalls(ran, batches)[which], 0.5) for ran in runs]
        return [one / other for one, other in zip(own, plain, strict=True)]

    later, first = slice(1, None), slice(0, 1)
    rows = []
    for way, name in WAYS.items():
        runs = found[way]
        totals = [total_s(ran) / total_s(other) for ran, other in zip(runs, by_hand, strict=True)]
        more = [
            (end(ran, "peak_mb") - end(other, "peak_mb")) / copy_mb for ran, other in zip(runs, by_hand, strict=True)
        ]
        all_stalls = [stall for ran in runs for stall in stalls(ran, batches)[later]]
        rows.append(
            [
                name,
                spread(all_stalls, "s", 3),
                spread([s for ran in runs for s in stalls(ran, batches)[first]], "s", 3),
                "" if way == "by-hand" else spread(share(runs, later)),
                spread([total_s(ran) for ran in runs], "s", 1),
                "" if way == "by-hand" else spread(totals, digits=3),
                spread([end(ran, "cpu_s") for ran in runs], "s", 1),
                "" if way == "by-hand" else spread(more),
            ]
        )
    paper.table(
        ["way", "stall", "first stall", "/ torch.save's", "run", "/ torch.save's", "CPU", "extra memory, copies"],
        rows,
    )
    paper.say()
    dray = found["background"]
    stall = quantile(share(dray, later), 0.5)
    total = quantile([total_s(ran) / total_s(other) for ran, other in zip(dray, by_hand, strict=True)], 0.5)
    copies = quantile(
        [(end(a, "peak_mb") - end(b, "peak_mb")) / copy_mb for a, b in zip(dray, by_hand, strict=True)], 0.5
    )
    begun = quantile(share(dray, first), 0.5)
    paper.say(f"Stall: {stall:.0%} of torch.save's (target <= {STALL:.0%}): {verdict(stall <= STALL)}; "
              f"{begun:.0%} for the first, which allocates the buffers: {verdict(begun <= STALL)}.")  # fmt: skip
    paper.say(f"Run: {total:.3f}x the time with torch.save (target <= {TOTAL}): {verdict(total <= TOTAL)}.")
    # The rest of dray itself, and the rounding of allocators, take some MB.
    paper.say(f"Memory: {copies:.2f} more copies of the state at the peak (target <= {COPIES:g}, to a twentieth): "
              f"{verdict(copies <= COPIES + 0.05)}.")  # fmt: skip


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run the ways in turn, and print the results."""
    paper.say(machine())
    found: dict[str, list[Ran]] = {way: [] for way in WAYS}
    for number in range(1, options.rounds + 1):
        for way in WAYS:
            where = directory / f"{number}-{way}"
            ran = run(__file__, ["--child", way, str(options.batches), str(where)], where)
            shutil.rmtree(where)
            found[way].append(ran)
            middle = quantile(stalls(ran, options.batches), 0.5)
            print(f"round {number}, {way}: stall {middle:.3f} s, run {total_s(ran):.1f} s", flush=True)
    report(paper, found, options.batches)


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        way, batches, directory = sys.argv[2:]
        return child(way, int(batches), Path(directory))
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is run (default 5)")
    parser.add_argument("--batches", type=int, default=100, help=f"per run, a multiple of {SAVES} (default 100)")
    options = parser.parse_args()
    if options.batches < 2 * SAVES or options.batches % SAVES:
        parser.error(f"--batches {options.batches}: must be a multiple of {SAVES}, at least {2 * SAVES}")
    perform(measure, options, name="checkpoint", title="Saving: the stall, the run's time, memory")


if __name__ == "__main__":
    main()
