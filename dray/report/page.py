"""The page: HTML around the figures, with plotly.js in it; it needs no network and no other file."""

from __future__ import annotations

import os
import shlex
import time
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import dray
from dray.errors import ExperimentError
from dray.records.listing import found
from dray.records.logs import alike, last_line, where
from dray.records.lookup import Name
from dray.records.outcomes import FAILED, diverged_told, failures_told, no_best_told, since_told
from dray.records.result import flat
from dray.records.timeline import PHASES
from dray.report import figures, html
from dray.report.figures import PHASE_COLOURS, PHASE_NAMES, RANK_SCALE, Figure
from dray.report.seen import MOST_CURVES, MOST_TRIALS, Seen

ASSETS = Path(__file__).parent
BEST_SHOWN = 10
FAILURES_SHOWN = 30

_PHASE_TOLD = {
    "booting": "a worker group's processes start, and import torch",
    "starting": "from a trial's hyperparameters to its first batch",
    "training": "training batches, without waiting for data",
    "data": "the trial waits for its data loader",
    "validating": "",
    "checkpointing": "training waits while a checkpoint is made",
    "waiting": "the trial waits for the search's decisions, and for other ranks",
    "ending": "from the decision on a trial's last report until its processes are free",
    "idle": "running, without a trial",
}


def write_report(path: Name, out: str | os.PathLike[str] | None = None) -> Path:
    """Write a report on an experiment, also while it runs: one HTML file that needs nothing else.

    Args:
        path: the experiment, as the command takes it: its number, a unique part of its name, ``"latest"``, its
            directory, or ``s3://...``.
        out: the file to write; by default ``report.html`` in the experiment's directory, or here for one in an object
            store.

    Returns:
        The file.

    Raises:
        NoExperiment: there is none.
        ExperimentError: plotly or scikit-learn is not installed.
        JournalError: its journal is damaged.
    """
    with found(path) as it:
        if out is None:
            out = f"{it.name}-report.html" if it.is_copy else it.directory.path / "report.html"
        return _write(Seen(it.directory.path), Path(out).expanduser())


def _write(seen: Seen, file: Path) -> Path:
    try:
        import sklearn  # noqa: F401
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as missing:
        raise ExperimentError(f"a report needs {missing.name}: pip install 'dray[report]'") from None
    page = _Page(seen)
    content = (
        (ASSETS / "page.html")
        .read_text()
        .replace("{{title}}", escape(f"{seen.config.name}: {seen.metric}"))
        .replace("{{body}}", page.body())
        .replace("{{figures}}", html.script(page.figures))
        .replace("{{plotly}}", get_plotlyjs().replace("</script", "<\\/script"))
    )
    unnamed = file.with_name(f".{file.name}.tmp")
    unnamed.write_text(content)
    os.replace(unnamed, file)
    return file


class _Page:
    """The sections, and the figures in them by the id of their element."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.figures: dict[str, Figure] = {}

    def body(self) -> str:
        sections = [self._head(), self._searched()]
        if not self.seen.ranked.empty:
            sections += [self._best(), self._learning(), self._hyperparameters()]
        sections += [self._timeline(), self._failures(), self._config()]
        return "\n".join(section for section in sections if section)

    # ------------------------------------------------------------------ sections
    def _head(self) -> str:
        seen, now = self.seen, time.time()
        states = seen.trials["state"].value_counts()
        words = {"INVALID_HP": "with invalid hyperparameters"}
        counted = ", ".join(f"{count:,} {words.get(str(state), str(state).lower())}" for state, count in states.items())
        none = "none yet" if seen.ranked.empty else "none"
        best = none if seen.best is None else html.number(seen.ranked.iloc[0]["best_metric"])
        slot_s = float(((seen.timeline["end"] - seen.timeline["start"]) * seen.timeline["slots"]).sum())
        tiles = [
            (f"best {seen.metric}", best),
            ("trials", f"{len(seen.trials):,}"),
            ("time", html.duration(seen.overview.ran_s)),
            ("slot time", html.duration(slot_s)) if slot_s else ("batches", f"{int(seen.trials['batches'].sum()):,}"),
        ]
        began = seen.overview.began
        told = f"Created {html.clock(began)}. " if began else ""
        state = seen.overview.state.lower()
        failed, diverged = failures_told(seen.trials["state"]), diverged_told(seen.trials)
        # A search is no success as a whole if trials of it failed.
        colour = "error" if failed and state == "completed" else state
        troubles = "".join(f'<p class="trouble">{escape(told)}.</p>' for told in (failed, diverged) if told)
        return f"""<header>
