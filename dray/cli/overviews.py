"""What ``dray experiment list`` prints, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from dray.cli import description, show
from dray.records.overview import Overview
from dray.serve.client import Server
from dray.serve.control import ACTIVE


def show_all(where: str | None, *, json: bool) -> None:
    """Print all experiments in a place; None: in the default storage, or on the server that ``DRAY_SERVER`` names."""
    server = Server.find() if where is None else None
    submitted: dict[str, Mapping[str, Any]] = {}
    if server is None or server.is_here:
        from dray.records.listing import list_experiments

        found = list_experiments(where)
    if server is not None:
        rows = server.experiments()
        submitted = {row["name"]: row["submitted"] for row in rows if row["submitted"]}
        found = (
            [_with_state(each, submitted) for each in found] if server.is_here else list(map(Overview.from_json, rows))
        )
    if json:
        show.as_json([{**description.overview(each), "submitted": submitted.get(each.name)} for each in found])
        return
    if found:
        _table(found, submitted, with_slots=server is not None)
    for each in found:
        if each.state == "DAMAGED":
            typer.echo(f"{each.name} can't be read: {each.why}", err=True)
        elif each.state in ACTIVE and each.why:
            typer.echo(f"{each.name}: {each.why}", err=True)
    if not found:
        from dray.records.directory import results_root

        typer.echo(f"no experiments in {where or results_root()} yet", err=True)


def _table(found: list[Overview], submitted: Mapping[str, Mapping[str, Any]], *, with_slots: bool) -> None:
    headings = ["#", "name", "state", *(["slots"] if with_slots else []), "trials", "best", "metric", "started"]
    rows: list[list[object]] = []
    for each in found:
        failed = f", {each.failed} failed" if each.failed else ""
        slots = submitted.get(each.name, {}).get("slots") or None
        rows.append(
            [
                each.number,
                each.name,
                each.state,
                *([slots] if with_slots else []),
                f"{each.ended}/{each.max_trials or each.trials}{failed}",
                each.best,
                each.metric,
                show.clock(each.began),
            ]
        )
    show.table(headings, rows, left=["name", "state", "metric"])


def _with_state(each: Overview, submitted: Mapping[str, Mapping[str, Any]]) -> Overview:
    if (there := submitted.get(each.name)) is None:
        return each
    return each.on_server(there["state"], there["error"])
