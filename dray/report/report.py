"""The report: the page of `dray serve` in one file, with what the server would answer about one experiment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from dray._version import __version__
from dray.private import replaced
from dray.records.listing import StoredExperiment, open_experiment
from dray.records.lookup import Name
from dray.records.reader import ExperimentReader
from dray.report.bundle import document
from dray.serve import table, texts
from dray.serve.answers import encoded
from dray.serve.curves import curves
from dray.serve.described import described
from dray.serve.figures import KINDS, figures_of
from dray.serve.given import Wanted
from dray.serve.searched import searched

BEST_SHOWN = 10
MAX_CURVES = 5_000_000
"""Most bytes of the curves of metrics other than the searcher's."""


def write_report(path: Name, out: str | os.PathLike[str] | None = None) -> Path:
    """Write a report on an experiment, finished or running: one self-contained HTML file.

    Args:
        path: the experiment, as for the command: its number, a unique part of its name, ``"latest"``, its directory, or
            ``s3://...``.
        out: the file to write; by default ``report.html`` in the experiment's directory, or in the current directory
            for an experiment in an object store.

    Returns:
        The file.

    Raises:
        NoExperiment: there is no such experiment.
        DamagedFile: one of its files can't be read.
    """
    with open_experiment(path) as stored, closing(stored.read()) as reader:
        return write(stored, reader, out)


def write(stored: StoredExperiment, reader: ExperimentReader, out: str | os.PathLike[str] | None) -> Path:
    """As `write_report`, for an experiment that has been read."""
    if out is None:
        out = f"{stored.name}-report.html" if stored.is_copy else stored.directory.path / "report.html"
    file = Path(out).expanduser()
    answers = ",".join(
        f"[{json.dumps(path)},{json.dumps(query)},{body.decode()}]" for path, query, body in _all(reader)
    )
    saved = f'{{"name":{json.dumps(reader.name)},"dray":{json.dumps(__version__)},"answers":[{answers}]}}'
    content = document(f"{reader.config.name}: {reader.metric}", saved)
    with replaced(file) as unnamed:
        unnamed.write_text(content, encoding="utf-8", errors="backslashreplace")  # names may not be UTF-8
    return file


def _all(reader: ExperimentReader) -> Iterator[tuple[str, dict[str, str], bytes]]:
    """What the page asks about an experiment: paths below the experiment's, queries, and the answers."""
    yield "", {}, encoded(described(reader, reader.overview(), None))
    yield "/config", {}, encoded(searched(reader))
    yield "/failures", {}, encoded(texts.failures(reader))
    objectives = reader.config.searcher.objectives
    metrics = () if objectives is None else tuple(f"validation.{each.name}" for each in objectives.objectives)
    best = table.rows(reader, reader.eligible()[:BEST_SHOWN], [each for each in metrics if _is_reported(reader, each)])
    yield "/trials", {"sort": "rank"}, b'{"trials":[' + b",".join(best) + b"]}"
    for kind in KINDS:
        yield f"/figures/{kind}", {}, figures_of(reader, kind)
    yield from _curves(reader)


def _is_reported(reader: ExperimentReader, metric: str) -> bool:
    kind, _, name = metric.partition(".")
    return (kind, name) in reader.metrics


def _curves(reader: ExperimentReader) -> Iterator[tuple[str, dict[str, str], bytes]]:
    """The curves of each metric along one axis, in bands and as single ones; first of the searcher's metric."""
    others, size, kept = reader.metrics - {("validation", reader.metric)}, 0, list[str]()
    answers = list[tuple[str, dict[str, str], bytes]]()
    for metric in sorted(others, key=lambda each: (each[0] != "validation", each)):
        both = [_answer(reader, metric, bands=bands) for bands in (True, False)]
        size += sum(len(body) for *_, body in both)
        if size > MAX_CURVES:
            break
        answers += both
        kept.append(" ".join(metric))
    note = f"Of {len(others):,} other metrics, this file has {len(kept):,}." if len(kept) < len(others) else ""
    for bands in (True, False):
        yield _answer(reader, None, bands=bands, metrics=sorted(kept), note=note)
    yield from answers


def _answer(
    reader: ExperimentReader, metric: tuple[str, str] | None, *, bands: bool, note: str = "", **fields: Any
) -> tuple[str, dict[str, str], bytes]:
    query = ({"metric": " ".join(metric)} if metric else {}) | {"show": "bands" if bands else "individual"}
    found = curves(reader, Wanted.model_validate(query))
    more = {"alongs": [found["along"]], "notes": [*found["notes"], *([note] if note else [])], **fields}
    return "/curves", query, encoded({**found, **more})
