"""An agent that proposes three trials of ten of a search of examples/gpt, against the search alone.

    python bench/agent_beliefs.py [--seeds 10] [--save] [--keep DIRECTORY]

The searches are `auto` with 20 trials, two at a time, over learning rate, warm-up, dropout and width. The agent has no
model of its own: after 7 trials and after 17 it reads `get_beliefs` through ``dray mcp``, and adds three trials: the
point that should be best, the most uncertain of those that may be, and the best one with what a rule of thumb says of
short trainings, no dropout and a tenth of the steps for warm-up. The search draws the other 14. Seeds are paired.

Source of the shares: Centaur (arXiv 2603.24647).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from _agent import Agent, agent, serving
from _measure import Paper, arguments, machine, perform
from laboratory_patches import GPT

TRIALS, TEN, BY_AGENT = 20, 10, 3
BATCHES = 96
SPACE = {
    "global_batch_size": 16,
    "aggregation_frequency": 1,
    "block": 32,
    "layers": 1,
    "heads": 2,
    "width": {"type": "categorical", "vals": [16, 32, 48]},
    "dropout": {"type": "double", "minval": 0.0, "maxval": 0.5},
    "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -0.5},
    "warm_up_steps": {"type": "int", "minval": 0, "maxval": 64},
}
THUMB = {"dropout": 0.0, "warm_up_steps": BATCHES // 10}
SHOWN = (5, 10, 20)  # after how many trials the best loss is shown


async def search(ask: Agent, seed: int, *, alone: bool) -> list[float]:
    """The losses of the trials in the order in which they were created; inf if one failed."""

    async def answer(tool: str, **given: Any) -> dict[str, Any]:
        done = await ask(tool, **given)
        if done.is_error:
            raise SystemExit(f"{tool}: {done.text}")
        found: dict[str, Any] = json.loads(done.text)
        return found

    by_agent = 0 if alone else TRIALS * BY_AGENT // TEN
    config = {
        "name": "alone" if alone else "with-agent",
        "entrypoint": "model_def:GPTTrial",
        "hyperparameters": SPACE,
        "searcher": {
            "name": "auto",
            "metric": "validation_loss",
            "max_length": {"batches": BATCHES},
            "max_trials": TRIALS - by_agent,
            "max_concurrent_trials": 2,
        },
        "checkpoint_policy": "none",
        "budget": {"slot_hours": 1},
        "reproducibility": {"experiment_seed": seed},
    }
    one = (await answer("submit", config=yaml.safe_dump(config), directory=str(GPT)))["experiment"]
    proposed, seen = 0, await answer("wait", experiment=one, seconds=0)
    while not (seen["ended"] and proposed == by_agent):
        ended = int(seen["trials"].split()[0])
        if proposed < by_agent and ended >= TEN * (proposed // BY_AGENT) + TEN - BY_AGENT:
            beliefs = await answer("get_beliefs", experiment=one)
            points = [each["hparams"] for each in (beliefs["best"] + beliefs["uncertain"])]
            chosen = [points[0], (beliefs["uncertain"] or beliefs["best"])[0]["hparams"], points[0] | THUMB]
            for point in chosen:
                values = {name: point[name] for name in SPACE if isinstance(SPACE[name], dict)}
                await answer("add_trial", experiment=one, hparams=values)
            proposed += len(chosen)
        seen = await answer("wait", experiment=one, until="event", after=seen["after"])
    await answer("wait", experiment=one)
    rows = (await answer("get_results", experiment=one, top=100, search="batches >= 0"))["results"]
    losses = {row["trial"]: row.get("best_metric", float("inf")) for row in rows}
    assert len(losses) == TRIALS, losses
    return [losses[trial] for trial in sorted(losses)]


def interval(values: Sequence[float]) -> str:
    """The mean with its 95% bootstrap interval."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return f"{np.mean(values):+.4f} ({low:+.4f} .. {high:+.4f})"


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    paper.say(f"{machine()}\n\n{(__doc__ or '').partition('[--keep DIRECTORY]')[2].strip()}\n")
    began, found = time.monotonic(), dict[bool, list[list[float]]]({True: [], False: []})

    async def both() -> None:
        async with agent(directory / "results") as ask:
            for seed in range(options.seeds):
                for alone in (True, False) if seed % 2 else (False, True):
                    found[alone].append(await search(ask, seed, alone=alone))
                print(seed, [min(found[alone][-1]) for alone in (True, False)], flush=True)

    with serving(directory / "results", 18510):
        asyncio.run(both())
    rows = []
    for count in SHOWN:
        best = {alone: [min(losses[:count]) for losses in found[alone]] for alone in found}
        less = [with_agent - alone for alone, with_agent in zip(best[True], best[False], strict=True)]
        means = [f"{np.mean(best[alone]):.4f}" for alone in (True, False)]
        rows.append([str(count), *means, interval(less), f"{sum(each < 0 for each in less)} of {len(less)}"])
    head = ["after trials", "the search alone", "with the agent", "difference, paired", "better with it"]
    paper.say(f"Mean of the best validation loss, in nats, of {options.seeds} seeds:\n")
    paper.table(head, rows)
    paper.say(f"\nIt took {time.monotonic() - began:.0f} s.")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=10)
    perform(measure, parser.parse_args(), name="agent_beliefs", title="An agent that sees what the model expects")


if __name__ == "__main__":
    main()
