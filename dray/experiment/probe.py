"""Measures batch sizes of a trial on this machine: each size in new processes, one per slot, which train some batches.

A process that runs out of memory leaves nothing behind that could affect the next size. The search for the size that
fits and trains fastest doubles the per-slot batch size from the config's until memory runs out or a batch is a whole
epoch, or halves it until one fits; bisection then finds the largest that fits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from dray.code.load import check_entrypoint
from dray.code.startup_hook import run_startup_hook
from dray.config.custom import Custom
from dray.config.entrypoint import ClassName, as_written
from dray.config.load import load_config
from dray.config.resources import SlotRange
from dray.config.schema import ExperimentConfig
from dray.config.search import build_search
from dray.environment import device, visible_gpus
from dray.errors import ConfigError, EntrypointError, ExperimentError
from dray.experiment import probe_rank
from dray.experiment.interrupts import Interrupts
from dray.experiment.isolation_check import reject_sandbox
from dray.leases.failure import LOG_TAIL
from dray.records.secrets import check_secrets
from dray.training.parallel.mesh_shape import mesh_shape

log = logging.getLogger(__name__)

POLL_S = 0.05
CAUSE_S = 10.0  # how long a rank whose collective failed waits for the rank that has caused it
SHOWN_LINES = 20


def probe(
    config: str | os.PathLike[str] | Mapping[str, Any] | ExperimentConfig,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    batches: int = 20,
) -> BatchSizes:
    """Find the largest per-slot batch size that trains on this machine, and measure the throughput of each size.

    Each size is trained in new processes, one per slot, for some batches, without validation or checkpoints. Sizes
    double from the config's until memory runs out or a batch is a whole epoch; bisection then finds the largest that
    fits. The hyperparameters are those of the experiment's trial 0.

    Args:
        config: an experiment config, as for `dray.Experiment`; its `entrypoint` must be a trial class.
        model_dir: the directory of the model's code; by default the config file's directory.
        batches: the number of batches over which the throughput of a size is measured, after a few others.

    Returns:
        The measured sizes, the largest that fits, and a suggestion: the fastest size that keeps the number of records
        per optimizer step, `global_batch_size * aggregation_frequency`.

    Raises:
        ConfigError: with every fault of the config; or it needs more GPUs than this machine has.
        ExperimentError: training failed otherwise than by lack of memory, or even one record per slot does not fit.
        ValueError: batches is below 1.
    """
    if batches < 1:
        raise ValueError(f"batches must be >= 1, got {batches}")
    checked = load_config(config)
    check_secrets(checked)
    reject_sandbox(checked, "the measuring of batch sizes")
    code = Path(model_dir or (Path(config).parent if isinstance(config, (str, os.PathLike)) else "."))
    entrypoint = checked.entrypoint
    check_entrypoint(entrypoint, code)
    if not isinstance(entrypoint, ClassName):
        what = f"must be a trial class, such as model_def:DigitsTrial, got the program {as_written(entrypoint)}"
        raise EntrypointError([("entrypoint", f"{what}, which sets its own aggregation_frequency")])
    search = build_search(checked, lambda record: None, custom=Custom(directory=code))
    search.start()
    hparams = dict(search.params(0))
    batch_size = hparams.get("global_batch_size")
    if not isinstance(batch_size, int):
        raise ConfigError([("hyperparameters.global_batch_size", "missing required field; for example 64")])
    gpu = checked.resources.slot != "cpu" and torch.cuda.is_available()
    slots = _slots(checked, gpu=gpu)
    replicas = mesh_shape(checked.resources.mesh, slots).replicas
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the result
        run_startup_hook(code)
    environment: dict[str, str | None] = {
        "OMP_NUM_THREADS": str(checked.resources.cpus_per_slot),  # as Ray sets it
        **os.environ,
        **checked.environment.variables(device(gpu=gpu)),
        **({} if gpu else visible_gpus([])),
    }
    job = {
        "entrypoint": [entrypoint.module, entrypoint.name],
        "model_dir": str(code.resolve()),
        "config": {**checked.for_code(), "data": checked.data},
        "trial_seed": search.seed_of(0),
        "trials_per_slot": checked.resources.trials_per_slot,
    }
    first = batch_size // replicas
    step = first * checked.optimizations.aggregation_frequency

    def measure(size: int) -> BatchSize:
        frequency = max(1, step // size)
        # Gradients that are kept between batches take memory, and so does the optimizer after its first step.
        aggregated = min(frequency, batches)
        warm_up = aggregated + 2
        sized = {
            "hparams": {**hparams, "global_batch_size": size * replicas},
            "aggregation_frequency": aggregated,
            "reports": [warm_up, warm_up + -(-batches // aggregated) * aggregated],
        }
        outcome = train_group(job | sized, slots, environment)
        what = f"global_batch_size {size * replicas}, {size} per slot"
        if outcome["kind"] not in ("trained", "oom") or (outcome["kind"] == "oom" and size == 1):
            raise ExperimentError(f"the probe of {what} failed:\n{outcome['error']}")
        rate = outcome.get("records_per_second")
        log.info("%s: %s", what, "out of memory" if rate is None else f"{rate:,.1f} records/s")
        return BatchSize(
            per_slot=size,
            global_batch_size=size * replicas,
            aggregation_frequency=frequency,
            records_per_second=rate,
            has_all_data=outcome.get("has_all_data", False),
        )

    with Interrupts():  # SIGTERM too ends the processes of the size that is measured
        return search_batch_size(first, step, measure)


def _slots(config: ExperimentConfig, *, gpu: bool) -> int:
    """The number of slots of a trial, which must be on this machine."""
    asked = config.resources.slots_per_trial
    slots = asked.max if isinstance(asked, SlotRange) else max(1, int(asked))
    if config.resources.slot == "gpu" and not gpu:
        raise ConfigError([("resources.slot", "gpu, but torch sees none here; run dray probe on a machine with GPUs")])
    if gpu and slots > torch.cuda.device_count():
        what = f"{slots}, but this machine has {torch.cuda.device_count()} GPU(s), and dray probe uses no other machine"
        raise ConfigError([("resources.slots_per_trial", f"{what}; give --config resources.slots_per_trial=N")])
    return slots


def train_group(job: Mapping[str, Any], slots: int, environment: Mapping[str, str | None]) -> dict[str, Any]:
    """Train in new processes, one per slot, and return the outcome: see `probe_rank.write_outcome`."""
    with tempfile.TemporaryDirectory(prefix="dray-probe-") as name:
        directory = Path(name)
        (directory / probe_rank.JOB).write_text(yaml.safe_dump(dict(job)))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(slots):
                ranks.append(_start(directory, rank, slots, environment))
            return decisive_outcome(ranks, directory)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with the workers of its DataLoaders
                process.wait()


def _start(directory: Path, rank: int, slots: int, environment: Mapping[str, str | None]) -> subprocess.Popen[bytes]:
    launched = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    launched |= {"WORLD_SIZE": slots, "LOCAL_WORLD_SIZE": slots, "GROUP_WORLD_SIZE": 1}
    variables = {**environment, **{name: str(value) for name, value in launched.items()}}
    with _log(directory, rank).open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", probe_rank.__name__, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in variables.items() if value is not None},
            cwd=directory,  # so that no module of the model's hides one of Python's while this one is imported
            start_new_session=True,
        )


def decisive_outcome(ranks: Sequence[subprocess.Popen[bytes]], directory: Path) -> dict[str, Any]:
    """Wait for the outcome that decides: training on all ranks, or the failure that has caused the others."""
    failed_at: float | None = None
    while True:
        ended = [process.poll() for process in ranks]
        outcomes = [each for rank, code in enumerate(ended) if (each := _outcome(directory, rank, code)) is not None]
        for kind in ("trained", "oom"):
            if decisive := [each for each in outcomes if each["kind"] == kind]:
                return decisive[0]
        if decisive := [each for each in outcomes if each["kind"] != "collective"]:
            return decisive[0]
        if outcomes:
            failed_at = failed_at or time.monotonic()
            if len(outcomes) == len(ranks) or time.monotonic() - failed_at > CAUSE_S:
                return outcomes[0]
        time.sleep(POLL_S)


def _outcome(directory: Path, rank: int, code: int | None) -> dict[str, Any] | None:
    """The outcome of a rank; None while it trains."""
    with contextlib.suppress(FileNotFoundError):
        outcome: dict[str, Any] = json.loads(probe_rank.outcome_file(directory, rank).read_text())
        return outcome
    if code is None:
        return None
    lines = _log(directory, rank).read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    error = "\n".join([f"rank {rank} exited with code {code}", "", f"{LOG_TAIL}:", *lines])
    # The kernel sends this signal when memory runs out.
    return {"kind": "oom" if code == -signal.SIGKILL else "died", "error": error}


def _log(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """A measured batch size.

    Args:
        per_slot: records per batch on each slot; with tensor parallelism, of each group of slots that share a batch.
        global_batch_size: records per batch over all slots.
        aggregation_frequency: batches per optimizer step, as many as have at most the config's records per step.
        records_per_second: over all slots, including the wait for data; None if memory ran out.
        has_all_data: whether a batch has all records of an epoch, so that larger batches would be the same.
    """

    per_slot: int
    global_batch_size: int
    aggregation_frequency: int
    records_per_second: float | None
    has_all_data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The result of `dray.probe()`.

    Args:
        sizes: the measured sizes, ascending.
        largest: the largest size that fits, to within an eighth.
        suggestion: the fastest size that keeps the number of records per optimizer step exactly.
    """

    sizes: tuple[BatchSize, ...]
    largest: BatchSize
    suggestion: BatchSize


