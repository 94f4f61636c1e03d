"""The reading half of the API: experiments, trials, curves, figures, logs. Threads read the files."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from aiohttp import web
from aiohttp.typedefs import Handler
from typing_extensions import TypedDict

from dray.errors import ConfigError, ExperimentError, Invalid, NoExperiment
from dray.experiment.like import read_earlier
from dray.records.checkpoints import list_checkpoints
from dray.records.comparison import Comparison, compare
from dray.records.overview import Overview
from dray.records.reader import ExperimentReader
from dray.serve import curves, figures, table
from dray.serve.answers import Encoded, encoded
from dray.serve.auth import CALLER, refusal
from dray.serve.boards import Boards, boards
from dray.serve.control import ACTIVE, API, Control, QueueState, Share, Status, Submitted
from dray.serve.curves import Curves
from dray.serve.described import (
    Experiment,
    ExperimentInFull,
    Standings,
    TrialInFull,
    described,
    listed,
    taken,
    trial_in_full,
    with_standing,
)
from dray.serve.experiments import VIEW_S, Experiments, locked
from dray.serve.given import (
    ComparisonQuery,
    FiguresQuery,
    MetricsQuery,
    Now,
    PreviewQuery,
    QueueQuery,
    TrialsQuery,
    Wanted,
    query_of,
)
from dray.serve.queue_order import in_order, moved, ties
from dray.serve.quota import check_priority
from dray.serve.refusals import NotSubmitted
from dray.serve.searched import Searched, searched
from dray.serve.texts import Texts
from dray.serve.tokens import Token
from dray.text import fields_of
from searchers.outlook import Outlook, outlook

FIELDS = ("priority", "weight", "max_slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAnswer(QueueState):
    """The queue, and what the cluster's slots did.

    Attributes:
        refused: why the token may not change an experiment, by name; without those that it may.
    """

    refused: Mapping[str, str]


class Preview(TypedDict):
    changes: dict[
        str, dict[str, Any]
    ]  # what to change, by experiment; moving one may need to change the priorities of others
    lines: list[str]  # what happens then
    order: list[str]  # the queue then
    refused: str  # the reason why the token may not do it; empty: it may


def queue(control: Control, query: QueueQuery, token: Token) -> QueueAnswer:
    found = control.queue(query.seconds)
    refused = {each.name: why for each in found.entries if (why := refusal(token, each.name, each.owner))}
    return QueueAnswer(**fields_of(found), refused=refused)


def preview(control: Control, query: PreviewQuery, token: Token) -> Preview:
    name = query.name
    asked = control.experiment(name)
    queued = {each.name: each for each in control.experiments() if each.state in ACTIVE}
    changes, refused = _changes(query, asked, queued, token)
    known = {**queued, name: asked}
    shares = {each: replace(known[each].share, **change) for each, change in changes.items()}
    priorities = {each.name: shares.get(each.name, each.share).priority for each in queued.values()}
    order, lines = in_order(priorities), ["Nothing changes."]
    if shares:
        lines = control.foresee(shares) if name in queued else [f"It takes effect when {name} is queued again."]
    if query.before is not None and (tie := ties(order, priorities, name)):
        lines.append(tie)
    refused = refused or next((why for each in changes if (why := _refusal(token, known[each], shares[each]))), "")
    return {"changes": changes, "lines": lines, "order": order, "refused": refused}


def _changes(
    query: PreviewQuery, asked: Submitted, queued: Mapping[str, Submitted], token: Token
) -> tuple[dict[str, dict[str, Any]], str]:
    """The fields to change by experiment, and the reason why the token may not move the experiment."""
    if query.before is None:
        given = {field: getattr(query, field) for field in FIELDS if field in query.model_fields_set}
        change = {field: value for field, value in given.items() if value != getattr(asked.share, field)}
        return {asked.name: change} if change else {}, ""
    name, before = asked.name, query.before or None
    if name not in queued or before == name or (before is not None and before not in queued):
        raise Invalid(
            f"{name[:100]} can't be moved before {before!r:.100}: give two that run or wait, or nothing: the end"
        )
    priorities = {each.name: each.share.priority for each in queued.values()}
    found = moved(priorities, name, before, lambda each, priority: not _refusal(token, queued[each], priority))
    why = ""
    if found is None:
        found = moved(priorities, name, before) or {}
        why = "" if found else "there is no priority left between its neighbours; change theirs"
    return {each: {"priority": priority} for each, priority in found.items()}, why


def _refusal(token: Token, submitted: Submitted, new: Share | int) -> str:
    """The reason why a token may not give an experiment a share, or a priority."""
    priority = new if isinstance(new, int) else new.priority
    if why := refusal(token, submitted.name, submitted.owner):
        return why
    try:
        if priority != submitted.share.priority:
            check_priority(token.owner, token.quota, priority)
    except ConfigError as error:
        return "; ".join(what for _, what in error.faults)
    return ""


Read = Callable[..., Any]
"""Takes a request, and a model of its query if it has one. Returns what is sent as JSON."""
THREADS = 4
LEAST_COMPRESSED = 4096  # bytes of an answer
PACE_S = 2.5  # how often a page should poll its experiment
PACE_EACH_S = 1.0
"""The pace is at least this, times the number of viewed experiments: many open pages must not cost the server much."""


def routes(control: Control, results: Path) -> list[web.RouteDef]:
    """The routes that read."""
    views = Views(control, results)
    one = f"{API}/experiments/{{name}}"
    reads: dict[str, Read] = {
        f"{API}/experiments": views.experiments,
        f"{API}/queue": views.queue,
        f"{API}/queue/preview": views.preview,
        one: views.experiment,
        f"{one}/config": views.config,
        f"{one}/trials": views.trials,
        f"{one}/trials/{{trial:\\d{{1,9}}}}": views.trial,
        f"{one}/trials/{{trial:\\d{{1,9}}}}/metrics": views.metrics,
        f"{one}/trials/{{trial:\\d{{1,9}}}}/system": views.system,
        f"{one}/comparison": views.comparison,
        f"{one}/beliefs": views.beliefs,
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
        web.post(f"{one}/boards", views.answering(views.boards)),
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
        query = get_type_hints(read).get("query")

        def answered(request: web.Request) -> Encoded[Any]:
            found = read(request) if query is None else read(request, query_of(query, request))
            return found if isinstance(found, Encoded) else Encoded(encoded(found))

        @functools.wraps(read)
        async def answer(request: web.Request) -> web.StreamResponse:
            pool = self._figures.get(request.match_info.get("kind", ""), self._threads)
            found = await asyncio.get_running_loop().run_in_executor(pool, answered, request)
            body = found.body
            headers = {"ETag": f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'}
            if found.wait_s is not None:
                headers["Retry-After"] = str(math.ceil(found.wait_s))
            if request.headers.get("If-None-Match") == headers["ETag"]:
                return web.Response(status=304, headers=headers)
            response = web.Response(body=body, content_type="application/json", charset="utf-8", headers=headers)
            if len(body) > LEAST_COMPRESSED:
                response.enable_compression()
            return response

        return answer

    def experiments(self, request: web.Request) -> Encoded[ExperimentList]:
        """All experiments in the results directory, submitted to the server or not, the newest last"""
        submitted = {each.name: each for each in self._control.experiments()}
        found, unread = self._all.overviews(also=submitted)
        self._rows = {
            name: self._row(name, found.get(name), submitted.get(name)) for name in found.keys() | submitted.keys()
        }
        rows = b",".join(row.body for row in sorted(self._rows.values(), key=lambda row: row.place))
        rest = encoded({"unread": unread, "status": self._control.status()})
        return Encoded(b'{"experiments":[' + rows + b"]," + rest[1:])

    def _row(self, name: str, overview: Overview | None, submitted: Submitted | None) -> _Row:
        """An entry of the list: the one made before if nothing has changed, as for most of a long list."""
        before = self._rows.get(name)
        if before is not None and before.overview is overview and before.submitted == submitted:
            return before
        seen = listed(name, overview, submitted)
        # One that is queued has not begun, and is newer than those that have.
        place = ((submitted and submitted.submitted) or seen.began or 0, name)
        return _Row(overview, submitted, place, encoded(seen))

    def experiment(self, request: web.Request, query: Now) -> ExperimentPage | Standings:
        """One experiment"""
        name = request.match_info["name"]
        submitted = self._submitted(name)
        try:
            overview = self._all.overview(name, max_age_s=0.0 if query.now else VIEW_S)
        except NoExperiment:
            if submitted is None:
                raise
            return with_standing(None, listed(name, None, submitted))
        reader = self._all.open(name)
        with reader.lock:
            pace = max(PACE_S, PACE_EACH_S * self._all.viewed())
            return ExperimentPage(
                **taken(described(reader, overview, submitted)), pace=pace, status=self._control.status()
            )

    def queue(self, request: web.Request, query: QueueQuery) -> QueueAnswer:
        """The experiments in the order in which they get slots, and what the slots did"""
        return queue(self._control, query, request[CALLER])

    def preview(self, request: web.Request, query: PreviewQuery) -> Preview:
        """What a change of an experiment's place or share would do; nothing changes"""
        return preview(self._control, query, request[CALLER])

    def config(self, request: web.Request) -> Searched:
        """The experiment.yaml with all defaults filled in, without secrets"""
        reader = self._all.open(request.match_info["name"])
        with reader.lock:
            return searched(reader)

    def trials(self, request: web.Request, query: TrialsQuery) -> Encoded[table.TrialPage]:
        """The experiment's trials, sorted, searched and paginated"""
        reader = self._all.open(request.match_info["name"])
        with reader.lock:
            return Encoded(table.page(reader, query))

    def trial(self, request: web.Request) -> TrialOnServer:
        """One trial"""
        submitted = self._submitted(request.match_info["name"]) is not None
        return {**trial_in_full(*self._trial(request)), "submitted": submitted}

    def _submitted(self, name: str) -> Submitted | None:
        try:
            return self._control.experiment(name)
        except NotSubmitted:
            return None

    def metrics(self, request: web.Request, query: MetricsQuery) -> curves.TrialMetrics:
        """All metrics of a trial"""
        return curves.metrics(*self._trial(request), query.points)

    def system(self, request: web.Request) -> curves.System:
        """A trial's use of its machine over time"""
        return curves.system(*self._trial(request))

    def comparison(self, request: web.Request, query: ComparisonQuery) -> Comparison:
        """The difference between two trials, by their repeats with the same seeds if they have any"""
        name = request.match_info["name"]
        one, other = self._all.open(name), self._all.open(query.other or name)
        with locked(one, other):
            try:
                return compare(one, query.a, other, query.b)
            except ExperimentError as error:
                raise Invalid(str(error)) from None

    def beliefs(self, request: web.Request) -> Outlook:
        """What a model of the results predicts of the search space, from the trials with the experiment's own code"""
        reader = self._all.open(request.match_info["name"])
        with reader.lock:
            changed = {number for number, trial in reader.trials.items() if trial.code is not None}
        found = read_earlier(str(reader.directory.path))
        own = {number: hparams for number, hparams in found.hparams.items() if number not in changed}
        return outlook(reader.config.space, replace(found, hparams=own))

    def checkpoints(self, request: web.Request) -> Checkpoints:
        """How many checkpoints an experiment has, and their size; deleting it deletes them"""
        there = list_checkpoints(self._all.open(request.match_info["name"]).directory)
        return {"checkpoints": len(there), "bytes": sum(each.size for each in there)}

    def curves(self, request: web.Request, query: Wanted) -> Encoded[Curves]:
        """Learning curves of at most 200 trials, or bands of all"""
        name, reader = request.match_info["name"], self._all.open(request.match_info["name"])
        if query.series == ("validation", reader.metric):
            query = query.model_copy(update={"metric": ""})
        elif query.series is not None and query.series not in reader.metrics:
            raise Invalid(f"metric={query.metric[:80]}: no trial has reported it")
        return Encoded(*self._all.curves(name, query))

    def figures(self, request: web.Request, query: FiguresQuery) -> Encoded[figures.Figures]:
        """Figures of the trials, in plotly's format, some with tables of text"""
        name, kind = request.match_info["name"], request.match_info["kind"]
        if kind not in figures.KINDS:
            raise Invalid(f"{kind[:40]}: there are no such figures; there are {', '.join(figures.KINDS)}")
        return Encoded(*self._all.figures(name, kind, query.include, now=query.now))

    async def logs(self, request: web.Request) -> web.StreamResponse:
        return await (self.whole_log if request.query.get("whole") == "1" else self._logs)(request)

    async def whole_log(self, request: web.Request) -> web.StreamResponse:
        """All output of a trial, as a file."""
        text = await asyncio.get_running_loop().run_in_executor(self._threads, self.texts.whole_log, request)
        name = f"{request.match_info['name']}-trial-{request.match_info['trial']}.log"
        safe = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in name)
        return web.Response(text=text, headers={"Content-Disposition": f'attachment; filename="{safe}"'})

    def boards(self, request: web.Request) -> Boards:
        """Start TensorBoard and optuna-dashboard for an experiment, for browsers on the server's machine"""
        return boards(self._all.open(request.match_info["name"]).directory.path)

    def _trial(self, request: web.Request) -> tuple[ExperimentReader, int]:
        trial = int(request.match_info["trial"])
        return self._all.with_trial(request.match_info["name"], trial), trial


class ExperimentList(TypedDict):
    experiments: list[Experiment]
    unread: int  # the number of experiments missing because they are still being read
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentPage(ExperimentInFull):
    """One experiment, for its page.

    Attributes:
        pace: seconds between two requests of a page, so that many open pages do not cost the server much.
        status: the server's.
    """

    pace: float
    status: Status


class TrialOnServer(TrialInFull):
    """One trial."""

    submitted: (
        bool  # whether the experiment was submitted to the server, so that the trial can be forked or stopped here
    )


class Checkpoints(TypedDict):
    checkpoints: int
    bytes: int


class _Row(NamedTuple):
    """An entry of the list, as JSON; ``place`` sorts it."""

    overview: Overview | None
    submitted: Submitted | None
    place: tuple[float, str]
    body: bytes
