"""``dray serve`` on a real Ray: experiments share its worker groups, and nothing is lost when any process dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import dray
from dray.agents.tools import Tools
from dray.cli import main
from dray.code.archive import pack
from dray.serve import client, tokens
from dray.serve.client import Server, Unreachable
from dray.serve.control import Submitted
from dray.serve.quota import Quota
from dray.serve.refusals import Invalid, WrongState
from dray.serve.verbs import OnServer
from tests.agents.conftest import Agent
from tests.ray.harness import STARTS_IN_S, TRIALS, attempts, descendants, journal, lines, recorded, saved_batches
from tests.ray.scraping import scraped, values
from tests.ray.serving import Served, copy_of, served
from tests.repository import Repository

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_is_up")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, ray_is_up: None) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("server") / "results") as found:
        yield found


def losses(record: Path) -> dict[tuple[int, int], set[float]]:
    """All losses that were noted of each batch of each trial."""
    found: dict[tuple[int, int], set[float]] = {}
    for line in lines(record):
        if "batch" in line:
            found.setdefault((line["trial"], line["batch"]), set()).add(line["loss"])
    return found


def check_training(record: Path, *, trials: int, batches: int) -> None:
    """Each batch was trained, one process at a time, and when it was trained again it had the same weights."""
    attempts(record)
    found = losses(record)
    assert sorted(found) == [(trial, batch) for trial in range(trials) for batch in range(batches)]
    assert all(len(values) == 1 for values in found.values())


def has_saved(server: Served, submitted: Submitted) -> bool:
    return saved_batches(server.path(submitted), 0) >= 10


# -------------------------------------------------------------------------------------------------------- one design
def test_the_second_experiment_trains_in_the_processes_of_the_first_with_its_own_code(
    server: Served, tmp_path: Path
) -> None:
    new = ('return {"loss": loss}', 'return {"loss": loss, "new": 1.0}')
    changed = copy_of(TRIALS, tmp_path / "changed", recorded=new)
    first = server.submit("first")
    server.wait_until(first, "COMPLETED")
    second = server.submit("second", code=changed)
    server.wait_until(second, "COMPLETED")
    [one], [other] = ({line["pid"] for line in lines(server.record(name))} for name in ("first", "second"))
    assert one == other
    bars = {bar["experiment"]: bar for bar in server.client.queue()["lanes"]["bars"]}
    before, after = bars[first.name], bars[second.name]
    assert (before["outcome"], before["lanes"]) == ("completed", after["lanes"])
    assert before["began"] < before["ended"] <= after["began"] < after["ended"]
    assert "new" not in dray.Result(server.path(first)).metrics["name"].to_numpy()
    assert "new" in dray.Result(server.path(second)).metrics["name"].to_numpy()


def test_a_patch_is_tried_on_the_server_and_its_trial_trains_in_the_processes_of_the_others(server: Served) -> None:
    submitted = server.submit("patched")
    server.wait_until(submitted, "COMPLETED")
    old = '        return {"loss": loss}\n'
    patch = "--- a/recorded.py\n+++ b/recorded.py\n@@ -1 +1 @@\n-" + old + "+" + old.replace("}", ', "new": 1.0}')
    imports = "@@ -1 +1,2 @@\n import torch\n+torch.nowhere()\n"
    with pytest.raises(Invalid, match=r"the variant's code can't be used: importing recorded .* raised AttributeError"):
        OnServer(server.client, submitted.name).add_trial({}, patch=patch[: patch.index("@@")] + imports)
    OnServer(server.client, submitted.name).add_trial({}, patch=patch)
    server.wait_for(lambda: saved_batches(server.path(submitted), 1) == 20, "the patched trial")
    server.wait_until(submitted, "COMPLETED")
    assert len({line["pid"] for line in lines(server.record("patched"))}) == 1
    metrics = dray.Result(server.path(submitted)).metrics
    assert set(metrics["trial_id"][metrics["name"] == "new"]) == {1}


def test_a_config_with_faults_is_refused_with_their_fields(server: Served) -> None:
    with pytest.raises(dray.ConfigError) as refused:
        server.submit("wrong", searcher={"name": "random", "metric": "error", "max_length": {"batches": 5}})
    assert [fault.path for fault in refused.value.faults] == ["searcher.max_trials"]


def test_an_agent_submits_proposes_code_waits_and_compares(server: Served) -> None:
    agent = Agent(Tools(lambda: server.client))
    config = recorded(server.record("agents"), trials=2, batches=20)
    files = {"recorded.py": (TRIALS / "recorded.py").read_text()}
    sent = agent("submit", config=yaml.safe_dump({**config, "name": "agents"}), files=files)
    one = str(sent["experiment"])
    without_bias = "--- a/recorded.py\n+++ b/recorded.py\n@@ -1 +1 @@\n-{}\n+{}\n".format(
        "        model = nn.Linear(4, 1)", "        model = nn.Linear(4, 1, bias=False)"
    )
    added = agent("add_trial", experiment=one, hparams={"lr": 0.02}, patch=without_bias)
    worse = agent(
        "add_trial", experiment=one, hparams={"lr": 0.02}, patch=without_bias.replace("Linear(4, 1, ", "Lin(")
    )
    while not agent("wait", experiment=one, trial=worse["trial"])["ended"]:
        pass
    while not agent("wait", experiment=one)["ended"]:
        pass
    trials = {row["trial"]: row for row in agent("get_results", experiment=one)["results"]}
    assert trials.keys() == {0, 1, added["trial"]}
    assert (trials[added["trial"]]["code"], trials[added["trial"]]["hparams"]["lr"]) == (added["code"], 0.02)
    [curve] = agent("get_curves", experiment=one, trials=[added["trial"]])["curves"]
    assert curve["batches"] == [10, 20]
    assert (
        "has no attribute 'Lin'"
        in agent("read_log", experiment=one, trial=worse["trial"], errors=True)["failures"][0]["error"]
    )


def test_bisect_names_the_commit_after_which_the_metric_is_worse(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (TRIALS / "recorded.py").read_text()
    config = yaml.safe_dump(recorded(tmp_path / "record", trials=1, batches=20))
    files = {"model/recorded.py": code, "model/const.yaml": config}
    repository = Repository(tmp_path / "repository", **files)
    repository.commit("comment", **{"model/recorded.py": f"# A comment.\n{code}"})
    repository.commit("raises", **{"model/recorded.py": f"{code}\nraise ArithmeticError\n"})
    slower = code.replace('lr=context.get_hparam("lr")', 'lr=context.get_hparam("lr") / 100')
    repository.commit("slower", **{"model/recorded.py": slower})
    repository.commit("same", **{"model/recorded.py": f"{slower}\nSAME = 1\n"})
    monkeypatch.setenv("DRAY_HOME", str(server.home))
    options = ["--config", str(repository.path / "model" / "const.yaml"), "--length", "20", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["bisect", "HEAD~4", "HEAD", *options, "--", "error"])
    assert ended.value.code in (None, 0)
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert [each["subject"] for each in found["commits"]] == ["raises", "slower"]
    assert found["stat"][0].split()[:2] == ["model/recorded.py", "|"]
    assert "does not run" in said.err
    values = {each["commit"]: each["value"] for each in found["runs"]}
    assert values[repository.git("rev-parse", "HEAD")] > values[repository.git("rev-parse", "HEAD~4")]
    trained = {values[commit] for commit in values if values[commit] is not None}
    pids = {line["pid"] for line in lines(tmp_path / "record")}
    assert len(pids) <= 2 <= len(trained), "in the processes of the server's two slots"


@pytest.mark.long
def test_code_that_no_worker_can_import_is_an_error_with_its_cause_and_harms_no_other(
    server: Served, tmp_path: Path
) -> None:
    only_there = (
        "import multiprocessing\nif multiprocessing.current_process().name != 'dray-experiment':\n    import nowhere"
    )
    broken = copy_of(TRIALS, tmp_path / "broken", recorded=("import torch\n", f"import torch\n{only_there}\n"))
    submitted = server.submit("broken", code=broken)
    assert "nowhere" in server.wait_until(submitted, "ERROR").error
    server.wait_until(server.submit("after-it"), "COMPLETED")


def test_the_metrics_of_an_experiment_are_exported_also_if_it_ends_at_once(server: Served) -> None:
    submitted = server.submit("measured", trials=2)
    server.wait_until(submitted, "COMPLETED")

    def agree() -> bool:
        samples = scraped()
        decisions = values(samples, "dray_decisions_total", submitted.name)
        saved = values(samples, "dray_checkpoint_seconds_count", submitted.name)
        return (decisions, saved) == ({"stop": 2}, {"": 4})

    server.wait_for(agree, "its two ends and four checkpoints at the metrics endpoint")


def values_of(server: Served, submitted: Submitted, name: str) -> set[float]:
    """All values that an experiment's trials have reported for a metric."""
    metrics = dray.Result(server.path(submitted)).metrics
    return set(metrics[metrics["name"] == name]["value"])


