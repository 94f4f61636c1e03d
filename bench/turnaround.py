"""The time from the last report of one trial to the first batch of the next on the same worker group.

Each case is an ASHA search of the digits trials, in a process and a Ray of its own. The last report is the end of the
trial's last validation on rank 0, so that the checkpoint which follows is counted; the first batch is that of the
group's last rank.

    python bench/turnaround.py [--cases one-worker late-groups ...] [--trials 64] [--rounds 1] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from _measure import (
    BENCH,
    DIGITS,
    Paper,
    Ran,
    Stamp,
    arguments,
    end_on_sigterm,
    machine,
    of_kind,
    perform,
    quantile,
    run_in_turn,
    stamp,
    stamp_counts,
    verdict,
)

if TYPE_CHECKING:
    from dray.leases.messages import Message
    from searchers import Action, Event, Method

TARGET_S = 0.1
PAUSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One situation.

    Args:
        label: its name in the table.
        slots: workers a group.
        cpus: that the cluster claims to have, one per slot; None: dray starts its own cluster with this machine's CPUs.
        added: CPUs of a node that joins in the middle.
        kill_handle: kill the process of a Tune handle in the middle.
        quiet: the search creates no trial for `PAUSE_S`, while one trial is still training.
        busy: the search gives no answer for `PAUSE_S`.
        sleep_s: how long each trial sleeps in its first batch, so that there is a middle, and CPU time for all groups.
        upload_s: how long the upload of a checkpoint takes to an object store on this machine; 0: they are in a
            directory.
        more: a multiple of ``--trials``, for the number of trials.
        groups: expected at the end; None: as many as this machine has room for.
    """

    label: str
    slots: int = 1
    cpus: int | None = None
    added: int = 0
    kill_handle: bool = False
    quiet: bool = False
    busy: bool = False
    sleep_s: float = 0.0
    upload_s: float = 0.0
    more: float = 1.0
    groups: int | None = None

    @property
    def disturbed(self) -> bool:
        """Whether something happens in the middle."""
        return bool(self.added or self.kill_handle or self.quiet or self.busy)


CASES = {
    "one-worker": Case(label="1 worker a group"),
    "two-workers": Case(label="2 workers a group", slots=2, groups=1),
    "one-group": Case(label="one group alone", cpus=1, groups=1),
    "killed-handle": Case(label="a Tune handle killed", kill_handle=True, sleep_s=0.2, more=2),
    "added-group": Case(label="a group added", cpus=1, added=1, sleep_s=0.5, more=2, groups=2),
    "late-groups": Case(label="eight groups, two of them late", cpus=6, added=2, sleep_s=4.0, more=3, groups=8),
    "slow-uploads": Case(label="uploads of 2 s", upload_s=2.0, sleep_s=2.5, more=0.25, cpus=1, groups=1),
    "quiet-search": Case(label=f"a search that creates nothing for {PAUSE_S:g} s", quiet=True, sleep_s=0.1, more=2),
    "busy-search": Case(label=f"a search that answers nothing for {PAUSE_S:g} s", busy=True, sleep_s=0.1, more=2),
}


# --------------------------------------------------------------------------------------------------- in its own process
def child(name: str, directory: Path, trials: int) -> None:
    """Run one case."""
    end_on_sigterm()
    case = CASES[name]
    config = _config(case, trials)
    method = _disturbed(case, config) if case.quiet or case.busy else None
    import dray

    with _object_store(case.upload_s) as store, _cluster(case) as (address, add_node):
        config |= store
        where = {"model_dir": BENCH / "model", "path": directory / "experiment", "address": address}
        experiment = dray.Experiment(config, method=method, **where)
        experiment.run(on_message=_Middle(case, trials, add_node, lambda: experiment.last_run.driver.handle))
        stamp_counts(experiment)


