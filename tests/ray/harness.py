"""What the tests on a real Ray share: configs, what trials wrote down, and drivers in processes of their own."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from dray.storage import CheckpointStore
from dray.worker.log.writer import STAMP_LENGTH
from searchers.journal import Journal
from tests.cli.said import Said

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
TRIALS = Path(__file__).parent / "trials"
STARTS_IN_S = 180.0  # a Ray cluster and a first worker group, on a machine that has other work too
OWN_CLUSTER = {"RAY_ADDRESS": "local"}  # for a driver that starts one, also where tests share one
LAST_LINES = 20  # of each file, where a driver has not ended in time


def recorded(record: Path, *, trials: int, batches: int, pause_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    """The config of a random search over ``trials/recorded.py``, which validates and saves every 10 batches."""
    return {
        "name": "recorded",
        "entrypoint": "recorded:Recorded",
        "hyperparameters": {
            "global_batch_size": 8,
            "lr": {"type": "log", "base": 10, "minval": -3, "maxval": -1},
            "record": str(record),
            "pause_s": pause_s,
        },
        "searcher": {"name": "random", "metric": "error", "max_length": {"batches": batches}, "max_trials": trials},
        "resources": {"slot": "cpu"},
        "min_validation_period": {"batches": 10},
        "checkpoint_policy": "all",
        "reproducibility": {"experiment_seed": 7},
        **fields,
    }


RAYS_AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one process trained of a trial, from the making of its trial object on."""

    trial: int
    pid: int
    batches: tuple[int, ...]  # indices, from 0


def lines(record: Path) -> list[dict[str, Any]]:
    """What the trials have noted so far."""
    return [json.loads(line) for line in record.read_bytes().split(b"\n")[:-1]] if record.exists() else []


def attempts(record: Path) -> dict[int, list[Attempt]]:
    """Each trial's attempts, in order; those of its first rank."""
    found: dict[int, list[Attempt]] = {}
    ranks: dict[int, int] = {}
    for line in lines(record):
        mine = found.setdefault(line["trial"], [])
        rank = ranks[line["pid"]] = line.get("made", ranks.get(line["pid"], 0))
        if rank != 0:
            continue
        if "made" in line:
            mine.append(Attempt(trial=line["trial"], pid=line["pid"], batches=()))
        else:
            last = mine.pop()
            assert last.pid == line["pid"], "two processes train one trial at a time"
            mine.append(Attempt(trial=last.trial, pid=last.pid, batches=(*last.batches, line["batch"])))
    return found


def printed(path: Path, trial: int, rank: int = 0) -> list[str]:
    """The lines that a rank of a trial has printed, without the time before each."""
    log = path / f"trial_{trial}" / "logs" / f"rank_{rank}.log"
    return [line[STAMP_LENGTH:] for line in log.read_text().splitlines()]


def latest_checkpoint(trial_dir: Path) -> Path | None:
    """A trial's latest whole checkpoint."""
    latest = CheckpointStore(trial_dir).latest()
    return None if latest is None else Path(latest)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The first model of a checkpoint, whole."""
    import torch  # here: fast tests import this file too

    from dray.training.checkpoint import sharded

    model = torch.load(checkpoint / "state-dict.pth", weights_only=True)["models_state_dict"][0]
    stored = sharded.StoredTensors(checkpoint)
    for name, like in model.items():
        if like.device.type == "meta":
            model[name] = torch.empty(like.shape, dtype=like.dtype)
            stored.load(f"models_state_dict.0.{name}", like, model[name])
    return dict(model)


def saved_batches(path: Path, trial: int) -> int:
    """Where the trial's latest whole checkpoint is, 0 if it has none."""
    checkpoint = latest_checkpoint(path / f"trial_{trial}")
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("checkpoint_"))


def promotion(trials: int, batches: int, **fields: Any) -> dict[str, Any]:
    """A searcher for `recorded`: ASHA that promotes every second trial, at 3 rungs, the last one at so many batches."""
    return {
        "name": "asha",
        "variant": "promotion",
        "metric": "error",
        "max_length": {"batches": batches},
        "max_trials": trials,
        "num_rungs": 3,
        "divisor": 2,
        "max_concurrent_trials": 3,
        **fields,
    }


def decided(path: Path, action: str) -> list[int]:
    """The trials of the journal's actions of this kind, in order."""
    actions = [each for record in journal(path) for each in record.get("actions", [])]
    return [each["trial"] for each in actions if each["action"] == action]


def check_promotions(path: Path, *, divisor: int, top: float) -> int:
    """Hold each promotion of a journal against the paper's rule, by counting; how many there were.

    A trial that goes on is, at the rung where it is, among the best floor(n / divisor) of n and the best of those that
    did not go on before; and no higher rung has one that could.
    """
    rungs: dict[float, dict[int, float]] = {}
    promoted: list[tuple[float, int]] = []
    for record in journal(path):
        actions = [(action["action"], action.get("trial")) for action in record.get("actions", [])]
        go_on = [trial for action, trial in actions if action == "resume"]
        if record["event"] == "reported" and record["step"] < top:
            rungs.setdefault(record["step"], {}).setdefault(record["trial"], record["value"])
            if not {("pause", record["trial"]), ("stop", record["trial"])} & set(actions):  # it goes on at once
                go_on.insert(0, record["trial"])
        for trial in go_on:
            ready = [
                (step, each)
                for step, values in sorted(rungs.items(), reverse=True)
                for each in sorted(values, key=values.__getitem__)[: len(values) // divisor]
                if (step, each) not in promoted
            ]
            assert ready[0][1] == trial, f"trial {trial} goes on, but {ready[0]} was to"
            promoted.append(ready[0])
    return len(promoted)


def journal(path: Path) -> list[dict[str, Any]]:
    """The records of an experiment's journal, also while it is written."""
    file = path / "journal.jsonl"
    return [dict(record) for record in Journal.read(file)] if file.exists() else []


def ends(path: Path) -> Counter[int]:
    """How often each trial has ended, by the journal."""
    return Counter(record["trial"] for record in journal(path) if record["event"] == "exited")


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = STARTS_IN_S) -> T:
    """The condition's first value that is true; looked for in a tenth of the time, as others need the cores."""
    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        if began > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(min(max(0.1, 9 * (time.monotonic() - began)), 0.5))


