"""The texts of an experiment for the page: its logs, failures, code, and differences from another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from aiohttp import web
from typing_extensions import TypedDict

from dray.code.listing import MAX_BYTES, CodeFile, code_files, code_text
from dray.errors import NoExperiment
from dray.records.difference import Differences, Side, code_difference, differences
from dray.records.failures import FailureGroup, failure_groups
from dray.records.log_index import Lines
from dray.records.reader import ExperimentReader
from dray.serve import logs
from dray.serve.experiments import Experiments, locked
from dray.serve.given import CodeQuery, DifferenceQuery, LinesQuery, OutputQuery

MAX_DIFF = 256 << 10
"""Most characters of a difference of code that are sent."""


class Failures(TypedDict):
    groups: list[FailureGroup]
    failures: int  # the number of all failures


class Code(TypedDict):
    files: list[CodeFile]  # at most 2,000
    more: bool  # whether there are others
    variants: list[str]  # the names of the code of trials


class CodeText(TypedDict):
    path: str
    text: str | None  # null if it is binary
    size: int  # bytes
    more: int  # the number of bytes left out at the end; 0 up to 524,288


class Diff(TypedDict):
    diff: str  # a unified diff; empty if there is no difference
    more: int  # the number of characters left out at its end; 0 up to 262,144


class Variant(Diff):
    code: str


class DifferenceAnswer(Differences, Diff):
    """The differences; that of the code is in diff."""


class Texts:
    """The handlers; each runs in a thread."""

    def __init__(
        self, experiments: Experiments, trial_of: Callable[[web.Request], tuple[ExperimentReader, int]]
    ) -> None:
        self._all, self._trial, self._logs = experiments, trial_of, logs.Logs()

    def experiment_logs(self, request: web.Request, query: LinesQuery) -> logs.Found:
        """The experiment's own log, its events, by the numbers of the lines; or the lines with a text"""
        reader = self._all.open(request.match_info["name"])
        lines = self._logs.events(reader.directory)
        return {**_asked(query, {None: lines}), "running": bool(reader.is_running)}

    def trial_logs(self, request: web.Request, query: OutputQuery) -> logs.Found:
        """A trial's output; first its end, then new lines; or lines of one rank by their numbers, or with a text"""
        reader, trial = self._trial(request)
        running = reader.trials[trial].state == "RUNNING"
        if not {"rank", "search", "line"} & query.model_fields_set:
            return {**self._logs.piece(reader.directory, trial, query.after), "running": running}
        ranks = self._logs.ranks(reader.directory, trial, final=not running)
        of: dict[int | None, Lines] = dict(ranks.items())
        if query.rank is not None or not query.search:
            rank = min(ranks, default=0) if query.rank is None else query.rank
            if rank not in ranks and ranks:
                raise NoExperiment(f"trial {trial} has no rank {rank}; it has {', '.join(map(str, ranks))}")
            of = {rank: ranks[rank]} if ranks else {}
        return {**_asked(query, of), "ranks": list(ranks), "running": running}

    def whole_log(self, request: web.Request) -> str:
        """All output of a trial."""
        reader, trial = self._trial(request)
        return "\n".join([*self._logs.whole(reader.directory, trial), ""])

    def failures(self, request: web.Request) -> Failures:
        """The failures of trials by their cause, the most frequent first"""
        return failures(self._all.open(request.match_info["name"]))

    def code(self, request: web.Request, query: CodeQuery) -> Code:
        """The files of the experiment's code, or of a variant of it"""
        reader = self._all.open(request.match_info["name"])
        files, is_all = code_files(_code(reader, query.variant))
        variants = sorted(
            each.name for each in reader.directory.variants.glob("*") if reader.directory.has_variant(each.name)
        )
        return {"files": files, "more": not is_all, "variants": variants}

    def code_file(self, request: web.Request, query: CodeQuery) -> CodeText:
        """A file of the experiment's code, or of a variant of it"""
        reader, path = self._all.open(request.match_info["name"]), request.match_info["path"]
        try:
            text, size = code_text(_code(reader, query.variant), path)
        except FileNotFoundError:
            raise NoExperiment(f"the code of {reader.name} has no file {path[:200]!r}") from None
        return {"path": path, "text": text, "size": size, "more": 0 if text is None else max(size - MAX_BYTES, 0)}

    def variant(self, request: web.Request) -> Variant:
        """What a variant changes in the experiment's code"""
        reader, name = self._all.open(request.match_info["name"]), request.match_info["variant"]
        return {"code": name, **_cut(reader.directory.diff_of(name))}

    def difference(self, request: web.Request, query: DifferenceQuery) -> DifferenceAnswer:
        """What two experiments, or trials of one or two, differ in"""
        name = request.match_info["name"]
        one, two = self._side(name, query.a_trial), self._side(query.other or name, query.b_trial)
        with locked(one.reader, two.reader):
            return {**differences(one, two), **_cut("\n".join(code_difference(one, two)))}

    def _side(self, name: str, trial: int | None) -> Side:
        if trial is None:
            return Side.of(self._all.open(name))
        reader = self._all.with_trial(name, trial)
        return Side(reader, reader.trials[trial])


def failures(reader: ExperimentReader) -> Failures:
    with reader.lock:
        groups = failure_groups(reader.failures)
    return {"groups": groups, "failures": sum(each.count for each in groups)}


def _cut(diff: str) -> Diff:
    return {"diff": diff[:MAX_DIFF], "more": max(len(diff) - MAX_DIFF, 0)}


def _asked(query: LinesQuery, ranks: Mapping[int | None, Lines]) -> logs.Found:
    if query.search:
        return logs.search(ranks, query.search, query.line)
    nothing: logs.Found = {"lines": [], "line": 1, "total": 0}
    return next((logs.window(each, query.line, query.limit) for each in ranks.values()), nothing)


def _code(reader: ExperimentReader, variant: str) -> Path:
    """The experiment's code, or that of a variant."""
    if variant and not reader.directory.has_variant(variant):
        raise NoExperiment(f"{reader.name} has no variant {variant[:40]!r} of its code")
    return reader.directory.code_of(variant or None)
