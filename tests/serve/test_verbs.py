"""Every verb of an experiment in every place, from every caller: the same words, exit status and answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import dray as package
from dray.errors import Invalid, NoExperiment
from dray.experiment import requests
from dray.experiment.experiment import Experiment
from dray.experiment.request_files import RequestFiles
from dray.records.listing import StoredExperiment
from dray.records.numbering import take_number
from dray.serve import address
from dray.serve.control import ACTIVE, ExperimentState
from dray.serve.refusals import WrongState
from dray.serve.verbs import in_directory
from dray.serve.verbs.in_directory import InDirectory
from dray.serve.verbs.on_server import OnServer
from searchers.events import Source
from searchers.journal import Journal
from tests.agents.conftest import Agent, agent
from tests.cli.conftest import dray
from tests.cli.said import Said
from tests.experiment.test_requests import answering
from tests.records.test_result import config, told
from tests.serve.conftest import TOKEN, Served

__all__ = ["agent", "dray"]

Dray = Callable[..., Said]
PLACES = ("server", "driver", "directory")
DRIVER = """
import signal, sys, time
from searchers.journal import Journal

with Journal(sys.argv[1]) as journal:
    try:
        print("runs", flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        for line in sys.argv[2:]:
            journal.append(eval(line))
"""


class Place:
    """The experiment ``experiment``, number 1, of `told`: on a server, with a driver, or in a directory alone."""

    def __init__(self, kind: str, served: Served) -> None:
        self.kind, self.served = kind, served
        self.story = told(served.results, config())
        self.path = self.story.directory.path
        take_number(self.path)
        self.ran: list[dict[str, Any]] = []
        if kind == "server":
            served.control.put("experiment", "RUNNING")
        if kind == "directory":
            self.story.journal.close()

    def answering(self) -> Any:
        return nullcontext() if self.kind == "directory" else answering(self.story)

    @contextmanager
    def driver(self, *last: str) -> Iterator[subprocess.Popen[str]]:
        """A process that runs the experiment, and appends its last records when it is interrupted."""
        self.story.journal.close()
        command = [sys.executable, "-c", DRIVER, str(self.story.directory.journal), *last]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "runs\n"
            yield process
            process.kill()

    def running(self) -> Any:
        return self.driver() if self.kind == "driver" else nullcontext()

    def ends(self, state: str) -> None:
        """It ends in this state, and so does its driver."""
        if self.kind == "directory":
            self.story.journal = Journal(self.path / "journal.jsonl")
        if state != "STOPPED":
            ends = {"COMPLETED": {"event": "ended", "reason": "enough"}, "ERROR": {"event": "failed", "error": "no"}}
            self.story.write(ends[state])
        self.story.journal.close()
        if self.kind == "server":
            self.served.control.put("experiment", state)  # type: ignore[arg-type]


@pytest.fixture
def place(request: pytest.FixtureRequest, served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in (address.URL, address.TOKEN, "DRAY_STORAGE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    found = Place(request.param, served)

    class Runs:
        """In place of the experiment: a run in this process, which ends at once."""

        def __init__(self, path: str, **extension: Any) -> None:
            self.path = Path(path)
            found.ran.append(extension)

        def run(self) -> None:
            with Journal(self.path / "journal.jsonl") as journal:
                found.story.journal = journal
                if self.path != found.path:  # a fork
                    found.story.write({"event": "ended", "reason": "enough"})
                    return
                found.story.write({"event": "opened"})
                for each in RequestFiles(found.story.directory).waiting():
                    found.story.search.request(each)
                    RequestFiles(found.story.directory).remove(each.id)
                found.story.write({"event": "ended", "reason": "enough"})

    monkeypatch.setattr(Experiment, "resume", Runs)
    if found.kind == "server":
        address.write(served.results, served.url, TOKEN)
    yield found
    address.remove(served.results)


everywhere = pytest.mark.parametrize("place", PLACES, indirect=True)
HINT = "continue it with: dray experiment resume 1"


# ---------------------------------------------------------------------------------------------------------------- ends
@everywhere
@pytest.mark.parametrize("verb", ["stop", "pause", "kill"])
def test_a_running_one_ends(place: Place, verb: str, dray: Dray) -> None:
    if place.kind == "directory":
        said = dray("e", verb, "1")
        assert (said.code, said.out, said.err) == (0, "", f"experiment is STOPPED; {HINT}\n")
        return
    with place.running() as driver:
        said = dray("e", verb, "1")
        assert driver is None or driver.wait(60) == (-9 if verb == "kill" else 0)
    state = "PAUSED" if verb == "pause" and place.kind == "server" else "STOPPED"
    assert (said.code, said.out, said.err.splitlines()[-1]) == (0, "", f"experiment is {state}; {HINT}")
    saves = "experiment is STOPPING: its running trials save a checkpoint; to end it at once, stop it again\n"
    assert (saves in said.err) == (verb != "kill")
    again = dray("e", verb, "1")
    assert (again.code, again.err) == (0, f"experiment is {state}; {HINT}\n")


@everywhere
@pytest.mark.parametrize("state", ["COMPLETED", "ERROR"])
@pytest.mark.parametrize("verb", ["stop", "pause", "kill"])
def test_one_that_has_ended_says_so(place: Place, verb: str, state: str, dray: Dray) -> None:
    place.ends(state)
    how = "resume" if state == "ERROR" else "extend"
    said = dray("e", verb, "1").is_one_line()
    assert said == f"dray: experiment has ended; to continue it: dray experiment {how} experiment\n"


@everywhere
@pytest.mark.parametrize(
    ("state", "code", "says"),
    [
        ("COMPLETED", 3, ""),  # trial 1 has failed
        ("ERROR", 1, "dray: experiment failed: "),
        ("STOPPED", 1, f"dray: experiment is STOPPED; {HINT}\n"),
    ],
)
def test_its_end_is_awaited(place: Place, state: str, code: int, says: str, dray: Dray) -> None:
    if place.kind == "directory":
        place.ends(state)
    else:
        threading.Timer(0.3, place.ends, (state,)).start()
    said = dray("e", "wait", "1")
    assert (said.code, said.out, said.err.startswith(says)) == (code, "", True), said.err


@everywhere
def test_it_is_deleted_unless_it_runs(place: Place, dray: Dray) -> None:
    if place.kind != "directory":
        said = dray("e", "delete", "1", "--yes").is_one_line()
        assert said == "dray: experiment is RUNNING; stop it first: dray experiment stop experiment\n"
        place.ends("STOPPED")
    assert dray("e", "delete", "1", "--yes") == Said(code=0, out="", err="deleted experiment\n")
    assert not place.path.exists()


@pytest.mark.parametrize("place", ["driver"], indirect=True)
@pytest.mark.parametrize("verb", ["stop", "pause", "kill"])
def test_a_driver_elsewhere_is_not_taken_for_a_process_here(place: Place, verb: str, dray: Dray) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        place.story.directory.journal.with_name("journal.jsonl.lock").write_text(f"{other.pid}\n")
        said = dray("e", verb, "1").is_one_line()
        assert f"is running on another machine or in another container, as process {other.pid} there" in said
        assert other.poll() is None
        assert other.stdin is not None
        other.stdin.write(b"\n")


@pytest.mark.parametrize("place", ["driver"], indirect=True)
def test_what_was_not_submitted_to_the_server_is_left_to_its_driver(place: Place, dray: Dray) -> None:
    address.write(place.served.results, place.served.url, TOKEN)
    with place.answering():
        assert dray("t", "stop", "1", "4").out == "trial 4 is stopped\n"
    assert package.handle("1").read().state == "RUNNING"
    with place.running():
        assert dray("e", "stop", "1").err.endswith(f"experiment is STOPPED; {HINT}\n")
    assert place.served.control.calls == []


def test_in_an_object_store_it_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = told(tmp_path, config())
    copy = StoredExperiment(directory=story.directory, where="s3://bucket/experiment", is_copy=True)
    monkeypatch.setattr(in_directory, "open_experiment", lambda where: nullcontext(copy))
    it = InDirectory("s3://bucket/experiment", print)
    for verb in (
        it.stop,
        it.pause,
        it.kill,
        it.wait,
        lambda: it.add_trial({}),
        lambda: it.stop_trial(3),
    ):
        with pytest.raises(WrongState, match="s3://bucket/experiment is in an object store, which is only read; give"):
            verb()


# -------------------------------------------------------------------------------------------------------------- begins
@pytest.fixture
def when_followed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Something happens as soon as a command follows an experiment."""

    def then(act: Callable[[], object]) -> None:
        for kind in (OnServer, InDirectory):
            monkeypatch.setattr(kind, "lines", lambda it, say, lines=kind.lines: (act(), lines(it, say))[1])

    return then


@pytest.mark.parametrize("place", ["server", "directory"], indirect=True)
@pytest.mark.parametrize("state", ["STOPPED", "COMPLETED", "ERROR"])
@pytest.mark.parametrize("verb", ["activate", "resume --detach", "resume", "extend --max-trials 9"])
def test_it_runs_again(
    place: Place, state: str, verb: str, dray: Dray, when_followed: Callable[[Callable[[], object]], None]
) -> None:
    place.ends(state)
    before = Journal.read(place.story.directory.journal)
    if place.kind == "directory":
        said = dray("e", verb.split()[0], "1", *verb.split()[1:])
        if "--detach" in verb:
            assert "--detach needs a server" in said.is_one_line()
            return
        assert (said.code, place.ran) == (3, [{"max_trials": 9} if "extend" in verb else {}])
        return
    when_followed(lambda: place.served.control.put("experiment", "COMPLETED"))
    said = dray("e", verb.split()[0], "1", *verb.split()[1:])
    assert place.served.control.calls == [("extend" if "extend" in verb else "activate", "experiment")]
    assert said.err.startswith("experiment is QUEUED\n")
    assert said.code == (0 if verb in ("activate", "resume --detach") else 3)
    assert Journal.read(place.story.directory.journal) == before
    assert "started" not in said.out, "only its new lines are printed"


@pytest.mark.parametrize("place", ["server", "driver"], indirect=True)
@pytest.mark.parametrize("verb", ["activate", "resume"])
def test_a_running_one_goes_on(
    place: Place, verb: str, dray: Dray, when_followed: Callable[[Callable[[], object]], None]
) -> None:
    when_followed(lambda: place.ends("COMPLETED"))
    said = dray("e", verb, "1")
    assert (said.code, said.err.splitlines()[0]) == (3 if verb == "resume" else 0, "experiment is RUNNING")
    assert ("enough" in said.out, "started" in said.out) == (verb == "resume", False), "only its new lines"
    assert not place.ran


@everywhere
@pytest.mark.parametrize("here", [False, True])
def test_it_is_forked(place: Place, here: bool, dray: Dray) -> None:
    place.story.directory.code.mkdir()
    (place.story.directory.code / "train.py").write_text("print(1)\n")
    file = place.story.directory.config_file
    file.write_text(f"entrypoint: python3 train.py\n{file.read_text()}")
    if place.kind != "server":  # a server forks also what was not submitted to it
        address.write(place.served.results, place.served.url, TOKEN)
    way = ["--no-server" if here else "--detach"]
    said = dray("e", "fork", "1", "--config", "searcher.max_trials=3", *way)
    [new] = [each for each in place.served.results.iterdir() if each.name[0] != "." and each != place.path]
    assert yaml.safe_load((new / "experiment.yaml").read_text())["searcher"]["max_trials"] == 3
    assert (new / "code" / "train.py").exists()
    assert said.code == 0
    assert place.ran == ([{}] if here else [])
    assert len(place.served.control.experiments()) == (place.kind == "server") + (not here)


EVERY_EXTENSION = {
    "--max-trials 9": {"max_trials": 9},
    "--max-length 64": {"max_length": 64},
    "--budget time=4h --budget usd=5": {"budget": {"time": "4h", "usd": 5}},
    "--until loss=0.1": {"until": {"loss": 0.1}},
    "--patience 3": {"patience": 3},
    "--price A100=2.9": {"prices": {"A100": 2.9}},
}


@pytest.mark.parametrize("place", ["server", "directory"], indirect=True)
def test_every_limit_reaches_the_run(place: Place, dray: Dray) -> None:
    place.ends("COMPLETED")
    given = [word for options in EVERY_EXTENSION for word in options.split()]
    extension = {field: value for fields in EVERY_EXTENSION.values() for field, value in fields.items()}
    dray("e", "extend", "1", *given, *["--detach"] * (place.kind == "server"))
    assert (place.served.control.extensions if place.kind == "server" else place.ran) == [extension]


@pytest.mark.parametrize("place", ["server", "directory"], indirect=True)
@pytest.mark.parametrize(
    ("extension", "says"),
    [
        ({}, "give some of max_trials, "),
        ({"trials": 9}, "trials is not expected; give max_trials, "),
        ({"max_trials": "9"}, "max_trials must be an integer from 1, got '9'"),
    ],
)
def test_a_wrong_extension_is_one_error(place: Place, extension: dict[str, Any], says: str) -> None:
    place.ends("COMPLETED")
    with pytest.raises(Invalid, match=says):
        package.handle("1").extend(**extension)
    assert (place.ran, place.served.control.extensions) == ([], [])


@everywhere
def test_a_wrong_trial_or_checkpoint_is_one_error(place: Place) -> None:
    it = package.handle("1")
    for named in ("six", "9", "-1", "a/b"):
        says = f"^experiment has no trial {named}; it has 5, numbered from 0; give a trial's number, or 'best'$"
        with pytest.raises(NoExperiment, match=says):
            it.stop_trial(named)
    with pytest.raises(Invalid, match=r"^trial 0 has no checkpoint"):
        it.fork_trial(0, at=7777, hparams={})


@everywhere
def test_a_running_one_is_not_extended(place: Place, dray: Dray) -> None:
    if place.kind == "directory":
        place.story.journal = Journal(place.story.directory.journal)
    said = dray("e", "extend", "1", "--max-trials", 9).is_one_line()
    assert said == "dray: experiment is RUNNING; stop it first: dray experiment stop experiment\n"


@pytest.mark.parametrize("state", get_args(ExperimentState))
def test_the_page_offers_what_changes_something(served: Served, state: ExperimentState) -> None:
    told(served.results, config())

    def refuses(verb: str) -> bool:
        served.control.put("experiment", state)
        body = {"max_trials": 9} if verb == "extend" else None
        status = served.api("POST", f"/experiments/experiment/{verb}", body).status
        assert status in (200, 409)
        return status == 409

    served.control.put("experiment", state)
    offered = served.api("GET", "/experiments/experiment").json["verbs"]
    assert not any(refuses(verb) for verb in offered if verb != "delete")
    assert ("kill" in offered, "delete" in offered) == (state in ACTIVE, state not in ACTIVE)
    ended, waits = state in ("COMPLETED", "ERROR"), state in ("STOPPED", "PAUSED")
    assert ("extend" in offered) == (ended or waits) <= (not refuses("extend"))
    assert ("pause" in offered, "activate" in offered) == (
        state in ACTIVE and state != "STOPPING",
        waits or state == "ERROR",
    )
    assert [refuses(verb) for verb in ("stop", "pause", "kill")] == [ended] * 3


# -------------------------------------------------------------------------------------------------------------- trials
FORK = {"trial": 5, "hparams": {"lr": 0.15}, "source": {"trial": 3, "step": 10, "batches": 10}}
ADDED = {"trial": 6, "hparams": {"lr": 0.1}}


@everywhere
def test_trials_are_forked_added_and_stopped_by_the_command(place: Place, dray: Dray) -> None:
    with place.answering():
        fork = dray("t", "fork", "1", "3", "--set", "lr=0.15")
        add = dray("t", "add", "1", "--set", "lr=1e-1", "--json")
        stop = dray("t", "stop", "1", "4")
    assert (fork.code, fork.out) == (3 if place.ran else 0, "trial 5, from trial 3 at batch 10, lr = 0.15\n")
    assert json.loads(add.out) == ADDED
    if place.kind == "directory":  # a trial runs the experiment; nothing else does
        assert place.ran == [{}, {}]
        assert stop == Said(code=0, out="", err="requested; carried out when experiment runs\n")
    else:
        assert (add.err, stop) == ("", Said(code=0, out="trial 4 is stopped\n", err=""))
        assert place.story.search.trials[4].stop_requested
    assert place.story.search.source(5) == Source(trial=3, step=10, batches=10)
    assert (place.story.search.params(5)["lr"], place.story.search.params(6)["lr"]) == (0.15, 0.1)


@everywhere
def test_programs_get_the_same_answers(place: Place, agent: Agent) -> None:
    asked: list[requests.Decided] = []
    with place.answering():
        it = package.handle("experiment", answered=asked.append)
        assert it.fork_trial("3", hparams={"lr": 0.15}) == FORK
        assert it.add_trial({"lr": 0.1}) == ADDED
        late = {"trial": None}
        assert it.stop_trial(3) == (late if place.kind == "directory" else {"trial": 3})
    assert asked == [FORK, ADDED, late if place.kind == "directory" else {"trial": 3}]
    if place.kind == "server":
        with place.answering():
            assert place.served.api("POST", "/experiments/experiment/trials/best/fork").json["source"]["trial"] == 0
            fork = agent("fork_trial", experiment="1", trial=3, at="latest", hparams={"lr": 0.15})
            added = agent("add_trial", experiment="1", hparams={"lr": 0.1})
            stopped = agent("stop_trial", experiment="1", trial=4)
        assert fork == {"name": "experiment", **FORK, "trial": 8}
        assert added == {"name": "experiment", **ADDED, "trial": 9}
        assert stopped == {"name": "experiment", "trial": 4}
        assert agent("stop_experiment", experiment="1") == {"name": "experiment", "state": "STOPPING"}


@everywhere
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("fork 1 9", "experiment has no trial 9; it has 5, numbered from 0; give a trial's number, or 'best'"),
        ("stop 1 9", "experiment has no trial 9; it has 5, numbered from 0; give a trial's number, or 'best'"),
        ("stop 1 0", "trial 0 has ended: it is COMPLETED"),
        ("fork 1 4", "trial 4 has no checkpoint with a validation yet"),
        (
            "fork 1 3 --at 7",
            "trial 3 has no checkpoint at batch 7 with a validation; it has validated checkpoints at ba",
        ),
        ("fork 1 3 --at first", "the checkpoint must be best, last or a number"),
        ("fork 1 0 --at 20", "nothing is left to train after batch 20 of trial 0: the searcher's max_length is 20 b"),
        ("fork 1 3 --set rate=1", "hyperparameters.rate: is not a hyperparameter of the space"),
        ("add 1 --set lr=abc", "hyperparameters.lr: must be a number, got 'abc'"),
        ("add 1 --patch change.diff", "has no code that a trial can change: its class is from a script or a notebook"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line(
    place: Place, command: str, says: str, dray: Dray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("change.diff").write_text("--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-lr = 0.1\n+lr = 0.2\n")
    said = dray("t", *command.split()).is_one_line()
    assert says in said
    assert not RequestFiles(place.story.directory).waiting()
    assert not place.ran


@pytest.mark.parametrize("place", ["server", "driver"], indirect=True)
def test_one_that_does_not_answer_is_not_run_here(place: Place, dray: Dray, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (requests.Trials, *requests.Trials.__subclasses__()):
        monkeypatch.setattr(kind, "answer_s", 0.05)
    assert dray("t", "add", "1") == Said(code=0, out="", err="requested; carried out when experiment runs\n")
    assert len(RequestFiles(place.story.directory).waiting()) == 1
    assert not place.ran