@pytest.mark.long
def test_experiments_with_equal_module_names_at_the_same_time_do_not_see_each_others_code(
    server: Served, tmp_path: Path
) -> None:
    codes = []
    for number in (1, 2):  # one module is imported with the class, the other during training
        body = ("    def train_batch(", "    own = WHO\n\n    def train_batch(")
        codes.append(copy_of(TRIALS, tmp_path / str(number), recorded=body))
        file = codes[-1] / "recorded.py"
        text = file.read_text().replace("import torch\n", "import torch\nfrom who import WHO\n", 1)
        late = 'import later\n        return {"loss": loss, "who": self.own, "late": later.WHO}'
        file.write_text(text.replace('return {"loss": loss}', late))
        for module in ("who", "later"):
            (codes[-1] / f"{module}.py").write_text(f"WHO = {number}.0\n")
    first = server.submit("user-1", code=codes[0], trials=8, batches=20, pause_s=0.1)
    server.wait_for(lambda: server.client.experiment(first.name).slots == 2, "both slots in use")
    second = server.submit("user-2", code=codes[1], trials=2, batches=20, pause_s=0.1)
    for submitted in (first, second):
        server.wait_until(submitted, "COMPLETED")
    one, other = (lines(server.record(name)) for name in ("user-1", "user-2"))
    assert other[0]["time"] < one[-1]["time"], "they ran at the same time"
    assert {line["pid"] for line in other} <= {line["pid"] for line in one}, "in the same processes"
    for number, submitted in enumerate((first, second), 1):
        assert values_of(server, submitted, "who") == values_of(server, submitted, "late") == {float(number)}


