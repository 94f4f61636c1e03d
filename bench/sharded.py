"""The costs and savings of a sharded model, against PyTorch's own functions used by hand; 2 and 4 processes on gloo.

batch    a FullyShard trial, and the same loop written by hand with `fully_shard` (FSDP2), which alternate every 100
         batches in the same two processes: CPU time of both, and wall time
save     the stall of a checkpoint, which two ranks write in the background, and of torch.distributed.checkpoint's
         `save`; each in processes of its own, in turn, ``--rounds`` times. A stall is the gap to the batch before, less
         the median gap between batches without a checkpoint
memory   a rank's parameters, gradients and Adam's moments, in bytes, with FullyShard and with DDP; and the peak of the
         process's memory over its level after another, small model. The C library is set to return freed memory, which
         it does not by default: on a CPU, much of FSDP2's memory would stay with the process, also by hand
export   memory of `dray checkpoint export`, for a sharded and for a plain checkpoint

  python bench/sharded.py [--ways batch save memory export] [--rounds 1] [--turns 20] [--quick] [--save]
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
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
    run,
    spread,
    stamp,
    verdict,
)

sys.path.insert(0, str(BENCH / "model"))

WAYS = ("batch", "save", "memory", "export")
BATCH, STALL = 1.03, 0.25
MEMORY = {2: 0.55, 4: 0.30}
EXPORT_TENSORS, EXPORT_MB = 1.2, 200.0

SMALL = {"width": 64, "count": 4}
"""A batch of some milliseconds."""
SAVED = {"width": 1024, "count": 40}
"""42 million parameters: with Adam's moments 500 MB."""
COUNTED = {"width": 1024, "count": 24}
EXPORTED = {"width": 2816, "count": 14}
"""Tensors of 32 MB, 445 MB in all."""
SAVES, PERIOD = 5, 6


# --------------------------------------------------------------------------------------------------- in its own process
def child(way: str, directory: Path, *given: str) -> None:
    """Run one of the parts, in its process, or start its ranks."""
    end_on_sigterm()
    os.environ["DRAY_HOME"] = str(directory / "home")
    match way:
        case "ranks":
            _ranks(int(given[0]), directory, given[1:])
        case "batch":
            _train("InTurns", SMALL, _join(directory), sharded=True, batches=100 * (int(given[0]) + 1) + 1)
        case "save-dray":
            _saves_of_dray(directory)
        case "save-dcp":
            _saves_of_dcp(directory)
        case "memory":
            _memory(directory, sharded=given[0] == "sharded")
        case "checkpoint":
            _train("OfBlocks", EXPORTED, _join(directory), sharded=given[0] == "sharded", batches=1)
        case "export":
            _export(directory, *given)
    if way != "ranks" and "RANK" in os.environ:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


def _ranks(size: int, directory: Path, command: Sequence[str]) -> None:
    """Start this many processes of a part, as torchrun would."""
    ranks = []
    for rank in range(size):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
        sizes = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_WORLD_SIZE": 1}
        environment = {**os.environ, **{name: str(value) for name, value in (numbers | sizes).items()}}
        way, *given = command
        if way == "memory":
            environment["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
        arguments = [sys.executable, __file__, "--child", way, str(directory), *given]
        ranks.append(subprocess.Popen(arguments, env=environment))
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.terminate()
    if any(codes):
        raise SystemExit(f"the ranks ended with codes {codes}")


def _join(directory: Path) -> Any:
    import torch
    import torch.distributed as dist

    from dray import core

    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=size)
    return core.DistributedContext.from_torch_distributed()


def _train(trial: str, model: dict[str, int], peers: Any, *, sharded: bool, batches: int, **fit: Any) -> None:
    """Train one of the trials of blocks.py."""
    import blocks

    from dray import pytorch

    hparams = {**model, "sharded": sharded}
    with pytorch.init(hparams=hparams, distributed=peers, enable_tensorboard_logging=False) as context:
        trial_class: Any = getattr(blocks, trial)
        pytorch.Trainer(trial_class(context), context).fit(max_length=pytorch.Batch(batches), **fit)
        [*_, last] = sorted(context.get_tensorboard_path().parent.glob("checkpoint_*")) or [None]
        stamp("end", checkpoint=str(last))


