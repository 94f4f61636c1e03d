"""The time from fit's skip to the first batch of a resumed trial: a million records, up to a million skipped batches.

A trial resumes from a checkpoint at that batch, in a fresh process each time. The clock starts when
build_training_data_loader() has returned, and stops when train_batch() gets its first batch. So it measures the skip,
the shuffle of the epoch that it ends in, loading the state of a tiny model, and loading the first batch.

    python bench/resume.py [--rounds 5] [--orders shuffled ...] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _measure import Paper, arguments, machine, of_kind, perform, quantile, run, spread, stamp, verdict

TARGET_S = 0.05
RECORDS = 1_000_000
BATCH_SIZE = 32
PLACES = (10, 100_000, 1_000_000)

ORDERS = {
    "natural": "pytorch.DataLoader, in order",
    "shuffled": "pytorch.DataLoader, shuffle=True",
    "sequence": "a sampler of the user's that is a list",
    "by-epoch": "a sampler of the user's with set_epoch()",
    "torchs": "torch's RandomSampler, without a generator",
    "drawn": "another sampler of the user's: RandomSampler with its own generator",
    "walked": "Determined's way: samplers.Repeat- and SkipBatchSampler by hand",
}
#: The orders that the target is for; others are shown for comparison.
OURS = ("natural", "shuffled", "sequence", "by-epoch", "torchs")


# --------------------------------------------------------------------------------------------------- in its own process
def child(order: str, place: int, directory: Path) -> None:
    """Resume from a checkpoint at batch ``place``, and train one batch."""
    os.environ["DRAY_HOME"] = str(directory / "home")
    import torch
    from torch.utils.data import BatchSampler, RandomSampler

    from dray import pytorch

    torch.set_num_threads(1)

    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return RECORDS

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((1,), float(index))

    class ByEpoch:
        """Like torch's DistributedSampler: the order depends only on the epoch."""

        epoch = 0

        def __len__(self) -> int:
            return RECORDS

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            generator = torch.Generator().manual_seed(self.epoch)
            return iter(torch.randperm(RECORDS, generator=generator).tolist())

    samplers: dict[str, Any] = {
        "sequence": lambda: list(range(RECORDS - 1, -1, -1)),
        "by-epoch": ByEpoch,
        "torchs": lambda: RandomSampler(range(RECORDS)),
        "drawn": lambda: RandomSampler(range(RECORDS), generator=torch.Generator().manual_seed(1)),
    }

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            self.model = context.wrap_model(torch.nn.Linear(1, 1))
            self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
            if order == "walked":
                context.experimental.disable_dataset_reproducibility_checks()

        def build_training_data_loader(self) -> Any:
            loader = self.loader()
            stamp("skip")
            return loader

        def loader(self) -> Any:
            if order == "walked":
                shuffled = RandomSampler(range(RECORDS), generator=torch.Generator().manual_seed(1))
                batches = pytorch.samplers.RepeatBatchSampler(BatchSampler(shuffled, BATCH_SIZE, False))
                left = pytorch.samplers.SkipBatchSampler(batches, self.context.get_initial_batch())
                return torch.utils.data.DataLoader(Numbers(), batch_sampler=left)
            sampler = samplers[order]() if order in samplers else None
            return pytorch.DataLoader(Numbers(), BATCH_SIZE, shuffle=order == "shuffled", sampler=sampler)

        def build_validation_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader(range(2), batch_size=2)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            stamp("first", batch=batch_idx)
            loss = self.model(batch).mean()
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return loss

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"loss": 0.0}

    # A seed, so that both runs are the same trial.
    conf = {"reproducibility": {"experiment_seed": 1}}
    with pytorch.init(exp_conf=conf) as context:
        saved = Path(_checkpoint(Trial(context), context, directory, place))
    with pytorch.init(exp_conf=conf) as context:
        trial = Trial(context)
        stamp("fit")
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(place + 1), latest_checkpoint=str(saved))


def _checkpoint(trial: Any, context: Any, directory: Path, place: int) -> Path:
    """A checkpoint of a trial that has trained one batch, but claims to have trained ``place``."""
    from dray import pytorch
    from dray.storage import CheckpointStore

    made: list[str] = []

    class Noting(pytorch.PyTorchCallback):
        def on_checkpoint_upload_end(self, uuid: str) -> None:
            made.append(uuid)

    trial.build_callbacks = lambda: {"noting": Noting()}
    pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(1))
    store = CheckpointStore(directory)
    staging = store.stage(place)
    shutil.copytree(context._run.host.open_checkpoint(made[0]), staging, dirs_exist_ok=True)
    (staging / "manifest.json").unlink()
    progress = json.loads((staging / "progress.json").read_text())
    (staging / "progress.json").write_text(json.dumps({**progress, "batches": place, "saved": place}))
    return Path(store.commit(staging, place))


# --------------------------------------------------------------------------------------------------------------- report
def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run the orders and places in turn, and print the results."""
    paper.say(machine())
    taken: dict[tuple[str, int], list[float]] = {(order, place): [] for order in options.orders for place in PLACES}
    for number in range(options.rounds):
        for order, place in taken:
            where = directory / f"{number}-{order}-{place}"
            ran = run(__file__, ["--child", order, str(place), str(where)], where)
            first = of_kind(ran.stamps, "first")[-1]
            assert first.fields["batch"] == place, "the trial did not go on from the checkpoint"
            taken[order, place].append(first.time - of_kind(ran.stamps, "skip")[-1].time)
    paper.say(f"{RECORDS:,} records in batches of {BATCH_SIZE}; milliseconds, median of {options.rounds} (from - to).")
    paper.say()
    rows = []
    for order in options.orders:
        cells = [spread([1000 * s for s in taken[order, place]], digits=1) for place in PLACES]
        reached = verdict(quantile(taken[order, 100_000], 0.5) <= TARGET_S) if order in OURS else ""
        rows.append([ORDERS[order], *cells, reached])
    paper.table(
        ["order", *(f"at batch {place:,}" for place in PLACES), f"<= {1000 * TARGET_S:.0f} ms at 100,000"], rows
    )


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        order, place, directory = sys.argv[2:]
        return child(order, int(place), Path(directory))
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is run (default 5)")
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS), help="which (default: all)")
    options = parser.parse_args()
    perform(measure, options, name="resume", title="Resuming: from fit's skip to the first batch")


if __name__ == "__main__":
    main()