def pids(server: Served, name: str) -> set[int]:
    return {line["pid"] for line in lines(server.record(name))}


@pytest.mark.long
def test_reuse_workers_false_gives_each_trial_processes_that_no_other_has_used_or_will_use(server: Served) -> None:
    server.wait_until(server.submit("before"), "COMPLETED")
    fresh = server.submit("fresh", trials=2, resources={"slot": "cpu", "reuse_workers": False})
    server.wait_until(fresh, "COMPLETED")
    server.wait_until(server.submit("after"), "COMPLETED")
    assert len(pids(server, "fresh")) == 2
    assert not pids(server, "fresh") & (pids(server, "before") | pids(server, "after"))


@pytest.mark.long
def test_other_environment_variables_need_other_processes_which_no_other_experiment_gets(
    server: Served, tmp_path: Path
) -> None:
    new = ('return {"loss": loss}', 'return {"loss": loss, "red": os.environ.get("COLOUR") == "red"}')
    code = copy_of(TRIALS, tmp_path / "colours", recorded=new)
    red = {"environment_variables": ["COLOUR=red"]}
    submitted = {}
    for name, environment in (("plain", {}), ("red", red), ("red-again", red), ("plain-again", {})):
        submitted[name] = server.submit(name, code=code, trials=2, environment=environment)
        server.wait_until(submitted[name], "COMPLETED")
    seen = {name: values_of(server, each, "red") for name, each in submitted.items()}
    assert seen == {"plain": {0.0}, "red": {1.0}, "red-again": {1.0}, "plain-again": {0.0}}
    assert not (pids(server, "red") | pids(server, "red-again")) & (pids(server, "plain") | pids(server, "plain-again"))


# -------------------------------------------------------------------------------------------------------- life cycle
def test_a_paused_experiment_continues_where_it_saved(server: Served) -> None:
    submitted = server.submit("paused", batches=40, pause_s=0.1)
    server.wait_for(lambda: has_saved(server, submitted), "a checkpoint")
    OnServer(server.client, submitted.name).pause()
    server.wait_until(submitted, "PAUSED")
    OnServer(server.client, submitted.name).activate()
    server.wait_for(lambda: len(attempts(server.record("paused"))[0]) == 2, "it continues")
    OnServer(server.client, submitted.name).stop()
    OnServer(server.client, submitted.name).activate()  # while it stops
    ended = server.wait_until(submitted, "COMPLETED")
    check_training(server.record("paused"), trials=1, batches=40)
    assert (len(attempts(server.record("paused"))[0]), ended.restarts) == (3, 0)
    OnServer(server.client, submitted.name).activate()
    server.wait_until(submitted, "COMPLETED")  # at once: nothing is left to do
    assert len(attempts(server.record("paused"))[0]) == 3


# ------------------------------------------------------------------------------------------------------------ faults


def test_an_experiment_whose_process_dies_continues_by_itself(server: Served) -> None:
    submitted = server.submit("killed", batches=60, pause_s=0.1)
    server.wait_for(lambda: has_saved(server, submitted), "a checkpoint")
    driver = server.driver_of(submitted)
    assert driver is not None
    os.kill(driver, signal.SIGKILL)
    server.wait_until(submitted, "COMPLETED")
    check_training(server.record("killed"), trials=1, batches=60)
    assert server.client.experiment(submitted.name).restarts == 1