<p class="state {colour}">{state}</p>
<h1>{escape(seen.config.name)}</h1>
<p class="quiet">{told}As of {html.clock(now)}: {counted}. <span class="path">{escape(str(seen.path))}</span></p>
{troubles}
<div class="tiles">{"".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)}
</div></header>"""

    def _searched(self) -> str:
        seen, searcher, resources = self.seen, self.seen.config.searcher, self.seen.config.resources
        better = "smaller" if searcher.smaller_is_better else "larger"
        length = seen.length(searcher.length) if searcher.length is not None else "set by its program"
        rungs = ", ".join(f"{rung:g}" for rung in seen.rungs[:-1])
        facts = [
            ("method", f"{searcher.name}, sampler {seen.sampler}"),
            ("metric", f"{seen.metric}, {better} is better"),
            ("length of a trial", length + (f"; compared at {rungs}" if rungs else "")),
            ("trials", f"{searcher.trial_count:,} at most" if searcher.trial_count else "set by the method"),
            ("slots per trial", resources.share or str(resources.slots_per_trial)),
        ]
        rows = [(name, *html.domain_told(seen.domains[name])) for name in seen.domains]
        same = [column for column in seen.trials.columns if column.startswith("hparams.")]
        constants = [
            (name, "constant", html.shown(_first(seen.trials[column])))
            for column in same
            if (name := column.removeprefix("hparams.")) not in seen.domains
            and name not in seen.varying
            and _first(seen.trials[column]) is not None
        ]
        return f"""<section><h2>Search</h2>
<dl>{"".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)}</dl>
{html.table(["hyperparameter", "kind", "values"], [*rows, *constants])}</section>"""

    def _best(self) -> str:
        seen = self.seen
        if (trial := seen.best) is None:
            return f"<section><h2>The best trial</h2><p>{escape(no_best_told(seen.ranked, seen.metric))}.</p></section>"
        row = seen.ranked.iloc[0]
        at = int(seen.result.best_batches()[trial])
        drawn = seen.views[trial].hparams or {}
        hparams = html.table(["hyperparameter", "value"], [(name, html.shown(value)) for name, value in flat(drawn)])
        quoted = shlex.quote(str(seen.path))
        shell = (
            f"# its weights, a state_dict, and its hyperparameters\ndray checkpoint export {quoted} -o model\n"
            f"# the whole checkpoint\ndray checkpoint download {quoted} -o checkpoint"
        )
        python = f"import dray\n\nresult = dray.Result({str(seen.path)!r})\ntrial = result.load_best_trial()"
        columns = [f"hparams.{name}" for name in seen.varying]
        top = seen.ranked[seen.ranked["state"] != FAILED].head(BEST_SHOWN)
        at_best = seen.result.best_batches()
        since = top["nan_since"].notna().any()
        rows = [
            [
                str(index),
                str(one["state"]).lower(),
                f"{at_best[one['trial_id']]:,}",
                html.number(one["best_metric"]),
                *([since_told(one["nan_since"])] if since else []),
                *(html.shown(value) for value in one[columns]),
            ]
            for index, one in top.iterrows()
        ]
        ten = html.table(["trial", "state", "batches", seen.metric, *([""] if since else []), *seen.varying], rows)
        return f"""<section><h2>The best trial</h2>
