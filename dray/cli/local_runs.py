"""What ``dray experiment describe`` prints of a local run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dray.cli import show
from dray.cli.reader import last_values
from dray.text import duration, shown

if TYPE_CHECKING:
    from dray.records.local_runs import LocalRun
    from dray.records.overview import Overview


def details(run: LocalRun) -> dict[str, Any]:
    """What a local run's description has besides its overview, as JSON."""
    return {
        "batches": max((row["batches"] for row in run.rows), default=0),
        "metrics": last_values(run.metrics()),
        "checkpoints": [{"batches": batches, "path": path} for batches, path in run.checkpoints],
    }


def describe(run: LocalRun, overview: Overview) -> None:
    """Print a local run's description."""
    found = details(run)
    resumable = found["checkpoints"] and overview.state in ("STOPPED", "UNKNOWN")
    resume = f'fit(..., latest_checkpoint="{found["checkpoints"][0]["path"]}")' if resumable else ""
    best = "" if run.best is None else f"{overview.metric} {shown(run.best[0])} after {run.best[1]} batches"
    show.fields(
        [
            ("local run", f"{overview.name}  {overview.state}"),
            ("stored in", overview.path),
            ("started", f"{show.clock(overview.began, exact=True)}, ran for {duration(overview.ran_s)}"),
            ("trained for", f"{found['batches']} batches"),
            ("best", best),
            ("last metrics", "\n".join(f"{name} = {shown(value)}" for name, value in found["metrics"].items())),
            ("checkpoints", "\n".join(each["path"] for each in found["checkpoints"])),
            ("resume with", resume),
        ]
    )
