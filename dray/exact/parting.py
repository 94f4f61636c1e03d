"""Finds the first batch at which two deterministic trials part, by running both again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dray.errors import ExperimentError
from dray.experiment.isolation_check import reject_sandbox
from dray.records.checkpoints import download
from dray.records.difference import Side

if TYPE_CHECKING:
    from dray.exact.replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The comparison of two runs, batch by batch and bit by bit.

    Attributes:
        begin: the batch at which both began; above 0 from a checkpoint.
        batches: batches compared, including the one at which they part.
        at: the first batch (counted from 0) in which something differs; None if all are the same.
        stages: what differs in that batch, first what is computed first: the names of what differs in each stage.
        differences: the largest absolute difference of the tensors of the first stage, by name.
        texts: values of the first stage that are no tensors, by name: a's and b's.
    """

    begin: int
    batches: int
    at: int | None = None
    stages: Mapping[str, Sequence[str]]
    differences: Mapping[str, float]
    texts: Mapping[str, tuple[str, str]]


def find_parting(
    a: Side, b: Side, batches: int | None = None, *, perform: Callable[[Replay], None] | None = None
) -> Parting:
    """Run both trials again, from their common checkpoint if they have one, and compare at most `batches` batches.

    Args:
        perform: runs a trial; by default in a process of its own.

    Raises:
        ExperimentError: one of them has not trained, or fails.
        ConfigError: trials of one of them run in sandboxes.
    """
    for side in (a, b):
        if side.trial is None or not side.trial.batches:
            raise ExperimentError(f"no trial of {side.directory.path.name} has trained; give one: EXPERIMENT/TRIAL")
        reject_sandbox(side.reader.config, "--exact")
    starts = [_start(side, other) for side, other in ((a, b), (b, a))]
    begin, *others = {0 if start is None else start[1] for start in starts}
    if others:
        raise ExperimentError(
            "they begin at different batches, from checkpoints of other trials; compare a fork with its source, or two "
            "forks of one checkpoint"
        )
    end = min(side.trial.batches for side in (a, b) if side.trial is not None)
    if batches is not None:
        end = min(end, begin + batches)
    with tempfile.TemporaryDirectory(prefix="dray-exact-") as scratch:

        def run(name: str, keep: int | None = None) -> list[Replay]:
            sides = zip((a, b), starts, "ab", strict=True)
            replays = [_replay(side, Path(scratch, letter + name), start, end, keep) for side, start, letter in sides]
            for each in replays:
                (perform or _run_in_process)(each)
            return replays

        first, second = (_read(each) for each in run("-first"))
        for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
            stages = {
                stage: names
                for stage in one["digests"]
                if (names := _differing(one["digests"][stage], other["digests"][stage]))
            }
            if stages:
                # The first runs don't know of which batch the values are wanted.
                values = [_values(each) for each in run("-again", keep=one["batch"])]
                stage = next(iter(stages))
                return Parting(
                    begin=begin,
                    batches=number,
                    at=one["batch"],
                    stages=stages,
                    differences=_largest(values[0][stage], values[1][stage], stages[stage]),
                    texts=_texts(one["digests"][stage], other["digests"][stage], stages[stage]),
                )
        return Parting(begin=begin, batches=min(len(first), len(second)), stages={}, differences={}, texts={})


def _start(side: Side, other: Side) -> tuple[int, int] | None:
    """The trial and the batch of the checkpoint that a trial is run from; None: from its start."""
    assert side.trial is not None
    assert other.trial is not None
    if side.directory.path == other.directory.path and other.trial.source_trial == side.trial.id:
        return side.trial.id, other.trial.source_batches or 0
    if side.trial.source_trial is not None:
        return side.trial.source_trial, side.trial.source_batches or 0
    return None


def _replay(side: Side, run: Path, start: tuple[int, int] | None, end: int, keep: int | None) -> Replay:
    from dray.exact.replay import Replay

    trial, is_changed = side.trial, False
    assert trial is not None
    run.mkdir()
    if start is not None:
        source, at = start
        try:
            download(side.directory.storage.child(f"trial_{source}", f"checkpoint_{at}"), run / f"checkpoint_{at}")
        except FileNotFoundError:
            raise ExperimentError(
                f"the checkpoint of trial {source} at batch {at} does not exist any more; both begin there"
            ) from None
        is_changed = source != trial.id and side.reader.trials[source].drawn != trial.drawn
    return Replay(
        experiment=str(side.directory.path),
        trial=trial.id,
        code=str(side.code),
        run=str(run),
        digests=f"{run}.jsonl",
        values=f"{run}.pth",
        batches=end,
        is_changed=is_changed,
        keep=keep,
    )


def _run_in_process(replay: Replay) -> None:
    """Run a trial in a process of its own."""
    file = Path(f"{replay.run}.json")
    file.write_text(json.dumps(asdict(replay)))
    command = [sys.executable, "-m", "dray.exact.replay", str(file)]
    quiet = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # nothing is written to the experiment's copy of the code
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=quiet)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise ExperimentError(f"trial {replay.trial} of {replay.experiment} can't be run again: {lines[-1]}")


def _read(replay: Replay) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(replay.digests).read_text().splitlines()]


def _values(replay: Replay) -> Mapping[str, Mapping[str, Any]]:
    import torch

    found: Mapping[str, Mapping[str, Any]] = torch.load(replay.values, weights_only=True)
    return found


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _largest(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    found = {}
    for name in names:
        if name in one and name in other and one[name].shape == other[name].shape and one[name].numel():
            found[name] = (one[name].double() - other[name].double()).abs().max().item()
    return found


def _texts(one: Mapping[str, str], other: Mapping[str, str], names: Sequence[str]) -> dict[str, tuple[str, str]]:
    pairs = {name: (one.get(name, "-"), other.get(name, "-")) for name in names}
    return {name: pair for name, pair in pairs.items() if not any(text.startswith("#") for text in pair)}