class Meanwhile:
    """Does something in a thread while the body runs, and raises what it raised at the body's end."""

    def __init__(self, deed: Callable[[], None]) -> None:
        self._deed, self._error = deed, None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._deed()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.join(STARTS_IN_S)
        if self._error is not None:
            raise self._error
        assert kind is not None or not self._thread.is_alive(), "the body has ended before what was to happen meanwhile"


def run_here(*arguments: object, group: str = "experiment") -> Said:
    """Run ``dray experiment ...`` in this process, or a command of another group."""
    from dray.cli import main  # here: fast tests import this file too

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main([group, *map(str, arguments)])
        except SystemExit as ended:
            return Said(code=int(ended.code or 0), out=out.getvalue(), err=err.getvalue())
    raise AssertionError("the command returned")


def take_terminal() -> None:
    """Make standard input this session's terminal, whose end is then signalled, also if pytest runs under `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Driver:
    """``dray experiment ...`` in a process of its own, with the Ray cluster that it starts, or that RAY_ADDRESS names.

    Args:
        arguments: of the command.
        log: where its output goes.
        terminal: a terminal that it controls, and writes to instead.
    """

    def __init__(self, *arguments: object, log: Path, terminal: int | None = None, **environment: str) -> None:
        self.log = log
        self._arguments = arguments
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dray.cli", "experiment", *map(str, arguments)],
                stdin=terminal,
                stdout=file if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,  # a process group of its own, see `signal_group`
                preexec_fn=None if terminal is None else take_terminal,
            )

    def wait(self, timeout_s: float = 2 * STARTS_IN_S) -> int:
        """Its exit code. If it does not end in time, the failure shows what it is doing."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver has not ended in {timeout_s:.0f} s:\n{self.state()}") from None

    def wait_for(self, condition: Callable[[], T], what: str) -> T:
        """As above. Fails at once when the driver ends, and shows what it is doing if it does not."""

        def holds() -> T:
            value = condition()
            assert value or self.process.poll() is None, f"the driver ended before {what}:\n{self.log.read_text()}"
            return value

        try:
            return wait_for(holds, what)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.state()}") from None

    def state(self) -> str:
        """The ends of its output, of the journal and of the trials' logs, and all stacks of it and of its workers."""
        files = [self.log]
        experiment = next((each for each in self._arguments[::-1] if isinstance(each, Path)), None)
        if experiment is not None:
            files += [experiment / "journal.jsonl", *sorted(experiment.glob("trial_*/logs/*.log"))]
        parts = [(str(file), "\n".join(file.read_text().splitlines()[-LAST_LINES:])) for file in files if file.exists()]
        workers = {pid: name for pid, name in descendants(self.process.pid).items() if name.startswith("ray::")}
        for pid, name in {self.process.pid: "the driver", **workers}.items():
            parts.append((f"process {pid}, {name}", stacks(pid)))
        return "\n\n".join(f"---- {title}\n{text}" for title, text in parts)

    def interrupt(self) -> None:
        """Ctrl-C, to this process alone."""
        self.process.send_signal(signal.SIGINT)

    def signal_group(self, number: int) -> None:
        """To this process and all in its group, as a shell, `timeout` and a batch system send it."""
        os.killpg(self.process.pid, number)

    def kill(self) -> list[str]:
        """kill -9 the driver; the processes that it has left behind after 45 s. These are then ended.

        But for Ray's two agents, which take a minute to find out that their cluster is gone: they are ended at once.
        """
        family = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        agents = {pid: name for pid, name in family.items() if name in RAYS_AGENTS}
        others = family.items() - agents.items()
        deadline = time.monotonic() + 45
        while (left := {pid: name for pid, name in others if alive(pid, name)}) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid, name in (agents | left).items():
            if alive(pid, name):
                os.kill(pid, signal.SIGKILL)
        return [f"{pid} {name}" for pid, name in left.items()]

    def close(self) -> None:
        """End it if it still runs, and all that it started."""
        if self.process.poll() is None:
            self.kill()


def stacks(pid: int) -> str:
    """The stacks of all threads of a Python process."""
    spy = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(pid)]
    return subprocess.run(spy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60).stdout


def descendants(pid: int) -> dict[int, str]:
    """Name by number of the processes that this one has started, and those that they have started."""
    table = {process: _stat(process) for process in (int(p.name) for p in Path("/proc").glob("[0-9]*"))}
    family = {pid}
    while more := {p for p, (_, parent) in table.items() if parent in family} - family:
        family |= more
    return {process: table[process][0] for process in family - {pid}}


def alive(pid: int, name: str) -> bool:
    """Whether this process is there, and no zombie."""
    return _stat(pid)[0] == name


def _stat(pid: int) -> tuple[str, int]:
    """A process's name, and its parent's number; ("", 0) if it is gone or a zombie."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return "", 0
    state, parent = after.split()[:2]
    return ("", 0) if state == "Z" else (before.partition("(")[2], int(parent))


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
