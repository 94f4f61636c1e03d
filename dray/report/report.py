"""The report: the page of `dray serve` in one file, with what the server would answer about one experiment."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from dray._version import __version__
from dray.private import replaced
from dray.records.listing import StoredExperiment, open_experiment
from dray.records.lookup import Name
from dray.records.reader import ExperimentReader
from dray.serve import table, texts
from dray.serve.answers import encoded
from dray.serve.curves import curves
from dray.serve.described import described
from dray.serve.figures import KINDS, figures_of
from dray.serve.given import Wanted
from dray.serve.searched import searched
from dray.serve.site import FILES

ENTRY = "report.js"
STYLES = ("uplot.css", "page.css")
IMPORT = re.compile(r'^import (?:(\w+)|\{([^}]*)\}) from "\./(?:lib/)?([\w-]+\.js)";$', re.MULTILINE)
EXPORT_FROM = re.compile(r'^export \{([^}]*)\} from "\./([\w-]+\.js)";$', re.MULTILINE)
EXPORTS = re.compile(r"export ?\{([^}]*)\};?\s*\Z")
EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const|let) (\w+))", re.MULTILINE)
DOCUMENT = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body class="report">
<div id="app"><noscript>This report needs JavaScript.</noscript></div>
<script id="saved" type="application/json">$saved</script>
<script>$script</script>
</body>
</html>
""")


def document(title: str, saved: str) -> str:
    """The report as HTML. `saved`: the JSON that ``data.js`` reads in place of a server's answers."""
    script, style = _script(), "".join(FILES[name].read_text(encoding="utf-8") for name in STYLES)
    # Nothing is loaded, and nothing else runs, whatever the names and texts of an experiment are.
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    # In JSON, "<" is only within texts.
    safe = saved.replace("<", "\\u003c")
    return DOCUMENT.substitute(title=escape(title), policy=policy, style=style, saved=safe, script=script)


@cache
def _script() -> str:
    """The modules that the report needs, each in a function, in the order of their imports."""
    modules = "".join(f'modules["{name}"] = (() => {{\n{_as_function(name)}\n}})();\n' for name in _needed(ENTRY, {}))
    return f'"use strict";\n(() => {{\nconst modules = {{}};\n{modules}}})();\n'.replace("</script", "<\\/script")


def _needed(name: str, seen: dict[str, None]) -> Iterator[str]:
    """A module after those that it imports; without those in `seen`."""
    if name in seen:
        return
    seen[name] = None
    text = FILES[name].read_text(encoding="utf-8")
    for each in [*(found[3] for found in IMPORT.finditer(text)), *(found[2] for found in EXPORT_FROM.finditer(text))]:
        yield from _needed(each, seen)
    yield name


def _as_function(name: str) -> str:
    """The body of a function that returns what a module exports."""
    text, exports = FILES[name].read_text(encoding="utf-8"), list[str]()

    def imported(found: re.Match[str]) -> str:
        default, names, module = found.groups()
        return f'const {{ {f"default: {default}" if default else _renamed(names)} }} = modules["{module}"];'

    def passed_on(found: re.Match[str]) -> str:
        exports.append(found[1])
        return f'const {{{found[1]}}} = modules["{found[2]}"];'

    def listed(found: re.Match[str]) -> str:
        exports.append(re.sub(r"(\w+) as (\w+)", r"\2: \1", found[1]))
        return ""

    def declared(found: re.Match[str]) -> str:
        exports.append(found[2])
        return found[1]

    ways = [(EXPORTS, listed)]
    if FILES[name].parent.name != "lib":  # which says all at its end, and has other things in comments
        ways += [(IMPORT, imported), (EXPORT_FROM, passed_on), (EXPORT, declared)]
    for pattern, replace in ways:
        text = pattern.sub(replace, text)
    return f"{text.replace('import.meta.url', 'document.baseURI')}\nreturn {{ {', '.join(exports)} }};"


def _renamed(names: str) -> str:
    return re.sub(r"(\w+) as (\w+)", r"\1: \2", names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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