@pytest.mark.long
def test_a_token_spends_no_more_than_its_quota_whatever_is_killed_and_if_its_trials_hang(
    server: Served, tmp_path: Path
) -> None:
    hang, quota_s = tmp_path / "hang", 32.0  # both kills take a slow machine half of it
    body = (
        "        time.sleep(self.pause_s)\n",
        f"        while os.path.exists({str(hang)!r}):\n            time.sleep(0.1)\n",
    )
    code = copy_of(TRIALS, tmp_path / "hanging", recorded=(body[0], body[0] + body[1]))
    secret = tokens.create(server.home, "agent", "submit", Quota(slots=2, slot_hours=quota_s / 3600))
    config = {**recorded(server.record("quota"), trials=2, batches=5000, pause_s=0.02), "name": "quota"}
    submitted = Server(server.client.url, secret).submit(yaml.safe_dump(config), pack(code))
    assert submitted.owner == "agent"
    assert submitted.by_quota == {"resources.max_slots": 2, "budget.slot_hours": quota_s / 3600}

    def attempts_made() -> int:
        return sum("made" in line for line in lines(server.record("quota")))

    server.wait_for(lambda: attempts_made() == 2, "two trials")
    driver = server.driver_of(submitted)
    assert driver is not None
    os.kill(driver, signal.SIGKILL)
    server.wait_for(lambda: attempts_made() == 4, "both trials to continue")
    server.kill()
    server.restart()
    hang.touch()
    ended = server.wait_until(submitted, "STOPPED")
    assert ended.error.startswith("ended at once, without saving: token agent has used")
    server.wait_for(lambda: server.client.status().busy == 0, "its slots to be free")
    [known] = server.client.tokens()
    used_s = known["used"]["slot_hours"] * 3600
    assert 0.9 * quota_s < used_s < 2 * quota_s, "within 1%, unless the machine has other work"
    assert known["reserved"]["slot_hours"] == 0
    with pytest.raises(WrongState, match=r"token agent has a quota of .* slot-hours: other"):
        Server(server.client.url, secret).submit(yaml.safe_dump({**config, "budget": {"slot_hours": 1}}), pack(code))


def test_a_server_that_is_killed_finds_its_experiments_again(server: Served) -> None:
    running = server.submit("running-on", batches=60, pause_s=0.1)
    waiting = [server.submit(f"waiting-{number}", batches=20) for number in range(3)]
    server.wait_for(lambda: has_saved(server, running), "a checkpoint")
    paused = waiting[-1]
    OnServer(server.client, paused.name).pause()
    queue = server.client.queue()
    assert all(each["why"] for each in queue["entries"] if not each["slots"])
    ended = {bar["experiment"] for bar in queue["lanes"]["bars"] if bar["ended"] is not None}
    server.kill()
    lost = server.home / "lost"  # was being created as the server died: its client has got no answer
    lost.mkdir()
    shutil.copy(server.path(paused) / "experiment.yaml", lost)
    (server.home / ".server" / "creations" / "1").symlink_to(lost)
    server.restart()
    assert not lost.exists()
    assert ended <= {bar["experiment"] for bar in server.client.queue()["lanes"]["bars"]}
    for submitted in (running, *waiting[:-1]):
        server.wait_until(submitted, "COMPLETED")
    check_training(server.record("running-on"), trials=1, batches=60)
    assert server.client.experiment(paused.name).state == "PAUSED"
    assert [record["event"] for record in journal(server.path(running))].count("start") == 1


@pytest.mark.long
def test_a_server_whose_own_ray_dies_starts_again_by_itself_and_finds_its_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    monkeypatch.setattr(client, "PATIENCE_S", STARTS_IN_S)
    with served(tmp_path / "results", RAY_ADDRESS="") as server:
        submitted = server.submit("raylet-lost", batches=60, pause_s=0.1)
        server.wait_for(lambda: has_saved(server, submitted), "a checkpoint")
        since = server.client.status().since
        [raylet] = [pid for pid, name in descendants(server.process.pid).items() if name == "raylet"]
        os.kill(raylet, signal.SIGKILL)
        try:
            assert "search done (completed)" in list(server.client.follow(submitted.name))[-1]
        except Unreachable:
            raise AssertionError(server.log.read_text()) from None
        check_training(server.record("raylet-lost"), trials=1, batches=60)
        assert server.client.status().since > since
        assert server.process.poll() is None, "in the same process"
