"""The cost of the loop: a dray trial against a hand-written loop with the same model and data (bench/model/small.py).

Both alternate in one process, an epoch of one and an epoch of the other; CPU time, one thread. Each variant has
processes of its own, and the variants take turns, ``--rounds`` times:

  plain             metrics reported every 100 batches
  tensorboard       the same, and a TensorBoard scalar for every batch
  ray               plain, as a trial of an experiment, in a worker group on Ray
  ray-tensorboard   tensorboard, there
  validation        validation, against one by hand
  stream            batches of torchdata's StatefulDataLoader as a trial draws them, against the bare loader; no model
  ddp               two processes, gloo, DistributedDataParallel by hand and by dray
  start             from the start of a process to its first batch, and its peak memory: two processes, one of each

The hand-written loop keeps no metrics at all while it trains.

    python bench/loop.py [--rounds 5] [--quick] [--ways plain ddp] [--save]
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
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
    run,
    spread,
    stamp,
    verdict,
)

sys.path.insert(0, str(BENCH / "model"))

PLAIN_US = 20.0
TENSORBOARD_US = 45.0
VALIDATION = 1.05
DDP = 1.03
STREAM = 1.02  # .98 of the records a second
START = 1.05
MEMORY_MB = 10.0

LOOPS = {
    "plain": ("metrics every 100 batches", PLAIN_US),
    "tensorboard": ("the same, and a TensorBoard scalar for every batch", TENSORBOARD_US),
    "ray": ("metrics every 100 batches, in a worker group on Ray", PLAIN_US),
    "ray-tensorboard": ("the same, and a TensorBoard scalar for every batch", TENSORBOARD_US),
}
WAYS = (*LOOPS, "validation", "stream", "ddp", "start")
PROCESSES = 2


# --------------------------------------------------------------------------------------------------- in its own process
def child(way: str, directory: Path, epochs: int) -> None:
    """Run one of the variants, in its process."""
    end_on_sigterm()
    os.environ["DRAY_HOME"] = str(directory)
    match way:
        case "plain" | "tensorboard":
            _local(epochs, tensorboard=way == "tensorboard")
        case "ray" | "ray-tensorboard":
            _ray(directory, epochs, tensorboard=way == "ray-tensorboard")
        case "validation":
            _validation(2 * epochs)
        case "stream":
            _stream(epochs)
        case "ddp":
            _both_ranks(directory, epochs)
        case "ddp-rank":
            _rank(directory, epochs)
        case "start-dray":
            _start_dray()
        case "start-by-hand":
            _start_by_hand(directory)


def _local(epochs: int, *, tensorboard: bool) -> None:
    from small_trial import InTurns

    from dray import pytorch

    with pytorch.init(hparams={}, enable_tensorboard_logging=tensorboard) as context:
        trial = InTurns(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(_turns(trial.epoch, epochs)))


def _turns(epoch: int, epochs: int) -> int:
    """The number of batches: a warm-up epoch, the measured ones, and one batch to see the end of the last."""
    return epoch * (epochs + 1) + 1


def _ray(directory: Path, epochs: int, *, tensorboard: bool) -> None:
    from small import BATCH, training_data

    import dray

    config = {
        "name": "loop",
        "entrypoint": "small_trial:InTurns",
        "hyperparameters": {"tensorboard": tensorboard},
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "max_length": {"batches": _turns(len(training_data()) // BATCH, epochs)},
        },
        "max_restarts": 0,
    }
    dray.Experiment(config, model_dir=BENCH / "model", path=directory / "experiment").run()


def _validation(times: int) -> None:
    from small_trial import ValidationInTurns

    from dray import pytorch

    with pytorch.init(enable_tensorboard_logging=False) as context:
        pytorch.Trainer(ValidationInTurns(context), context).fit(
            max_length=pytorch.Batch(times), validation_period=pytorch.Batch(1), checkpoint_policy="none"
        )


def _stream(epochs: int) -> None:
    import torch
    from small import BATCH, training_data
    from torchdata.stateful_dataloader import StatefulDataLoader

    from dray.core import DistributedContext
    from dray.pytorch.streams import Stream

    torch.set_num_threads(1)
    bare, loader = (StatefulDataLoader(training_data(), BATCH, shuffle=True) for _ in range(2))
    data = Stream(loader, begin=0, seed=1, peers=DistributedContext(), device=torch.device("cpu"))
    data.agree()
    stream = iter(data)

    def epoch_s(batches: Any) -> float:
        began = time.process_time()
        for _ in itertools.islice(batches, len(bare)):
            pass
        return time.process_time() - began

    for epoch in range(epochs + 1):
        turn = (stream, bare) if epoch % 2 else (bare, stream)
        took = {id(batches): epoch_s(batches) for batches in turn}
        if epoch > 0:
            stamp("epoch", batches=len(bare), dray_s=took[id(stream)], by_hand_s=took[id(bare)])


def _both_ranks(directory: Path, epochs: int) -> None:
    ranks = []
    for rank in range(PROCESSES):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        sizes = {"WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES, "GROUP_WORLD_SIZE": 1}
        environment = {**os.environ, **{name: str(value) for name, value in (numbers | sizes).items()}}
        command = [sys.executable, __file__, "--child", "ddp-rank", str(directory), str(epochs)]
        ranks.append(subprocess.Popen(command, env=environment))
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.terminate()
    if any(codes):
        raise SystemExit(f"the ranks ended with codes {codes}")


def _rank(directory: Path, epochs: int) -> None:
    import torch.distributed as dist
    from small_trial import InTurns

    from dray import core, pytorch

    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=int(os.environ["RANK"]), world_size=PROCESSES
    )
    peers = core.DistributedContext.from_torch_distributed()
    with pytorch.init(hparams={}, distributed=peers, enable_tensorboard_logging=False) as context:
        trial = InTurns(context)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(_turns(trial.epoch, epochs)))
    dist.destroy_process_group()


def _start_dray() -> None:
    from small_trial import SmallTrial

    from dray import pytorch

    with pytorch.init() as context:
        pytorch.Trainer(SmallTrial(context), context).fit(max_length=pytorch.Epoch(2))
    _stamp_memory()


def _start_by_hand(directory: Path) -> None:
    import torch
    from small import ByHand

    torch.set_num_threads(1)
    by_hand = ByHand()
    next(iter(by_hand.training))
    stamp("first_batch", cpu_s=time.process_time())
    by_hand.train()
    by_hand.train()
    by_hand.validate()
    torch.save([by_hand.model.state_dict(), by_hand.optimizer.state_dict()], directory / "state.pth")
    _stamp_memory()


def _stamp_memory() -> None:
    stamp("memory", peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


# -------------------------------------------------------------------------------------------------------------- figures
def pairs(ran: Ran, kind: str) -> list[tuple[float, float]]:
    """(dray's, the hand-written loop's) seconds of CPU time in each turn, summed over processes."""
    turns: dict[int, list[tuple[float, float]]] = {}
    for s in of_kind(ran.stamps, kind):
        turns.setdefault(s.fields.get("rank", 0), []).append((s.fields["dray_s"], s.fields["by_hand_s"]))
    return [
        (sum(dray for dray, _ in turn), sum(by_hand for _, by_hand in turn))
        for turn in zip(*turns.values(), strict=True)
    ]


def interval(values: Sequence[tuple[float, float]], figure: Callable[[Sequence[tuple[float, float]]], float]) -> str:
    """The 95% bootstrap interval of a figure over the turns.

    >>> interval([(2.0, 1.0)] * 9, ratio)
    '2.000 - 2.000'
    """
    random = Random(0)
    found = [figure(random.choices(values, k=len(values))) for _ in range(1000)]
    return f"{quantile(found, 0.025):.3f} - {quantile(found, 0.975):.3f}"


def ratio(values: Sequence[tuple[float, float]]) -> float:
    """The ratio of dray's to the hand-written loop's: the median over turns."""
    return quantile([dray / by_hand for dray, by_hand in values], 0.5)


def more_us(ran: Ran) -> float:
    """Microseconds of CPU time by which dray's batch exceeds the hand-written one's: the median over turns."""
    batches = of_kind(ran.stamps, "epoch")[0].fields["batches"]
    return quantile([(dray - by_hand) / batches * 1e6 for dray, by_hand in pairs(ran, "epoch")], 0.5)


def by_hand_us(ran: Ran) -> float:
    batches = of_kind(ran.stamps, "epoch")[0].fields["batches"]
    return quantile([by_hand / batches * 1e6 for _, by_hand in pairs(ran, "epoch")], 0.5)


def report(paper: Paper, found: dict[str, list[Ran]]) -> None:
    """Print the tables."""
    rows = []
    for way, (name, target) in LOOPS.items():
        if runs := found.get(way):
            more = [more_us(ran) for ran in runs]
            rows.append(
                [
                    way,
                    name,
                    spread([by_hand_us(ran) for ran in runs], digits=0),
                    spread(more, digits=1),
                    f"<= {target:g}",
                    verdict(quantile(more, 0.5) <= target),
                ]
            )
    if rows:
        paper.say("\nMicroseconds of CPU time per batch; median (min - max) over the rounds\n")
        paper.table(["way", "what", "by hand", "overhead of dray", "target", ""], rows)

    rows = []
    for way, kind, name, target in (
        ("validation", "validation", "validation, CPU time", VALIDATION),
        ("stream", "epoch", "batches of a StatefulDataLoader, CPU time", STREAM),
        ("ddp", "epoch", "two processes, gloo DDP, CPU time of both", DDP),
    ):
        if runs := found.get(way):
            turns = [turn for ran in runs for turn in pairs(ran, kind)]
            by_round = spread([ratio(pairs(ran, kind)) for ran in runs], digits=3)
            reached = verdict(ratio(turns) <= target)
            rows.append([name, by_round, interval(turns, ratio), f"<= {target:g}", reached])
    if dray := found.get("start-dray"):
        both = list(zip(dray, found["start-by-hand"], strict=True))

        def cpu_s(ran: Ran) -> float:
            return float(of_kind(ran.stamps, "first_batch")[0].fields["cpu_s"])

        def wall_s(ran: Ran) -> float:
            return of_kind(ran.stamps, "first_batch")[0].time - ran.began

        for name, figure in (("CPU time", cpu_s), ("wall time", wall_s)):
            turns = [(figure(one), figure(other)) for one, other in both]
            values = spread([one / other for one, other in turns], digits=3)
            reached = verdict(ratio(turns) <= START)
            name = f"process start to first batch, {name}"
            rows.append([name, values, interval(turns, ratio), f"<= {START:g}", reached])
    if rows:
        paper.say("\nRatios to the loop by hand: median (min - max) over rounds; interval, verdict: all turns\n")
        paper.table(["what", "ratio", "interval", "target", ""], rows)
    if dray:
        paper.say(f"\nTo the first batch: {spread([wall_s(one) for one, _ in both], 's')}, by hand "
                  f"{spread([wall_s(other) for _, other in both], 's')}")  # fmt: skip

        def peak_mb(ran: Ran) -> float:
            return float(of_kind(ran.stamps, "memory")[0].fields["peak_mb"])

        more = [peak_mb(one) - peak_mb(other) for one, other in both]
        paper.say(
            f"Peak memory: {spread([peak_mb(other) for _, other in both], 'MB', 0)} by hand; overhead of dray: "
            f"{spread(more, 'MB', 1)}, target <= {MEMORY_MB:g} MB: {verdict(quantile(more, 0.5) <= MEMORY_MB)}"
        )


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all ways in turn, and print the results."""
    paper.say(machine())
    found: dict[str, list[Ran]] = {}
    for number in range(1, options.rounds + 1):
        for way in options.ways:
            for process in ("start-by-hand", "start-dray") if way == "start" else (way,):
                # It is short, and gives one figure per process, so there are more of them.
                for again in range(3 if way == "start" else 1):
                    where = directory / f"{number}-{process}-{again}"
                    ran = run(__file__, ["--child", process, str(where), str(options.epochs)], where)
                    found.setdefault(process, []).append(ran)
            print(f"round {number}, {way}: {_summary(way, found)}", flush=True)
    report(paper, found)


def _summary(way: str, found: dict[str, list[Ran]]) -> str:
    if way in LOOPS:
        return f"{more_us(found[way][-1]):.1f} us more"
    if way == "start":
        return "done"
    return f"{ratio(pairs(found[way][-1], 'validation' if way == 'validation' else 'epoch')):.3f}x"


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        way, directory, epochs = sys.argv[2:]
        return child(way, Path(directory), int(epochs))
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is run (default 5)")
    parser.add_argument("--epochs", type=int, default=20, help="turns in each process (default 20)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which ways (default: all)")
    parser.add_argument("--quick", action="store_true", help="one round of 5 turns")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.epochs = 1, 5
    perform(measure, options, name="loop", title="The training loop: dray, and a loop written by hand")


if __name__ == "__main__":
    main()
