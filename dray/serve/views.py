"""The reading half of the API: experiments, trials, curves, figures, logs. Threads read the files."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

from dray.errors import ExperimentError, NoExperiment
from dray.records.checkpoints import list_checkpoints
from dray.records.comparison import compare
from dray.records.logs import failure_fields
from dray.records.overview import Overview
from dray.records.reader import ExperimentReader
from dray.records.standing import standing
from dray.records.trial_record import lineage
from dray.serve import figures, queue_views, series, table
from dray.serve.answers import BadInput, number, numbers, plain
from dray.serve.answers import encoded as _encoded
from dray.serve.boards import boards
from dray.serve.control import API, Control, Submitted, verbs_of
from dray.serve.curves import Wanted
from dray.serve.experiments import VIEW_S, Experiments, locked
from dray.serve.refusals import NotSubmitted
from dray.serve.searched import searched
from dray.serve.texts import Texts
from dray.storage import StorageError
from searchers.rows import said

Read = Callable[[web.Request], bytes | tuple[bytes, float]]
"""Returns JSON, or JSON and the seconds for which it stays the same."""
THREADS = 4
PACE_S = 2.5  # how often a page should poll its experiment
PACE_EACH_S = 1.0
"""The pace is at least this, times the number of viewed experiments: many open pages must not cost the server much."""


def routes(control: Control, results: Path) -> list[web.RouteDef]:
    """The routes that read."""
    views = Views(control, results)
    one = f"{API}/experiments/{{name}}"
    reads: dict[str, Read] = {
        f"{API}/experiments": views.experiments,
        f"{API}/queue": lambda request: _encoded(queue_views.queue(control, request)),
        f"{API}/queue/preview": lambda request: _encoded(queue_views.preview(control, request)),
        one: views.experiment,
        f"{one}/config": views.config,
        f"{one}/trials": views.trials,
        f"{one}/trials/{{trial:\\d{{1,9}}}}": views.trial,
        f"{one}/trials/{{trial:\\d{{1,9}}}}/metrics": views.metrics,
        f"{one}/trials/{{trial:\\d{{1,9}}}}/system": views.system,
        f"{one}/comparison": views.comparison,
        f"{one}/checkpoints": views.checkpoints,
        f"{one}/variants/{{variant}}": views.texts.variant,
        f"{one}/logs": views.texts.experiment_logs,
        f"{one}/failures": views.texts.failures,
        f"{one}/code": views.texts.code,
        f"{one}/code/{{path:.+}}": views.texts.code_file,
        f"{one}/difference": views.texts.difference,
        f"{one}/curves": views.curves,
        f"{one}/figures/{{kind}}": views.figures,
    }
    return [
        *(web.get(path, views.answering(read)) for path, read in reads.items()),
        web.get(f"{one}/trials/{{trial:\\d{{1,9}}}}/logs", views.logs),
        web.post(f"{one}/boards", views.boards),
    ]


class Views:
    """The handlers of the routes that read; each runs in a thread."""

    def __init__(self, control: Control, results: Path) -> None:
        self._control, self._all = control, Experiments(results)
        self._threads = ThreadPoolExecutor(THREADS, "dray-views")
        # A thread for each slow kind of figure: fitting a random forest takes seconds.
        quick = ThreadPoolExecutor(1, "dray-figures")
        self._figures = {
            kind: quick if kind in figures.QUICK else ThreadPoolExecutor(1, f"dray-{kind}") for kind in figures.KINDS
        }
        self.texts = Texts(self._all, self._trial)
        self._logs = self.answering(self.texts.trial_logs)
        self._rows: dict[str, _Row] = {}

    def answering(self, read: Read) -> Handler:
        """A handler that responds with the JSON of a method, or with 304 if the browser has it already."""

        async def answer(request: web.Request) -> web.StreamResponse:
            pool = self._figures.get(request.match_info.get("kind", ""), self._threads)
            found = await asyncio.get_running_loop().run_in_executor(pool, read, request)
            body, wait_s = found if isinstance(found, tuple) else (found, None)
            headers = {"ETag": f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'}
            if wait_s is not None:
                headers["Retry-After"] = str(math.ceil(wait_s))
            if request.headers.get("If-None-Match") == headers["ETag"]:
                return web.Response(status=304, headers=headers)
            return web.Response(body=body, content_type="application/json", charset="utf-8", headers=headers)

        return answer

    def experiments(self, request: web.Request) -> bytes:
        """``experiments``, newest last: see `overview_fields`; ``status``: the server's; ``unread``: the number still
        missing."""
        submitted = {each.name: each for each in self._control.experiments()}
        found, unread = self._all.overviews(also=submitted)
        self._rows = {
            name: self._row(name, found.get(name), submitted.get(name)) for name in found.keys() | submitted.keys()
        }
        rows = b",".join(row.body for row in sorted(self._rows.values(), key=lambda row: row.place))
        rest = _encoded({"unread": unread, "status": asdict(self._control.status())})
        return b'{"experiments":[' + rows + b"]," + rest[1:]

    def _row(self, name: str, overview: Overview | None, submitted: Submitted | None) -> _Row:
        """An entry of ``experiments``: the one made before if nothing has changed, as for most of a long list."""
        before = self._rows.get(name)
        if before is not None and before.overview is overview and before.submitted == submitted:
            return before
        fields = overview_fields(name, overview, submitted)
        # One that is queued has not begun, and is newer than those that have.
        place = ((fields["submitted"] or {}).get("submitted") or fields["began"] or 0, name)
        return _Row(overview, submitted, place, _encoded(fields))

    def experiment(self, request: web.Request) -> bytes:
        """An entry of ``experiments``, with further fields for the experiment's page; read anew with ``now=1``."""
        name = request.match_info["name"]
        submitted = self._submitted(name)
        try:
            overview = self._all.overview(name, max_age_s=0.0 if request.query.get("now") == "1" else VIEW_S)
        except NoExperiment:
            if submitted is None:
                raise
            return _encoded({**overview_fields(name, None, submitted), **_standing(None, None, submitted)})
        reader = self._all.open(name)
        with reader.lock:
            pace = max(PACE_S, PACE_EACH_S * self._all.viewed())
            about = describe(reader, overview, submitted)
            return _encoded({**about, "pace": pace, "status": asdict(self._control.status())})

    def config(self, request: web.Request) -> bytes:
        """See `dray.serve.searched.searched`."""
        reader = self._all.open(request.match_info["name"])
        with reader.lock:
            return _encoded(searched(reader))

    def trials(self, request: web.Request) -> bytes:
        """See `table.page`."""
        reader = self._all.open(request.match_info["name"])
        with reader.lock:
            return table.page(reader, request)

    def trial(self, request: web.Request) -> bytes:
        """A row of ``trials``, with ``rank``, nested ``drawn`` hyperparameters, its ``lineage``, the ``best`` trial,
        ``checkpoints`` and ``failures``."""
        reader, number = self._trial(request)
        with reader.lock:
            trial, ranked, best = reader.trials[number], reader.ranked(), reader.best()
            found = {
                **plain(trial.to_json()),
                "rank": ranked.index(trial) + 1 if trial in ranked else None,
                "of": len(ranked),
                "drawn": plain(trial.drawn),
                "repeated": None if (mean := reader.mean_of_repeats(number)) is None else plain(asdict(mean)),
                "lineage": lineage(reader.trials, number),
                "best": None
                if best is None
                else plain(
                    {
                        "trial": best.id,
                        "metric": reader.value_of(best),
                        "best_by": reader.valued_by(best),
                        "hparams": best.hparams,
                    }
                ),
                "varying": reader.varying,
                "trials": len(reader.trials),
                "submitted": self._submitted(request.match_info["name"]) is not None,
                "failures": [failure_fields(each) for each in reader.failures if each["trial"] == number],
            }
        try:
            found["checkpoints"] = [
                {"batches": each.batches, "size": each.size, "complete": each.is_complete, "path": each.location.uri}
                for each in list_checkpoints(reader.directory, number)
            ]
        except (StorageError, OSError) as error:
            found |= {"checkpoints": [], "checkpoints_error": str(error)}
        return _encoded(found)

    def _submitted(self, name: str) -> Submitted | None:
        try:
            return self._control.experiment(name)
        except NotSubmitted:
            return None

    def metrics(self, request: web.Request) -> bytes:
        """See `series.metrics`; with ``points``, at most so many of each metric."""
        return _encoded(series.metrics(*self._trial(request), number(request, "points", 10**9)))

    def system(self, request: web.Request) -> bytes:
        """See `series.system`."""
        return _encoded(series.system(*self._trial(request)))

    def comparison(self, request: web.Request) -> bytes:
        """Two trials, ``a`` and ``b``, the latter perhaps of another experiment, ``with``; see
        `dray.records.repeats.Comparison`."""
        name = request.match_info["name"]
        one, other = self._all.open(name), self._all.open(request.query.get("with", name))
        with locked(one, other):
            try:
                found = compare(one, number(request, "a"), other, number(request, "b"))
            except ExperimentError as error:
                raise BadInput(str(error)) from None
        return _encoded(plain(found.to_json()))

    def checkpoints(self, request: web.Request) -> bytes:
        """``checkpoints``: their number; ``bytes``: their size. Deleting the experiment deletes them."""
        there = list_checkpoints(self._all.open(request.match_info["name"]).directory)
        return _encoded({"checkpoints": len(there), "bytes": sum(each.size for each in there)})

    def curves(self, request: web.Request) -> tuple[bytes, float]:
        """Learning curves, see `dray.serve.curves.curves`; of another metric with ``metric=KIND NAME``."""
        name, wanted = request.match_info["name"], Wanted.of(request.query)
        reader = self._all.open(name)
        if wanted.metric == ("validation", reader.metric):
            wanted = replace(wanted, metric=None)
        elif wanted.metric is not None and wanted.metric not in reader.metrics:
            raise BadInput(f"metric={' '.join(wanted.metric)[:80]}: no trial has reported it")
        return self._all.curves(name, wanted)

    def figures(self, request: web.Request) -> tuple[bytes, float]:
        """Figures, see `figures.CachedFigures`, with the trials ``include=3,17`` even if they leave out
        others; ``now=1`` makes them anew."""
        name, kind = request.match_info["name"], request.match_info["kind"]
        if kind not in figures.KINDS:
            raise BadInput(f"{kind[:40]}: there are no such figures; there are {', '.join(figures.KINDS)}")
        included = numbers(request, "include", most=figures.MAX_INCLUDED)
        return self._all.figures(name, kind, included, now=request.query.get("now") == "1")

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """See `Texts.trial_logs`; with ``whole=1`` all of it as a file."""
        return await (self.whole_log if request.query.get("whole") == "1" else self._logs)(request)

    async def whole_log(self, request: web.Request) -> web.StreamResponse:
        """All output of a trial, as a file."""
        text = await asyncio.get_running_loop().run_in_executor(self._threads, self.texts.whole_log, request)
        name = f"{request.match_info['name']}-trial-{request.match_info['trial']}.log"
        safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
        return web.Response(text=text, headers={"Content-Disposition": f'attachment; filename="{safe}"'})

    async def boards(self, request: web.Request) -> web.StreamResponse:
        """Start TensorBoard and optuna-dashboard for an experiment, for browsers on the server's machine."""

        def start() -> dict[str, str | None]:
            return boards(self._all.open(request.match_info["name"]).directory.path)

        return web.json_response(await asyncio.get_running_loop().run_in_executor(self._threads, start))

    def _trial(self, request: web.Request) -> tuple[ExperimentReader, int]:
        trial = int(request.match_info["trial"])
        return self._all.with_trial(request.match_info["name"], trial), trial


