"""``dray probe``."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Changes, Config, Json, ModelDir


def probe(
    config: Config,
    model_dir: ModelDir = None,
    changes: Changes = None,
    batches: Annotated[int, typer.Option(help="Number of batches over which each size is timed.", min=1)] = 20,
    json: Json = False,
) -> None:
    """Find the largest batch size that fits, and the fastest, by training a few batches of each size on this machine.

    Each size is trained in new processes, one per slot. The suggestion keeps the number of records per optimizer step.

    \b
    dray probe asha.yaml
    dray probe asha.yaml . --config hyperparameters.hidden=256
    """
    from dray.config.load import load_config

    checked = load_config(config, changes or ())
    from dray.experiment.probe import probe as probe_experiment

    logging.getLogger().setLevel(logging.INFO)
    found = probe_experiment(checked, model_dir=model_dir or config.parent, batches=batches)
    if json:
        show.as_json(asdict(found))
        return
    rows = []
    for each in found.sizes:
        rate = "out of memory" if each.records_per_second is None else f"{each.records_per_second:,.1f}"
        rows.append([each.per_slot, each.global_batch_size, each.aggregation_frequency, rate])
    show.table(["per slot", "global_batch_size", "aggregation_frequency", "records/s"], rows)
    largest, best = found.largest, found.suggestion
    all_data = ", a whole epoch in one batch" if largest.has_all_data else ""
    typer.echo(f"largest that fits: {largest.per_slot} per slot{all_data}")
    typer.echo(
        f"fastest with as many records per optimizer step as in {config}:\n"
        f"--config hyperparameters.global_batch_size={best.global_batch_size} "
        f"--config optimizations.aggregation_frequency={best.aggregation_frequency}"
    )