def search_batch_size(first: int, step: int, measure: Callable[[int], BatchSize]) -> BatchSizes:
    """Measure batch sizes, and suggest one.

    Args:
        first: the config's per-slot batch size.
        step: the config's records per optimizer step and slot, a multiple of `first`.
        measure: measures a per-slot batch size; it must raise an exception if not even 1 fits.

    >>> def measure(size: int) -> BatchSize:  # memory for 100 records per slot, and one second per batch
    ...     rate = float(size) if size <= 100 else None
    ...     return BatchSize(
    ...         per_slot=size, global_batch_size=size, aggregation_frequency=256 // size, records_per_second=rate
    ...     )
    >>> found = search_batch_size(32, 256, measure)
    >>> [each.per_slot for each in found.sizes], found.largest.per_slot, found.suggestion.per_slot
    ([32, 64, 96, 104, 112, 128], 96, 64)
    """
    measured: dict[int, BatchSize] = {}

    def fits(size: int) -> bool:
        measured[size] = measure(size)
        return measured[size].records_per_second is not None

    low, high = 0, 0  # the largest size that fits, and the smallest that does not; 0: none yet
    size = first
    while not (low and high):
        if fits(size):
            low, size = size, 2 * size
            if measured[low].has_all_data:
                break
        else:
            high, size = size, size // 2
    # Multiples of a power of two suit the hardware. In steps of about a tenth, three or four more sizes are enough.
    unit = 1 << max(0, low.bit_length() - 4)
    while low // unit < (last := (high - 1) // unit):
        size = (low // unit + last + 1) // 2 * unit
        if fits(size):
            low = size
        else:
            high = size
    divisors = [size for size in range(1, min(low, step) + 1) if step % size == 0]
    if divisors[-1] not in measured:
        fits(divisors[-1])
    rates = {size: each.records_per_second or 0.0 for size, each in measured.items() if size in divisors}
    return BatchSizes(
        sizes=tuple(measured[size] for size in sorted(measured)),
        largest=measured[low],
        suggestion=measured[max(rates, key=lambda size: rates[size])],
    )
