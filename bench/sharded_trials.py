"""The time from a trial's last report to the first batch of the next on the same worker group, for sharded and
pretrained models.

Each case is a random search, in a process and a Ray of its own: the GPT of examples/gpt on two ranks, by
DistributedDataParallel and by FSDP2 (`fully_shard`) in turn; the LoRA adapters of examples/finetune on one rank, and by
FSDP2 on two. The last report is the end of a trial's last validation on rank 0, so that the checkpoint which follows is
counted; the first batch begins on the group's last rank. The table also has the time of a trial's first batch, in which
FSDP2 sets itself up, and of later ones.

    python bench/sharded_trials.py [--cases ddp sharded lora sharded-lora] [--trials 16] [--rounds 2] [--save]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _measure import (
    BENCH,
    Paper,
    Ran,
    arguments,
    end_on_sigterm,
    machine,
    of_kind,
    perform,
    quantile,
    run_in_turn,
    stamp_counts,
    verdict,
)
from turnaround import gaps_of

TARGET_S = 0.2
GPT = {"global_batch_size": 16, "aggregation_frequency": 1, "block": 64, "layers": 3, "width": 128, "heads": 4,
       "dropout": 0.0, "warm_up_steps": 2}  # fmt: skip
LORA = {"global_batch_size": 16, "model": "", "block": 64, "rank": {"type": "categorical", "vals": [2, 4, 8, 16]}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of trial.

    Args:
        label: its name in the table.
        example: the directory of its model code.
        slots: workers a group.
        hparams: besides the learning rate.
    """

    label: str
    example: str
    slots: int
    hparams: dict[str, Any]


CASES = {
    "ddp": Case(label="GPT, DDP, 2 ranks", example="gpt", slots=2, hparams={**GPT, "fsdp": False}),
    "sharded": Case(label="GPT, FSDP2, 2 ranks", example="gpt", slots=2, hparams={**GPT, "fsdp": True}),
    "lora": Case(label="LoRA, 1 rank", example="finetune", slots=1, hparams={**LORA, "fully_shard": False}),
    "sharded-lora": Case(label="LoRA, FSDP2, 2 ranks", example="finetune", slots=2,
                         hparams={**LORA, "fully_shard": True}),
}  # fmt: skip


def child(name: str, directory: Path, trials: int) -> None:
    """Run one case, in its own process."""
    end_on_sigterm()
    import dray

    case = CASES[name]
    code = directory / "model"
    shutil.copytree(BENCH.parent / "examples" / case.example, code)
    shutil.copy(BENCH / "model" / "stamped.py", code)
    config = {
        "name": name,
        "entrypoint": "stamped:Stamped",
        "hyperparameters": {**case.hparams, "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2}},
        "searcher": {
            "name": "random",
            "metric": "validation_loss",
            "max_length": {"batches": 4},
            "max_trials": trials,
        },
        "resources": {"slot": "cpu", "slots_per_trial": case.slots, "max_slots": case.slots},
        "reproducibility": {"experiment_seed": 7},
    }
    experiment = dray.Experiment(config, model_dir=code, path=directory / "experiment")
    experiment.run()
    stamp_counts(experiment)


@dataclass(slots=True, kw_only=True)
class Figures:
    """The times of the runs of a case, in seconds.

    Attributes:
        gaps: from a last report to a first batch.
        firsts, laters: the time of the first batch of a later trial, and of its other batches.
    """

    case: Case
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    laters: list[float] = field(default_factory=list)

    def add(self, ran: Ran) -> None:
        """A run of the case."""
        counts = of_kind(ran.stamps, "counts")[0].fields
        assert (counts["groups"], counts["lost"]) == (1, 0), f"groups: {counts}"
        self.gaps += [gap.s for gap in gaps_of(ran.stamps, self.case.slots)]
        for each in of_kind(ran.stamps, "batch"):
            if each.fields["nth"] > 0:  # a process's very first also imports modules
                (self.firsts if each.fields["first"] else self.laters).append(each.fields["took"])


def report(paper: Paper, figures: dict[str, Figures]) -> None:
    """Print the table."""
    paper.say("\nSeconds from the last report of a trial to the first batch of the next, which begins on all ranks\n")
    rows = []
    for found in figures.values():
        gaps = found.gaps
        rows.append(
            [
                found.case.label,
                str(len(gaps)),
                *(f"{quantile(gaps, share):.3f}" for share in (0.5, 0.9, 1.0)),
                verdict(quantile(gaps, 0.5) <= TARGET_S),
                f"{statistics.median(found.firsts):.3f}",
                f"{statistics.median(found.laters):.3f}",
            ]
        )
    head = ["trials", "gaps", "median", "90th %", "most", f"median <= {TARGET_S:g}", "first batch", "later batches"]
    paper.table(head, rows)
    for one, other in (("sharded", "ddp"), ("sharded-lora", "lora")):
        if one in figures and other in figures:
            ratio = quantile(figures[one].gaps, 0.5) / quantile(figures[other].gaps, 0.5)
            paper.say(f"\n{figures[one].case.label} / {figures[other].case.label}: {ratio:.2f}x")
    paper.say(
        "\nFirst batch: the time of a trial's first batch alone, without the very first of its process. With FSDP2\n"
        "it takes longer than later ones: torch 2.13 caches its dispatch of DTensor operations per\n"
        "thread, and each trial has its own thread."
    )


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all cases in turn, and print the results."""
    paper.say(machine())
    figures = {name: Figures(case=CASES[name]) for name in options.cases}
    for name, ran in run_in_turn(__file__, dict.fromkeys(options.cases, options.trials), options.rounds, directory):
        figures[name].add(ran)
    report(paper, figures)


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        name, directory, trials = sys.argv[2:]
        return child(name, Path(directory), int(trials))
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=16, help="trials per search (default 16)")
    parser.add_argument("--rounds", type=int, default=2, help="how often each case is run (default 2)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="which (default: all)")
    options = parser.parse_args()
    perform(measure, options, name="sharded_trials", title="Sharded and fine-tuning trials: from one to the next")


if __name__ == "__main__":
    main()
