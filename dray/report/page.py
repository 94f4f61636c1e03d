"""The page: HTML around the figures, with plotly.js included; it needs no network and no other file."""

from __future__ import annotations

import os
import shlex
import time
from contextlib import closing
from html import escape
from pathlib import Path
from typing import cast

import pandas as pd

from dray._version import __version__
from dray.config.searcher import SamplingSearcher
from dray.records.journal import read_journal
from dray.records.listing import open_experiment
from dray.records.logs import grouped_failures, short_error, where
from dray.records.lookup import Name
from dray.records.reader import nan_since_text
from dray.records.rungs import rung_estimates
from dray.report import figures, front, html, slot_time
from dray.report.data import ReportData
from dray.report.figures import RANK_SCALE, Figure
from dray.text import counted, duration, shown, some
from searchers.domains import ranges

ASSETS = Path(__file__).parent
PLOTS = ASSETS / "plots.js"
BEST_SHOWN = 10
BEGINNINGS = {"forked from": "forked_from", "code": "code"}
FAILURES_SHOWN = 30


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
        if out is None:
            out = f"{stored.name}-report.html" if stored.is_copy else stored.directory.path / "report.html"
        return _write(ReportData(reader), Path(out).expanduser())


def _write(report: ReportData, file: Path) -> Path:
    from plotly.offline import get_plotlyjs

    page = _Page(report)
    content = (
        (ASSETS / "page.html")
        .read_text()
        .replace("{{title}}", escape(f"{report.config.name}: {report.metric}"))
        .replace("{{body}}", page.body())
        .replace("{{figures}}", html.script(page.figures))
        .replace("{{plots}}", PLOTS.read_text().replace("export ", ""))
        .replace("{{plotly}}", get_plotlyjs().replace("</script", "<\\/script"))
    )
    unnamed = file.with_name(f".{file.name}.tmp")
    unnamed.write_text(content, encoding="utf-8", errors="backslashreplace")  # errors name files that are not UTF-8
    os.replace(unnamed, file)
    return file