def _peak_mb() -> float:
    """Peak memory of this process since the peak was reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def _memory(directory: Path, *, sharded: bool) -> None:
    peers = _join(directory)
    _train("OfBlocks", SMALL, peers, sharded=sharded, batches=2)  # imports what it needs
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _peak_mb()
    _train("Counted", COUNTED, peers, sharded=sharded, batches=3)
    stamp("peak", more_mb=_peak_mb() - before)


def _saves_of_dray(directory: Path) -> None:
    from dray import pytorch

    every = pytorch.Batch(PERIOD)
    _train(
        "Stamped",
        SAVED,
        _join(directory),
        sharded=True,
        batches=SAVES * PERIOD,
        checkpoint_period=every,
        checkpoint_policy="none",
    )


def _saves_of_dcp(directory: Path) -> None:
    rank = _join(directory).rank
    import torch
    import torch.distributed.checkpoint as dcp
    from blocks import blocks, points, shard_by_hand
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = shard_by_hand(blocks(**SAVED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = points(SAVED["width"])[:16]
    for number in range(1, SAVES * PERIOD + 1):
        stamp("begin", rank=rank)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        stamp("trained", rank=rank)
        if number % PERIOD == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory / f"checkpoint_{number}")


def _export(directory: Path, checkpoint: str, form: Any) -> None:
    from dray.records.checkpoints import export
    from dray.storage import Location

    importlib.import_module("dray.training.checkpoint.export")  # no part of the figure
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    export(Location.of(checkpoint), directory / "exported", form)
    stamp("exported", more_mb=(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


# -------------------------------------------------------------------------------------------------------------- figures
def turns(ran: Ran, clock: str) -> list[tuple[float, float, int]]:
    """(dray's, the hand-written loop's) seconds, and the batches, of each turn; of CPU time the sum over the ranks."""
    rows: dict[int, list[dict[str, Any]]] = {}
    for s in of_kind(ran.stamps, "turn"):
        rows.setdefault(s.fields["rank"], []).append(dict(s.fields))
    both = zip(*rows.values(), strict=True)
    add = sum if clock == "cpu_s" else max
    return [
        (add(r[f"dray_{clock}"] for r in turn), add(r[f"by_hand_{clock}"] for r in turn), turn[0]["batches"])
        for turn in both
    ]


def stalls(ran: Ran) -> list[float]:
    """The stalls of all checkpoints but the last, in seconds, on the first rank."""
    begin, trained = (
        [s.time for s in of_kind(ran.stamps, kind) if s.fields["rank"] == 0] for kind in ("begin", "trained")
    )
    gaps = [after - before for before, after in zip(trained, begin[1:], strict=False)]
    usual = quantile([gap for number, gap in enumerate(gaps, 1) if number % PERIOD], 0.5)
    return [gaps[number * PERIOD - 1] - usual for number in range(1, SAVES)]


def report_batch(paper: Paper, runs: Sequence[Ran]) -> None:
    """The microseconds of a batch."""
    paper.say(f"\nA batch of a FullyShard trial and of the same loop by hand, 2 ranks, {len(runs)} rounds\n")
    rows, reached = [], ""
    for name, clock in (("CPU time of both ranks", "cpu_s"), ("wall time", "wall_s")):
        found = [turn for ran in runs for turn in turns(ran, clock)]
        by_round = [quantile([dray / by_hand for dray, by_hand, _ in turns(ran, clock)], 0.5) for ran in runs]
        ratio = quantile([dray / by_hand for dray, by_hand, _ in found], 0.5)
        us = [[turn[who] / turn[2] * 1e6 for turn in found] for who in (0, 1)]
        more = quantile([(dray - by_hand) / batches * 1e6 for dray, by_hand, batches in found], 0.5)
        rows.append([name, spread(us[1], digits=0), f"{more:.0f}", spread(by_round, digits=3), f"{ratio:.3f}"])
        if clock == "cpu_s":
            reached = f"{ratio - 1:+.1%} (target <= {BATCH - 1:+.0%}): {verdict(ratio <= BATCH)}"
    paper.table(["", "us by hand", "overhead of dray", "ratio by round", "all turns"], rows)
    paper.say(f"\nA batch, CPU time: {reached}.")


def report_save(paper: Paper, found: dict[str, list[Ran]]) -> None:
    """The stalls."""
    dcp, dray = ([stalls(ran) for ran in found[way]] for way in ("save-dcp", "save-dray"))
    params = SAVED["count"] * SAVED["width"] ** 2
    paper.say(f"\nCheckpoints of {params / 1e6:.1f} million weights and Adam's moments, {params * 12 / 2**20:.0f} MiB, "
              f"of 2 ranks; {len(dray)} rounds of {SAVES}\n")  # fmt: skip
    later = {"dcp.save": dcp, "dray": dray}
    paper.table(
        ["way", "stall", "the first"],
        [
            [name, spread([s for run in runs for s in run[1:]], "s", 3), spread([run[0] for run in runs], "s", 3)]
            for name, runs in later.items()
        ],
    )

    def share(which: slice) -> float:
        """dray's stalls divided by dcp.save's: the median over rounds."""
        rounds = [
            (quantile(run[which], 0.5), quantile(other[which], 0.5)) for run, other in zip(dray, dcp, strict=True)
        ]
        return quantile([mine / theirs for mine, theirs in rounds], 0.5)

    usual = share(slice(1, None))
    paper.say(f"\nStall: {usual:.0%} of dcp.save's (target <= {STALL:.0%}): {verdict(usual <= STALL)}; "
              f"{share(slice(0, 1)):.0%} for the first, which allocates the buffers.")  # fmt: skip


def report_memory(paper: Paper, found: dict[str, Ran]) -> None:
    """The sizes."""
    rows = []
    for size, target in MEMORY.items():
        nbytes, peaks = [], []
        for kind in ("plain", "sharded"):
            ran = found[f"memory-{kind}-{size}"]
            nbytes.append(max(s.fields["nbytes"] for s in of_kind(ran.stamps, "counted")))
            peaks.append(max(s.fields["more_mb"] for s in of_kind(ran.stamps, "peak")))
        share, peak = nbytes[1] / nbytes[0], peaks[1] / peaks[0]
        rows.append(
            [
                str(size),
                f"{nbytes[0] / 2**20:.0f} MB",
                f"{nbytes[1] / 2**20:.0f} MB",
                f"{share:.3f}",
                f"<= {target}",
                verdict(max(share, peak) <= target),
                f"{peaks[0]:.0f} MB",
                f"{peaks[1]:.0f} MB",
                f"{peak:.3f}",
            ]
        )
    paper.say(
        "\nParameters, gradients and Adam's moments on a rank; the peak of its memory over its level before the model\n"
    )
    paper.table(["ranks", "DDP", "FullyShard", "share", "target", "", "peak, DDP", "peak, FullyShard", "share"], rows)


def report_export(paper: Paper, found: dict[str, Ran]) -> None:
    """The peaks."""
    largest = EXPORTED["width"] ** 2 * 4 / 2**20
    goal = EXPORT_TENSORS * largest + EXPORT_MB
    whole = largest * EXPORTED["count"]
    paper.say(f"\nMemory that `dray checkpoint export` takes for a model of {whole:.0f} MB, whose largest tensor has "
              f"{largest:.0f} MB\n")  # fmt: skip
    rows = []
    for way, ran in found.items():
        more = of_kind(ran.stamps, "exported")[0].fields["more_mb"]
        _, kind, form = way.split(":")
        rows.append([kind, form, f"{more:.0f} MB", f"<= {goal:.0f} MB", verdict(more <= goal)])
    paper.table(["checkpoint", "format", "memory", "target", ""], rows)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all ways in turn, and print the results."""
    paper.say(machine())
    found: dict[str, list[Ran]] = {}

    def go(name: str, *command: str, size: int = 0, keep: bool = False) -> Ran:
        where = directory / name.replace(":", "-") / str(len(found.get(name, ())))
        way, *given = command
        started = ["ranks", str(where), str(size), way, *given] if size else [way, str(where), *given]
        ran = run(__file__, ["--child", *started], where)
        found.setdefault(name, []).append(ran)
        if not keep:
            shutil.rmtree(where)
        print(f"{name}: {ran.wall_s:.0f} s", flush=True)
        return ran

    # Turns and rounds of the variants alternate, so that other load on the machine hits all of them.
    for _ in range(options.rounds):
        if "batch" in options.ways:
            go("batch", "batch", str(options.turns), size=2)
        if "save" in options.ways:
            for way in ("save-dcp", "save-dray"):
                go(way, way, size=2)
    if "memory" in options.ways:
        for size in MEMORY:
            for kind in ("plain", "sharded"):
                go(f"memory-{kind}-{size}", "memory", kind, size=size)
    if "export" in options.ways:
        for kind, size in (("sharded", 2), ("plain", 0)):
            made = go(f"checkpoint-{kind}", "checkpoint", kind, size=size, keep=True)
            [checkpoint] = {
                s.fields["checkpoint"] for s in of_kind(made.stamps, "end") if s.fields["checkpoint"] != "None"
            }
            for form in ("state-dict", "safetensors"):
                go(f"export:{kind}:{form}", "export", checkpoint, form)
    if "batch" in found:
        report_batch(paper, found["batch"])
    if "save-dray" in found:
        report_save(paper, found)
    once = {name: runs[0] for name, runs in found.items()}
    if "memory" in options.ways:
        report_memory(paper, once)
    if "export" in options.ways:
        report_export(paper, {name: ran for name, ran in once.items() if name.startswith("export:")})


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        way, directory, *given = sys.argv[2:]
        return child(way, Path(directory), *given)
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of batch and save (default 1)")
    parser.add_argument("--turns", type=int, default=20, help="of 100 batches, per round of batch (default 20)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which ways (default: all)")
    parser.add_argument("--quick", action="store_true", help="one round of 5 turns")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.turns = 1, 5
    perform(measure, options, name="sharded", title="Sharded models: batches, saves, memory, export")


if __name__ == "__main__":
    main()
