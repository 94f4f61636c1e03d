"""Agents that propose three trials of ten of a search of examples/gpt, against the search alone.

    python bench/agent_beliefs.py [--seeds 10] [--first-seed 0] [--save] [--keep DIRECTORY]

The searches are `auto` with 20 trials, two at a time, over learning rate, warm-up, dropout and width. After 7 trials
and after 17, an agent reads `get_beliefs` through ``dray mcp``, and adds three trials; the search draws the other 14.
``obeys`` proposes only what the model says: the two best points and the most uncertain one. ``knows`` takes the best
point's learning rate, half and double, and what people know of short trainings that underfit: the largest width, no
dropout, and a tenth of the steps for warm-up. Seeds are paired.

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
KNOWN = {"width": 48, "dropout": 0.0, "warm_up_steps": BATCHES // 10}
ARMS = ("alone", "obeys", "knows")
SHOWN = (5, 10, 20)  # after how many trials the best loss is shown


async def search(ask: Agent, seed: int, arm: str) -> list[float]:
    """The losses of the trials in the order in which they were created; inf if one failed."""

    async def answer(tool: str, **given: Any) -> dict[str, Any]:
        done = await ask(tool, **given)
        if done.is_error:
            raise SystemExit(f"{tool}: {done.text}")
        found: dict[str, Any] = json.loads(done.text)
        return found

    by_agent = 0 if arm == "alone" else TRIALS * BY_AGENT // TEN
    config = {
        "name": arm,
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
            points = [
                each["hparams"] for each in (*beliefs["best"][:2], *beliefs["uncertain"][:1], *beliefs["best"][2:])
            ]
            chosen = points[:BY_AGENT]
            if arm == "knows":
                low, high = 1e-4, 10**-0.5
                rates = [min(max(points[0]["lr"] * factor, low), high) for factor in (1, 2, 0.5)]
                chosen = [points[0] | KNOWN | {"lr": rate} for rate in rates]
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
    began, found = time.monotonic(), dict[str, list[list[float]]]({arm: [] for arm in ARMS})

    async def all_arms() -> None:
        async with agent(directory / "results") as ask:
            for number in range(options.seeds):
                for place in range(len(ARMS)):
                    arm = ARMS[(place + number) % len(ARMS)]
                    found[arm].append(await search(ask, options.first_seed + number, arm))
                print(options.first_seed + number, {arm: min(found[arm][-1]) for arm in ARMS}, flush=True)

    with serving(directory / "results", 18510):
        asyncio.run(all_arms())
    rows = []
    for arm in ARMS[1:]:
        for count in SHOWN:
            alone, best = ([min(losses[:count]) for losses in found[each]] for each in ("alone", arm))
            less = [one - other for one, other in zip(best, alone, strict=True)]
            means = [f"{np.mean(alone):.4f}", f"{np.mean(best):.4f}"]
            rows.append([arm, str(count), *means, interval(less), f"{sum(each < 0 for each in less)} of {len(less)}"])
    head = ["agent", "after trials", "the search alone", "with the agent", "difference, paired", "better with it"]
    paper.say(f"Mean of the best validation loss, in nats, of {options.seeds} seeds:\n")
    paper.table(head, rows)
    paper.say(f"\nIt took {time.monotonic() - began:.0f} s.")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    perform(measure, parser.parse_args(), name="agent_beliefs", title="An agent that sees what the model expects")


if __name__ == "__main__":
    main()
