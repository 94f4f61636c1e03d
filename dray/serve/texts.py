"""The texts of an experiment for the page: its logs, failures, code, and differences from another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from dray.code.listing import MAX_BYTES, code_files, code_text
from dray.errors import NoExperiment
from dray.records.difference import Side, difference_as_json
from dray.records.failures import failure_groups
from dray.records.log_lines import Lines
from dray.records.reader import ExperimentReader
from dray.serve import logs
from dray.serve.answers import BadInput, encoded, number, plain
from dray.serve.experiments import Experiments, locked

MAX_DIFF = 256 << 10
"""Most characters of a difference of code that are sent."""
DEFAULT_LINES = 500
_MOST_SEARCHED = 200
"""Most letters of a text that is searched for."""


class Texts:
    """The handlers; each runs in a thread, and returns JSON."""

    def __init__(
        self, experiments: Experiments, trial_of: Callable[[web.Request], tuple[ExperimentReader, int]]
    ) -> None:
        self._all, self._trial, self._logs = experiments, trial_of, logs.Logs()

    def experiment_logs(self, request: web.Request) -> bytes:
        """The experiment's own log, see `logs.window` and `logs.search`; ``running``: whether more lines may follow."""
        reader = self._all.open(request.match_info["name"])
        lines = self._logs.events(reader.directory)
        return encoded({**_asked(request, {None: lines}), "running": bool(reader.is_running)})

    def trial_logs(self, request: web.Request) -> bytes:
        """Of one ``rank``: see `logs.window`; with ``search``: see `logs.search`; else a piece of all ranks' output
        after ``after``, see `logs.Logs.piece`."""
        reader, trial = self._trial(request)
        running = reader.trials[trial].state == "RUNNING"
        if not {"rank", "search", "line"} & request.query.keys():
            found = self._logs.piece(reader.directory, trial, request.query.get("after", ""))
            return encoded({**found, "running": running})
        ranks = self._logs.ranks(reader.directory, trial, final=not running)
        of: dict[int | None, Lines] = dict(ranks.items())
        if "rank" in request.query or not request.query.get("search"):
            rank = number(request, "rank", min(ranks, default=0))
            if rank not in ranks and ranks:
                raise NoExperiment(f"trial {trial} has no rank {rank}; it has {', '.join(map(str, ranks))}")
            of = {rank: ranks[rank]} if ranks else {}
        return encoded({**_asked(request, of), "ranks": list(ranks), "running": running})

    def whole_log(self, request: web.Request) -> str:
        """All output of a trial."""
        reader, trial = self._trial(request)
        return "\n".join([*self._logs.whole(reader.directory, trial), ""])

    def failures(self, request: web.Request) -> bytes:
        """See `failures`."""
        return failures(self._all.open(request.match_info["name"]))

    def code(self, request: web.Request) -> bytes:
        """``files``: see `CodeFile`; ``more``: whether there are others; ``variants``: names of the code of trials."""
        reader = self._all.open(request.match_info["name"])
        files, is_all = code_files(_code(reader, request))
        variants = sorted(
            each.name for each in reader.directory.variants.glob("*") if reader.directory.has_variant(each.name)
        )
        return encoded({"files": [asdict(each) for each in files], "more": not is_all, "variants": variants})

    def code_file(self, request: web.Request) -> bytes:
        """``text`` of a file, null if it is binary; its ``size``; and ``more``, the bytes that are left out."""
        reader, path = self._all.open(request.match_info["name"]), request.match_info["path"]
        try:
            text, size = code_text(_code(reader, request), path)
        except FileNotFoundError:
            raise NoExperiment(f"the code of {reader.name} has no file {path[:200]!r}") from None
        return encoded(
            {"path": path, "text": text, "size": size, "more": 0 if text is None else max(size - MAX_BYTES, 0)}
        )

    def variant(self, request: web.Request) -> bytes:
        """``code``: the variant's name; ``diff``: what it changes in the experiment's code; ``more``: the number of
        characters that were left out at the end."""
        reader, name = self._all.open(request.match_info["name"]), request.match_info["variant"]
        return encoded({"code": name, **_cut(reader.directory.diff_of(name))})

    def difference(self, request: web.Request) -> bytes:
        """Two experiments, or trials of them, see `difference_as_json`; ``diff``: the difference of the code, as text;
        ``more``: the number of its characters that were left out."""
        other = request.query.get("with") or request.match_info["name"]
        one, two = self._side(request, request.match_info["name"], "a"), self._side(request, other, "b")
        with locked(one.reader, two.reader):
            found = plain(difference_as_json(one, two))
        diff = "\n".join(found.pop("code"))
        return encoded({**found, **_cut(diff)})

    def _side(self, request: web.Request, name: str, side: str) -> Side:
        if f"{side}_trial" not in request.query:
            return Side.of(self._all.open(name))
        trial = number(request, f"{side}_trial")
        reader = self._all.with_trial(name, trial)
        return Side(reader, reader.trials[trial])


def failures(reader: ExperimentReader) -> bytes:
    """JSON: ``groups``, see `FailureGroup`; ``failures``, the number of all failures."""
    with reader.lock:
        groups = failure_groups(reader.failures)
    return encoded({"groups": [each.to_json() for each in groups], "failures": sum(each.count for each in groups)})


def _cut(diff: str) -> dict[str, Any]:
    return {"diff": diff[:MAX_DIFF], "more": max(len(diff) - MAX_DIFF, 0)}


def _asked(request: web.Request, ranks: Mapping[int | None, Lines]) -> dict[str, Any]:
    line, text = number(request, "line"), request.query.get("search", "")
    if text:
        if "\n" in text or len(text) > _MOST_SEARCHED:
            raise BadInput(f"search must be at most {_MOST_SEARCHED} letters on one line")
        return logs.search(ranks, text, line)
    limit = number(request, "limit", DEFAULT_LINES)
    return next((logs.window(each, line, limit) for each in ranks.values()), {"lines": [], "line": 1, "total": 0})


def _code(reader: ExperimentReader, request: web.Request) -> Path:
    """The experiment's code, or that of a ``variant``."""
    variant = request.query.get("variant") or None
    if variant is not None and not reader.directory.has_variant(variant):
        raise NoExperiment(f"{reader.name} has no variant {variant[:40]!r} of its code")
    return reader.directory.code_of(variant)