def _config(case: Case, trials: int) -> dict[str, Any]:
    import yaml

    config: dict[str, Any] = yaml.safe_load((DIGITS / "asha.yaml").read_text())
    config["entrypoint"] = "timed:TimedDigits"
    config["searcher"]["max_trials"] = trials
    config["resources"]["slots_per_trial"] = case.slots
    config["hyperparameters"]["sleep_s"] = case.sleep_s
    if case.upload_s:  # at rungs and ends only: a trial's own earlier upload would delay them
        config["checkpoint_policy"] = "none"
    if case.quiet:
        config["hyperparameters"] |= {"slow_trials": [trials // 2], "slow_s": PAUSE_S}
    return config


@contextlib.contextmanager
def _object_store(upload_s: float) -> Iterator[dict[str, Any]]:
    """The part of a config for an S3 server whose uploads of a checkpoint take this long."""
    if not upload_s:
        yield {}
        return
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    from moto import server

    from tests.storage.s3 import LocalS3

    dispatch = server.DomainDispatcherApplication.__call__

    def slow(self: Any, environ: dict[str, Any], respond: Any) -> Any:
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith("manifest.json"):
            time.sleep(upload_s)
        return dispatch(self, environ, respond)

    server.DomainDispatcherApplication.__call__ = slow
    store = LocalS3()
    try:
        yield {"checkpoint_storage": {"storage_path": store.uri("bench")}}
    finally:
        store.stop()


@contextlib.contextmanager
def _cluster(case: Case) -> Iterator[tuple[str | None, Callable[[], object]]]:
    """The address of a cluster with the case's CPUs, and how to add a node to it; None where dray starts its own."""
    if case.cpus is None:
        yield None, lambda: None
        return
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": case.cpus, "include_dashboard": False})

    def add_node() -> None:
        # In a thread, where the signal handlers of a node cannot be set; those of the head end both.
        cluster._shutdown_at_exit = False
        cluster.add_node(num_cpus=case.added, wait=False)

    try:
        yield cluster.address, add_node
    finally:
        ray.shutdown()
        cluster.shutdown()


class _Middle:
    """Listens to the desk's messages, and disturbs the run according to the case once a third of the trials have
    ended."""

    def __init__(self, case: Case, trials: int, add_node: Callable[[], object], handle: Callable[[], int]) -> None:
        self._case, self._third, self._add_node, self._handle = case, trials // 3, add_node, handle
        self._ended, self._groups, self._done = 0, set[str](), False

    def __call__(self, message: Message) -> None:
        from dray.leases.messages import GroupEnded, GroupReady, TrialLeft

        case = self._case
        match message:
            case GroupReady():
                self._groups.add(message.group)
                stamp("joined", group=message.group)
            case GroupEnded() if message.is_lost:
                stamp("lost", group=message.group)
            case TrialLeft():
                self._ended += 1
        early = self._ended < self._third or (case.cpus is not None and len(self._groups) < case.cpus)
        if self._done or early:
            return
        self._done = True
        if case.kill_handle:
            os.kill(self._handle(), signal.SIGKILL)
            stamp("disturbed")
        elif case.added:
            # In a thread, since it takes seconds, and the driver serves others meanwhile.
            threading.Thread(target=self._add_node, daemon=True).start()
            stamp("node_added")


def _disturbed(case: Case, config: dict[str, Any]) -> Method:
    """The config's method, made to go quiet or to be busy in the middle. Run it as the custom method of the config."""
    from dray.config.load import load_config
    from dray.config.search import build_method

    method, trials = build_method(load_config(config)), config["searcher"]["max_trials"]
    common = ("metric", "smaller_is_better", "max_length")
    config["searcher"] = {"name": "custom", **{field: config["searcher"][field] for field in common}}
    return Quiet(method, trials // 2) if case.quiet else Busy(method, trials)


class Quiet:
    """A method that holds back new trials until one certain trial has ended."""

    def __init__(self, method: Method, until: int) -> None:
        self._method, self._until, self._held = method, until, list[Any]()
        self._over = False

    @property
    def rungs(self) -> tuple[float, ...]:
        return self._method.rungs

    def start(self) -> list[Action]:
        return self._pass(self._method.start())

    def on(self, event: Event) -> list[Action]:
        from searchers import Exited

        actions = self._method.on(event)
        if isinstance(event, Exited) and event.trial == self._until and not self._over:
            self._over = True
            stamp("disturbed")
        return self._pass(actions)

    def progress(self, trained: Mapping[int, float]) -> float:
        return self._method.progress(trained)

    def extend(self, *, max_trials: int | None = None, max_length: int | None = None) -> NoReturn:
        raise NotImplementedError("this method is for a benchmark, which does not extend")

    def dump(self) -> dict[str, object]:
        raise NotImplementedError("this one is for a benchmark, which does not resume")

    def load(self, state: dict[str, object]) -> NoReturn:
        raise NotImplementedError("this one is for a benchmark, which does not resume")

    def _pass(self, actions: list[Action]) -> list[Action]:
        from searchers import Create

        self._held += actions
        # Trials are created in order: all after the first that has to wait, wait too.
        now = [a for a in self._held if self._over or not isinstance(a, Create) or a.trial <= self._until]
        self._held = [a for a in self._held if a not in now]
        return now


class Busy(Quiet):
    """A method that takes long for one answer, as if it were fitting a model."""

    def __init__(self, method: Method, trials: int) -> None:
        super().__init__(method, trials)
        self._third, self._ended = trials // 3, 0

    def on(self, event: Event) -> list[Action]:
        from searchers import Exited

        self._ended += isinstance(event, Exited)
        if self._ended == self._third and not self._over:
            self._over = True
            time.sleep(PAUSE_S)
            stamp("disturbed")
        return self._pass(self._method.on(event))


# -------------------------------------------------------------------------------------------------------------- figures
@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The gap between two trials of a group."""

    report: float
    batch: float

    @property
    def s(self) -> float:
        """Seconds."""
        return self.batch - self.report


def gaps_of(stamps: Sequence[Stamp], size: int) -> list[Gap]:
    """The gaps between trials, for all groups of this many workers."""
    firsts: dict[tuple[int, int], list[Stamp]] = {}
    for s in of_kind(stamps, "first_batch"):
        firsts.setdefault((s.fields["trial"], s.fields["nth"]), []).append(s)
    gaps = []
    last: dict[int, float] = {}
    for s in of_kind(stamps, "first_batch", "validated"):
        if s.fields["rank"] != 0:
            continue
        if s.kind == "validated":
            last[s.pid] = s.time
        elif s.pid in last:
            ranks = firsts[s.fields["trial"], s.fields["nth"]]
            assert len(ranks) == size, f"trial {s.fields['trial']} ran on {len(ranks)} ranks, not on {size}"
            gaps.append(Gap(report=last.pop(s.pid), batch=max(rank.time for rank in ranks)))
    return gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one run of a case."""

    case: Case
    ran: Ran

    @property
    def disturbed_at(self) -> float:
        """The time when the disturbance was over: the first new group had started, the pause had ended, ..."""
        if self.case.added:
            added = of_kind(self.ran.stamps, "node_added")
            joined = [s.time for s in of_kind(self.ran.stamps, "joined") if added and s.time > added[0].time]
            return joined[0] if joined else float("inf")
        return next((s.time for s in of_kind(self.ran.stamps, "disturbed")), float("inf"))

    @property
    def gaps(self) -> tuple[list[float], list[float], list[float]]:
        """Gaps before, across and after the disturbance; across a pause of the search, counted from its end."""
        at, before, across, after = self.disturbed_at, [], [], []
        if not self.case.disturbed:
            at = float("inf")
        for gap in gaps_of(self.ran.stamps, self.case.slots):
            if gap.batch < at:
                before.append(gap.s)
            elif gap.report > at:
                after.append(gap.s)
            else:
                across.append(gap.batch - at if self.case.quiet or self.case.busy else gap.s)
        return before, across, after


def report(paper: Paper, figures: dict[str, list[Figures]]) -> None:
    """Print the table."""
    paper.say("\nSeconds from the last report of a trial to the first batch of the next on the same group\n")
    rows = []
    for runs in figures.values():
        case = runs[0].case
        before, across, after = ([s for f in runs for s in f.gaps[i]] for i in range(3))
        counts = [of_kind(f.ran.stamps, "counts")[0].fields for f in runs]
        groups, handles, lost = ("+".join(str(c[key]) for c in counts) for key in ("groups", "handles", "lost"))
        for when, gaps in (("before", before), ("across", across), ("after", after)) if case.disturbed else (
            ("", before),
        ):  # fmt: skip
            judged = when in ("", "after")
            rows.append(
                [
                    case.label if judged else "",
                    when,
                    str(len(gaps)),
                    *(f"{quantile(gaps, share):.3f}" if gaps else "-" for share in (0.5, 0.9, 1.0)),
                    verdict(quantile(gaps, 0.5) <= TARGET_S) if judged else "",
                    *((groups, handles, lost) if judged else ("", "", "")),
                ]
            )
    head = ["case", "when", "gaps", "median", "90th %", "most", f"median <= {TARGET_S:g}", "groups started",
            "handles started", "groups lost"]  # fmt: skip
    paper.table(head, rows)
    paper.say(
        "\nacross: gaps that contain the event; for a search that pauses, from the end of the pause.\n"
        "Groups lost: none was killed, so the number must be 0. Handles: one; a killed one is replaced."
    )
    for name, runs in figures.items():
        for f in runs:
            happened = _what_happened(f)
            if happened:
                paper.say(f"{name}: {happened}")


def _what_happened(f: Figures) -> str:
    joined = [s.time for s in of_kind(f.ran.stamps, "joined")]
    problems = []
    if f.case.groups is not None and len(joined) != f.case.groups:
        problems.append(f"MISSED: {len(joined)} groups came up, not {f.case.groups}")
    lost = of_kind(f.ran.stamps, "lost")
    if lost:
        problems.append(f"MISSED: {len(lost)} groups were lost")
    if f.case.disturbed and not f.gaps[2]:
        problems.append("MISSED: no trial ran after the event; give it more --trials")
    if f.case.added:
        added = of_kind(f.ran.stamps, "node_added")[0].time
        after = ", ".join(f"{at - added:.1f}" for at in joined if at > added)
        problems.append(f"groups came up {after or 'never'} s after the node was added")
    return "; ".join(problems)


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Run all cases, and print the results."""
    paper.say(machine())
    figures: dict[str, list[Figures]] = {name: [] for name in options.cases}
    trials = {name: int(options.trials * CASES[name].more) for name in options.cases}
    for name, ran in run_in_turn(__file__, trials, options.rounds, directory):
        figures[name].append(Figures(case=CASES[name], ran=ran))
    report(paper, figures)


def main() -> None:
    """Read the command line and measure."""
    if sys.argv[1:2] == ["--child"]:
        name, directory, trials = sys.argv[2:]
        return child(name, Path(directory), int(trials))
    parser = arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=64, help="trials per search (default 64)")
    parser.add_argument("--rounds", type=int, default=1, help="how often each case is run (default 1)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="which (default: all)")
    options = parser.parse_args()
    perform(measure, options, name="turnaround", title="Turn-around: from one trial to the next")


if __name__ == "__main__":
    main()