class _Row(NamedTuple):
    """An entry of the list, as JSON; ``place`` sorts it."""

    overview: Overview | None
    submitted: Submitted | None
    place: tuple[float, str]
    body: bytes


def overview_fields(name: str, overview: Overview | None, submitted: Submitted | None) -> dict[str, Any]:
    """An experiment as the list shows it.

    ``state`` is as in `Overview.on_server` if it was submitted, else as in `Overview`; ``submitted`` is null if it was
    not; ``verbs``: see `dray.serve.control.verbs_of`.
    """
    seen = _seen(name, overview, submitted)
    verbs = [] if seen.is_local else verbs_of(seen.state, is_submitted=submitted is not None)
    return {**seen.to_json(), "verbs": verbs, "submitted": None if submitted is None else asdict(submitted)}


def _seen(name: str, overview: Overview | None, submitted: Submitted | None) -> Overview:
    seen = Overview(name=name, path="", state="STOPPED") if overview is None else overview
    return seen if submitted is None else seen.on_server(submitted.state, submitted.error)


def _standing(
    overview: Overview | None, reader: ExperimentReader | None, submitted: Submitted | None
) -> dict[str, dict[str, Any]]:
    """``standing``: see `dray.records.standing.Standing`."""
    queued = None if submitted is None else submitted.submitted
    return {"standing": standing(_seen("", overview, submitted), reader, queued=queued).to_json()}


def describe(reader: ExperimentReader, overview: Overview, submitted: Submitted | None) -> dict[str, Any]:
    """An experiment as its page and its report show it: `overview_fields` and others."""
    best, config, searcher = reader.best(), reader.config, reader.config.searcher
    return {
        **overview_fields(reader.name, overview, submitted),
        **_standing(overview, reader, submitted),
        "version": reader.version,
        "objectives": [] if searcher.objectives is None else [each.name for each in searcher.objectives.objectives],
        "front": reader.front(),
        "repeats": plain([each.to_json() for each in reader.finalists()]),
        "repeats_summary": reader.repeats_summary(),
        "searcher": searcher.name,
        "max_length": searcher.length,
        "unit": searcher.unit,
        "description": config.description,
        "states": reader.states,
        "best_hparams": None if best is None else plain(best.hparams),
        "varying": reader.varying,
        "metrics": sorted(f"{kind}.{name}" for kind, name in reader.metrics),
        "failures": len(reader.failures),
        "diverged": reader.divergence_summary(),
        "alerts": plain(reader.alerts),
        "damaged": said(reader.directory.path),
    }
