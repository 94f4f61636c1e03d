"""When the core of a run carries out its decisions."""

from __future__ import annotations

from typing import Any

from dray.config.load import load_config
from dray.config.notify import Watched
from dray.experiment.alerts import Alerts
from dray.experiment.core import RunCore
from dray.experiment.driver import OpenSearch
from dray.experiment.limits import Limits
from dray.groups.effects import StartGroup
from dray.groups.lender import GroupKind, Lender, OnPool
from dray.groups.pool import GroupsPlan
from searchers.asha import ASHA
from searchers.search import Search
from searchers.space import parse
from tests.experiment.test_driver import CONFIG, SPACE
from tests.groups.clusters import cluster, cpus

KIND = GroupKind(slots=cpus(), environment={}, deterministic=False, collective_timeout_s=600.0, reuse_workers=True)


def test_groups_start_in_the_burst_in_which_their_trials_are_queued() -> None:
    performed: list[Any] = []
    config, records = load_config(CONFIG), list[Any]()
    method = ASHA(max_trials=2, max_length=16, num_rungs=2, divisor=4, max_concurrent_trials=2)
    search = Search(method, parse(SPACE), seed=0, smaller_is_better=True, log=records.append)
    search.start()
    limits = Limits(config, records)
    alerts = Alerts(Watched(), limits, records)
    opened = OpenSearch(search=search, config=config, records=records, limits=limits, alerts=alerts)
    core = RunCore("run", opened, write=lambda records: None, perform=performed.append)
    plan, emit = GroupsPlan(own_cluster=True), core.effects.append
    core.lender = Lender(cluster({"CPU": 2.0}), lambda: 0.0, plan=plan, emit=emit, counts=core.driver.counts)
    core.begin(KIND, {})
    core.settle()
    assert [type(each.effect) for each in performed if isinstance(each, OnPool)] == [StartGroup]
