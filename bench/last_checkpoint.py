"""A trial's last checkpoint, for which nothing trains meanwhile, against torch.save of the same state.

Both write to the same file system, in turn, in one process, for each of the directories given. dray's time is from the
end of the last validation to the return of `fit`: the state is collected, written and hashed, and the manifest is
committed. `make gpu` measures the same from a GPU.

    python bench/last_checkpoint.py [--on DIR ...] [--gb 2] [--rounds 5] [--save]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _measure import Paper, Ran, arguments, machine, of_kind, perform, quantile, run, spread, stamp, verdict

WIDTH = 4096
TARGET = 1.1


# --------------------------------------------------------------------------------------------------- in its own process
def child(layers: int, rounds: int, directory: Path) -> None:
    """Save in both ways, in turn."""
    os.environ["DRAY_HOME"] = str(directory / "home")
    os.chdir(directory)  # it has no code, which would go into each checkpoint
    import torch

    from dray import pytorch

    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    validated = 0.0, 0.0

    class Trial(pytorch.PyTorchTrial):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            self.model, self.optimizer = context.wrap_model(model), context.wrap_optimizer(optimizer)

        def build_training_data_loader(self) -> pytorch.DataLoader:
            return pytorch.DataLoader([0])

        build_validation_data_loader = build_training_data_loader

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            self.context.backward(self.model(torch.ones(1, WIDTH)).square().mean())
            self.context.step_optimizer(self.optimizer)
            return {}

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            nonlocal validated
            touch_memory()
            validated = clocks()
            return {"validation_loss": 0.0}

    def touch_memory() -> None:
        """Write and remove a file, so that neither way is the first to use memory that the host took back meanwhile."""
        file = directory / "touched"
        with file.open("wb", buffering=0) as output:
            for _ in range(3 * 4 * layers * WIDTH * WIDTH >> 20):
                output.write(bytes(1 << 20))
        file.unlink()

    def clocks() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def took(what: str, began: tuple[float, float], file: Path) -> None:
        wall_s, cpu_s = (end - begin for begin, end in zip(began, clocks(), strict=True))
        stamp(what, wall_s=wall_s, cpu_s=cpu_s, size=file.stat().st_size)
        # The next one does not pay for writing this one's pages to the disk.
        shutil.rmtree(file.parent)
        os.sync()

    for number in range(rounds + 1):
        with pytorch.init(enable_tensorboard_logging=False) as context:
            pytorch.Trainer(Trial(context), context).fit(max_length=pytorch.Batch(1), checkpoint_policy="none")
            [file] = context.get_tensorboard_path().parent.glob("checkpoint_*/state-dict.pth")
            took("dray" if number else "first", validated, file)
        state = {"models_state_dict": [model.state_dict()], "optimizers_state_dict": [optimizer.state_dict()]}
        file = directory / "by-hand" / "checkpoint.pt"
        file.parent.mkdir()
        touch_memory()
        began = clocks()
        torch.save(state, file)
        took("by-hand" if number else "first", began, file)


# --------------------------------------------------------------------------------------------------------------- report
def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run the rounds on each file system, and print the results."""
    paper.say(machine())
    layers = max(1, round(options.gb * 1e9 / (WIDTH * WIDTH * 3 * 4)))
    rows, ratios = [], []
    for at in options.on:
        with tempfile.TemporaryDirectory(dir=at) as where:
            ran = run(__file__, ["--child", str(layers), str(options.rounds), where], directory / at.name)
        row, ratio = compared(at, ran)
        rows.append(row)
        ratios.append(ratio)
    paper.say(f"{layers * WIDTH * WIDTH * 12 / 1e9:.1f} GB, {options.rounds} rounds after one that is not counted.\n")
    paper.table(["directory", "torch.save", "CPU", "dray", "CPU", "dray / torch.save"], rows)
    paper.say()
    worst = max(ratios)
    paper.say(f"The last checkpoint: at most {worst:.2f} of torch.save's time (target <= {TARGET}): "
              f"{verdict(worst <= TARGET)}.")  # fmt: skip


def compared(at: Path, ran: Ran) -> tuple[Sequence[str], float]:
    """A row of the table, and the median of the rounds' ratios."""
    dray, by_hand = ([each.fields for each in of_kind(ran.stamps, kind)] for kind in ("dray", "by-hand"))
    assert abs(dray[0]["size"] - by_hand[0]["size"]) < 1 << 20, "both save the same state"
    ratios = [one["wall_s"] / other["wall_s"] for one, other in zip(dray, by_hand, strict=True)]
    cells = [spread([each[what] for each in way], "s") for way in (by_hand, dray) for what in ("wall_s", "cpu_s")]
    return [str(at), *cells, spread(ratios)], quantile(ratios, 0.5)


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        layers, rounds, directory = sys.argv[2:]
        return child(int(layers), int(rounds), Path(directory))
    parser = arguments(__doc__ or "")
    usual = [path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if path.is_dir()]
    parser.add_argument("--on", type=Path, nargs="+", default=usual, help="directories (default: /dev/shm and /tmp)")
    parser.add_argument("--gb", type=float, default=2, help="size of the state (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is run (default 5)")
    perform(measure, parser.parse_args(), name="last_checkpoint", title="The last checkpoint, against torch.save")


if __name__ == "__main__":
    main()