<p>Trial <b>{trial}</b> ({str(row["state"]).lower()}) had {escape(seen.metric)} <b>{html.number(row["best_metric"])}</b>
after {at:,} batches.</p>
{hparams}
<p>Get it from a shell or from Python:</p>
<pre>{escape(shell)}</pre>
<pre>{escape(python)}</pre>
{f"<h3>The {len(top)} best</h3>{ten}" if len(top) > 1 else ""}</section>"""

    def _learning(self) -> str:
        seen = self.seen
        coloured = "Coloured by the rung that a trial reached. " if len(seen.rungs) > 1 else ""
        curves = figures.curves(seen)
        curves["others"] = {metric.label: figures.curves(seen, metric) for metric in seen.other_metrics}
        return f"""<section><h2>Learning curves</h2>
{html.controls("curves", curves, [seen.metric, *curves["others"]])}
{self._place("curves", curves, tall=True)}
<p class="quiet">{self._left_out(len(seen.drawn), MOST_CURVES, "curves")}{coloured}</p>
<h3>Best value over time</h3>
{html.controls("history", history := figures.history(seen))}
{self._place("history", history)}</section>"""

    def _hyperparameters(self) -> str:
        seen = self.seen
        if not seen.varying:
            return ""
        left_out = self._left_out(len(seen.shown), MOST_TRIALS, "trials")
        parts = [f"<section><h2>Hyperparameters</h2>{self._importance()}<h3>Parallel coordinates</h3>"]
        width = 90 * (len(seen.varying) + 1)
        parts.append(
            f'<div class="wide"><div style="min-width:{width}px">'
            f"{self._place('parallel', figures.parallel(seen))}</div></div>"
        )
        stops = ",".join(f"{colour} {share:.0%}" for share, colour in RANK_SCALE)
        scale = f'<i style="background:linear-gradient(90deg,{stops})"></i>'
        parts.append(
            f'<p class="quiet"><span class="scale">best {scale} worst, by rank.</span> '
            f"Drag along an axis to select trials. {left_out}</p>"
        )
        slices = {f"slice-{i}": figure for i, figure in enumerate(figures.slices(seen).values())}
        parts.append(f'<h3>One by one</h3>{html.controls(" ".join(slices), slices["slice-0"])}<div class="grid">')
        parts += [self._place(name, figure) for name, figure in slices.items()]
        legend = "".join(
            f'<span><i style="background:{figures.rung_colour(seen, int(rung))}"></i>'
            f"{escape(seen.rung_name(int(rung)))}</span>"
            for rung in sorted(seen.shown["rung"].unique())
        )
        parts.append(f'</div><p class="quiet legend">{legend}</p></section>')
        return "\n".join(parts)

    def _importance(self) -> str:
        seen, found = self.seen, self.seen.importance
        if found is None:
            return "<p>Too few trials to tell which hyperparameters mattered.</p>"
        at = seen.length(seen.compared_at or 0, seen.along)
        figure = figures.importances(seen)
        if figure is None:
            return f"<p>The {found.trials:,} trials at {at} do not show which hyperparameters mattered.</p>"
        place = self._place("importances", figure, height=90 + 34 * len(found.shares))
        return f"""<h3>Importance</h3>{place}