class _Page:
    """The sections, and their figures by the id of their element."""

    def __init__(self, report: ReportData) -> None:
        self.report = report
        self.figures: dict[str, Figure] = {}

    def body(self) -> str:
        sections = [self._head(), self._searched()]
        if not self.report.ranked.empty:
            sections += [front.section(self.report, self._place), self._best()]
            sections += [self._learning(), self._hyperparameters()]
        sections += [slot_time.section(self.report, self._place), self._failures(), self._config()]
        return "\n".join(section for section in sections if section)

    # ------------------------------------------------------------------ sections
    def _head(self) -> str:
        report, now, phases = self.report, time.time(), self.report.timeline
        path = str(report.directory.path)
        none = "none yet" if report.ranked.empty else "none"
        best = none if report.best is None else shown(report.overview.best)
        slot_s = float(((phases["end"] - phases["start"]) * phases["slots"]).sum())
        tiles = [
            (f"best {report.metric}", best),
            ("trials", f"{len(report.trials):,}"),
            ("time", duration(report.overview.ran_s)),
            ("slot time", duration(slot_s)) if slot_s else ("batches", f"{int(report.trials['batches'].sum()):,}"),
        ]
        if report.overview.usage:
            tiles.append(("budget", report.overview.usage))
        began = report.overview.began
        created = f"Created {html.clock(began)}. " if began else ""
        state = report.overview.state.lower()
        troubles = "".join(f'<p class="trouble">{escape(each)}.</p>' for each in report.summaries)
        states = report.state_summary + (f". Ended: {report.overview.reason}" if report.overview.reason else "")
        return f"""<header>
<p class="state {state}">{state.replace("_", " ")}</p>
<h1>{escape(report.config.name)}</h1>
<p class="quiet">{created}As of {html.clock(now)}: {escape(states)}. <span class="path">{escape(path)}</span></p>
{troubles}
<div class="tiles">{"".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)}
</div></header>"""

    def _searched(self) -> str:
        report, searcher, resources = self.report, self.report.config.searcher, self.report.config.resources
        better = "smaller" if searcher.sign == 1 else "larger"
        length = report.length(searcher.length) if searcher.length is not None else "set by its program"
        rungs = ", ".join(f"{rung:g}" for rung in report.rungs[:-1])
        compared = [("metric", f"{report.metric}, {better} is better")]
        if searcher.objectives is not None:
            compared = [
                ("constraint" if each.is_constraint else "objective", str(each)) for each in searcher.objectives.metrics
            ]
        sampler = f", sampler {searcher.sampler.name}" if isinstance(searcher, SamplingSearcher) else ""
        facts = [
            ("method", f"{searcher.name}{sampler}"),
            *compared,
            ("length of a trial", length + (f"; compared at {rungs}" if rungs else "")),
            ("trials", f"{searcher.trial_count:,} at most" if searcher.trial_count else "set by the method"),
            ("slots per trial", resources.share or str(resources.slots_per_trial)),
        ]
        rows = list(ranges(report.config.space.root))
        for column in report.trials.columns:
            name = column.removeprefix("hparams.")
            if column != name and name not in report.domains and name not in report.varying:
                values = report.trials[column].dropna()
                rows += [(name, shown(values.iloc[0]))] if len(values) else []
        return f"""<section><h2>Search</h2>
<dl>{"".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)}</dl>
{html.table(["hyperparameter", "values"], rows)}</section>"""

    def _best(self) -> str:
        report = self.report
        if (trial := report.best) is None:
            return f"<section><h2>The best trial</h2><p>{escape(report.no_best_reason)}.</p></section>"
        row = report.trials.loc[trial]
        had = f" after {counted(cast('int', row['best_batches']), 'batch', ',')}"
        if report.repeats:
            had = f" ({report.overview.best_by})" if report.overview.best_by != "one seed" else f"{had}, from one seed"
        hparams = html.table(
            ["hyperparameter", "value"], [(name, shown(value)) for name, value in report.best_hparams.items()]
        )
        path = str(report.directory.path)
        quoted = shlex.quote(path)
        shell = (
            f"# its weights, a state_dict, and its hyperparameters\ndray checkpoint export {quoted} -o model\n"
            f"# the whole checkpoint\ndray checkpoint download {quoted} -o checkpoint"
        )
        python = f"import dray\n\nresult = dray.Result({path!r})\ntrial = result.load_best_trial()"
        columns = [f"hparams.{name}" for name in report.varying]
        top = report.eligible.head(BEST_SHOWN)
        since = top["nan_since"].notna().any()
        beginnings = {name: column for name, column in BEGINNINGS.items() if top[column].any()}
        rows = [
            [
                str(index),
                str(one["state"]).lower(),
                f"{one['batches']:,}",
                f"{one['best_batches']:,}",
                shown(one["best_metric"]),
                *([nan_since_text(None if pd.isna(one["nan_since"]) else one["nan_since"])] if since else []),
                *one[list(beginnings.values())],
                *(shown(value) for value in one[columns]),
            ]
            for index, one in top.iterrows()
        ]
        optional = [*([""] if since else []), *beginnings]
        ten = html.table(["trial", "state", "batches", "best at", report.metric, *optional, *report.varying], rows)
        return f"""<section><h2>The best trial</h2>
<p>Trial <b>{trial}</b> ({str(row["state"]).lower()}) had {escape(report.metric)}
<b>{shown(report.overview.best)}</b>{had}.</p>
{self._repeats()}
{hparams}
<p>Get it from a shell or from Python:</p>
<pre>{escape(shell)}</pre>
<pre>{escape(python)}</pre>
{f"<h3>The {len(top)} best</h3>{ten}" if len(top) > 1 else ""}</section>"""

    def _repeats(self) -> str:
        if not (told := self.report.repeats_summary):
            return ""
        found, told = self.report.repeats, f"Trained again with other seeds: {told}."
        told += " Intervals are 95% confidence intervals." if found else ""
        return f"<p>{escape(told)}</p>{html.table(found[0], found[1:]) if found else ''}"

    def _learning(self) -> str:
        report = self.report
        coloured = "Coloured by the rung that a trial reached. " if len(report.rungs) > 1 else ""
        curves = figures.curves(report)
        curves["others"] = {metric.label: figures.curves(report, metric) for metric in report.other_metrics}
        return f"""<section><h2>Learning curves</h2>
{html.controls("curves", curves, [report.metric, *curves["others"]])}
{self._place("curves", curves, tall=True)}
<p class="quiet">{report.left_out(len(report.drawn), "curves")} {coloured}</p>
<h3>Best value over time</h3>
{html.controls("history", history := figures.history(report))}
{self._place("history", history)}
{self._rungs()}</section>"""

    def _rungs(self) -> str:
        report = self.report
        found = rung_estimates(report.config, read_journal(report.directory.journal)[: report.records])
        if not any(each.compared for each in found):
            return ""
        rows = [
            (
                report.length(each.length),
                f"{each.trials:,}",
                f"{each.compared:,}",
                "" if each.correlation is None else f"{each.correlation:.2f}",
                f"{each.continues:.0%}",
            )
            for each in found
        ]
        head = ["rung", "trials", "reached the next", "rank correlation with the next", "continue"]
        return f"""<h3>How well each rung ranks</h3>
{html.table(head, rows)}
<p class="quiet">The rank correlation of {escape(report.metric)} at a rung with its value at the next, for all trials
of the rung: near 0, the rung does not predict the next. Estimated from the trials that reached both.</p>"""

    def _hyperparameters(self) -> str:
        report = self.report
        if not report.varying:
            return ""
        stops = ",".join(f"{colour} {share:.0%}" for share, colour in RANK_SCALE)
        slices = {f"slice-{i}": figure for i, figure in enumerate(figures.slices(report).values())}
        legend = "".join(
            f'<span><i style="background:{figures.rung_colour(report.rungs, int(rung))}"></i>'
            f"{escape(report.rung_name(int(rung)))}</span>"
            for rung in sorted(report.shown["rung"].unique())
        )
        return f"""<section><h2>Hyperparameters</h2>{self._importance()}<h3>Parallel coordinates</h3>
<div class="wide"><div style="min-width:{90 * (len(report.varying) + 1)}px">
{self._place("parallel", figures.parallel(report))}</div></div>
<p class="quiet">
<span class="scale">best <i style="background:linear-gradient(90deg,{stops})"></i> worst, by rank.</span>
Drag along an axis to select trials. {report.left_out(len(report.shown))}</p>
<h3>One by one</h3>{html.controls(" ".join(slices), slices["slice-0"])}
<div class="grid">{"".join(self._place(name, figure) for name, figure in slices.items())}</div>
<p class="quiet legend">{legend}</p></section>"""

    def _importance(self) -> str:
        figure, note = figures.importances(self.report)
        if figure is None:
            return f"<p>{escape(note)}</p>"
        place = self._place("importances", figure, height=90 + 34 * len(figure["data"][0]["y"]))
        return f'<h3>Importance</h3>{place}\n<p class="quiet">{escape(note)}</p>'

    def _failures(self) -> str:
        failed, states = self.report.failures, self.report.trials["state"]
        note = "".join(
            f"<p>{counted(number, 'trial', ',')} {what}.</p>"
            for state, what in (
                ("INVALID_HP", "had invalid hyperparameters"),
                ("OUT_OF_MEMORY", "ran out of GPU memory"),
            )
            if (number := int((states == state).sum()))
        )
        if not failed:
            return f"<section><h2>Failures</h2>{note or '<p>None.</p>'}</section>"
        kinds, parts = grouped_failures(failed), []
        for mine in kinds[:FAILURES_SHOWN]:
            line, place = short_error(mine[-1].get("error"))[0], where(mine[-1])
            trials = list(dict.fromkeys(record["trial"] for record in mine))
            parts.append(
                f"<details><summary><b>{len(mine)}×</b> {escape(line)} <span class='quiet'>"
                f"{escape(place)}{' · ' if place else ''}trial {some(trials, 8)}</span>"
                f"</summary><pre>{escape(str(mine[-1].get('error', '')).strip())}</pre></details>"
            )
        if len(kinds) > FAILURES_SHOWN:
            parts.append(f'<p class="quiet">and {len(kinds) - FAILURES_SHOWN} others: see the journal.</p>')
        ended = sum(record["event"] == "gave_up" for record in failed)
        return f"""<section><h2>Failures</h2>{note}
<p>{counted(len(failed), "failure", ",")}; after {ended:,} of them a trial was not restarted.</p>
{"".join(parts)}</section>"""

    def _config(self) -> str:
        return f"""<section><h2>Config</h2><details><summary>experiment.yaml, with all defaults</summary>
<pre>{escape(self.report.directory.config_text())}</pre></details>
<p class="quiet">Written by dray {__version__}.</p></section>"""

    # ------------------------------------------------------------------ pieces
    def _place(self, name: str, figure: Figure, *, tall: bool = False, height: int | None = None) -> str:
        self.figures[name] = figure
        style = f' style="height:{height}px"' if height else ""
        return f'<div class="plot{" tall" if tall else ""}" id="{name}"{style}></div>'