<p class="quiet">Permutation importance for {escape(seen.metric)} at {at}, which two thirds of the trials have reached:
how much worse a random forest predicts a trial's rank when one hyperparameter is shuffled. The forest explains
{found.explained:.0%} of the ranks of trials that it has not seen ({found.trials:,} trials).</p>"""

    def _timeline(self) -> str:
        seen = self.seen
        table = seen.timeline
        if table.empty:
            return ""
        spent = ((table["end"] - table["start"]) * table["slots"]).groupby(table["phase"]).sum()
        total = float(spent.sum())
        rows = [
            (
                f'<i style="background:{PHASE_COLOURS[phase]}"></i>{PHASE_NAMES.get(phase, phase)}',
                f"{spent[phase] / total:.1%}",
                html.duration(float(spent[phase])),
                escape(_PHASE_TOLD[phase]),
            )
            for phase in PHASES
            if phase in spent.index
        ]
        rows.sort(key=lambda row: -float(row[1].rstrip("%")))
        before = float(table["start"].min()) - (seen.overview.began or float(table["start"].min()))
        parts = ["<section><h2>Use of slot time</h2>"]
        # Its squares are the legend of the figures below.
        parts.append(f'<div class="phases">{html.table(["phase", "share", "slot time", ""], rows, raw=True)}</div>')
        if before > 0:
            parts.append(f'<p class="quiet">Before the first worker group was started: {html.duration(before)}.</p>')
        shares, stretches = figures.shares(seen), figures.stretches(seen)
        if shares is not None:
            parts.append(self._place("shares", shares))
        if stretches is not None:
            parts.append("<h3>Each worker group</h3>")
            parts.append(self._place("stretches", stretches, height=stretches["layout"]["height"]))
            parts.append('<p class="quiet">Trials report the time of each phase every five seconds: a bar each.</p>')
        else:
            parts.append(f'<p class="quiet">{len(table):,} intervals are too many to show one by one.</p>')
        parts.append(_system(seen))
        return "\n".join(parts) + "</section>"

    def _failures(self) -> str:
        seen = self.seen
        failed = [record for record in seen.records if record.get("event") in ("restarted", "gave_up")]
        invalid = int((seen.trials["state"] == "INVALID_HP").sum())
        told = f"<p>{invalid:,} trial{'s' * (invalid != 1)} had invalid hyperparameters.</p>" if invalid else ""
        if not failed:
            return f"<section><h2>Failures</h2>{told or '<p>None.</p>'}</section>"
        kinds = alike(failed)
        parts = [f"<section><h2>Failures</h2>{told}"]
        ended = sum(record["event"] == "gave_up" for record in failed)
        parts.append(
            f"<p>{len(failed):,} failure{'s' * (len(failed) != 1)}; "
            f"after {ended:,} of them a trial was not restarted.</p>"
        )
        for mine in kinds[:FAILURES_SHOWN]:
            line, place = last_line(mine[-1].get("error")), where(mine[-1])
            trials = list(dict.fromkeys(record["trial"] for record in mine))
            some = ", ".join(map(str, trials[:8])) + (f" and {len(trials) - 8} more" if len(trials) > 8 else "")
            parts.append(
                f"<details><summary><b>{len(mine)}×</b> {escape(line)} <span class='quiet'>"
                f"{escape(place)}{' · ' if place else ''}trial {some}</span>"
                f"</summary><pre>{escape(str(mine[-1].get('error', '')).strip())}</pre></details>"
            )
        if len(kinds) > FAILURES_SHOWN:
            parts.append(f'<p class="quiet">and {len(kinds) - FAILURES_SHOWN} others: see the journal.</p>')
        return "\n".join(parts) + "</section>"

    def _config(self) -> str:
        return f"""<section><h2>Config</h2><details><summary>experiment.yaml, with all defaults</summary>
<pre>{escape(self.seen.directory.config_file.read_text())}</pre></details>
<p class="quiet">Written by dray {dray.__version__}.</p></section>"""

    # ------------------------------------------------------------------ pieces
    def _place(self, name: str, figure: Figure, *, tall: bool = False, height: int | None = None) -> str:
        self.figures[name] = figure
        style = f' style="height:{height}px"' if height else ""
        return f'<div class="plot{" tall" if tall else ""}" id="{name}"{style}></div>'

    def _left_out(self, shown: int, most: int, what: str) -> str:
        there = len(self.seen.ranked)
        if shown == there:
            return ""
        return f"{shown:,} of {there:,} {what} are shown: the {most // 2:,} best, and others evenly by rank. "


def _system(seen: Seen) -> str:
    """What trials used of their machines."""
    rows = seen.result.system_metrics
    names = {
        "batches_per_second": "batches per second",
        "cpu_cores": "CPU cores per trial",
        "memory_gb": "memory per trial, GB",
        "gpu_percent": "GPU utilization, % of time",
        "gpu_memory_gb": "GPU memory per rank, GB",
    }
    table = []
    for name, told in names.items():
        values = rows.loc[rows["name"] == name, "value"]
        if len(values):
            low, middle, high = values.quantile(np.array([0.05, 0.5, 0.95]))
            table.append((told, html.rough(middle), f"{html.rough(low)} to {html.rough(high)}"))
    if not table:
        return ""
    return "<h3>Resource usage of trials</h3>" + html.table(["", "median", "5th to 95th percentile"], table)


def _first(values: pd.Series[Any]) -> Any:
    return next((value for value in values if value is not None), None)
