"""What a person waits for: commands, the first batch, the end of a run, a server's answer, the demo.

python bench/first_minutes.py [--before CHECKOUT] [--rounds 4] [--save]

With --before, the same of another checkout with its own .venv, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from urllib.error import URLError

from _measure import BENCH, DIGITS, STAMPS, Paper, arguments, machine, of_kind, perform, quantile, read_stamps, spread

PORT = 8791
PAUSE_S = 4.0  # a server prepares its next process, Ray's processes end, and the disk gets what they wrote
TARGETS = {
    "dray --version, CPU": 0.2,
    "dray experiment list, CPU": 0.35,
    "import dray.pytorch over import torch": 0.06,
    "experiment create: first batch": 4.2,
    "last trial's end to the command's end": 0.4,
    "the same command on a server, known code": 1.2,
    "dray demo": 13.0,
}
"""Seconds on the machine of issue 28, where the first batch came after 5.6 s before."""
MODEL = """
from _measure import stamp
from digits import DigitsTrial as Digits

class Trial(Digits):
    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = super().train_batch(batch, epoch_idx, batch_idx)
        if batch_idx == 0:
            stamp("first batch")
        return loss
"""
CONFIG = """
name: first-minutes
entrypoint: model_def:Trial
hyperparameters: {global_batch_size: 64, lr: 0.01, hidden: 32}
searcher: {name: single, metric: validation_loss, max_length: {batches: 100}}
"""


class Waits:
    """The commands of one checkout, in a home of its own, and how long each took."""

    def __init__(self, python: Path, directory: Path) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._python, self._dray, self._home = python, python.with_name("dray"), directory
        self._stamps, model = directory / "stamps", directory / "model"
        model.mkdir(parents=True)
        shutil.copy(DIGITS / "model_def.py", model / "digits.py")
        (model / "model_def.py").write_text(MODEL)
        (model / "config.yaml").write_text(CONFIG)
        self._create = ("experiment", "create", model / "config.yaml", model)
        unset = {"PYTHONDONTWRITEBYTECODE", "DRAY_HOME", "DRAY_SERVER"}
        self._environment = {name: value for name, value in os.environ.items() if name not in unset}
        self._environment |= {"HOME": str(directory), "PYTHONPATH": str(BENCH), STAMPS: str(self._stamps)}

    def round(self) -> None:
        """Measure everything once."""
        time.sleep(PAUSE_S)
        began, ended = self._run(*self._create)[:2]
        [journal] = self._home.glob("dray_results/*/journal.jsonl")
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        last = max(each["time"] for each in events if each["event"] == "exited")
        self.seconds["experiment create: first batch"].append(self._first_batch() - began)
        self.seconds["last trial's end to the command's end"].append(ended - last)
        self.seconds["dray --version, CPU"].append(self._run("--version")[2])
        self._run("experiment", "list")  # it stores what the next one reads
        self.seconds["dray experiment list, CPU"].append(self._run("experiment", "list")[2])
        ours, torchs = map(self._import_cpu, ("dray.pytorch", "torch"))
        self.seconds["import dray.pytorch over import torch"].append(ours - torchs)
        shutil.rmtree(journal.parent)
        self._on_a_server()
        shutil.rmtree(self._home / "dray_results")
        began, ended, _ = self._run("demo")
        self.seconds["dray demo"].append(ended - began)
        shutil.rmtree(self._home / "dray_results", ignore_errors=True)
        time.sleep(PAUSE_S)

    def _on_a_server(self) -> None:
        log = (self._home / "server.log").open("w")
        command = [self._dray, "serve", "--port", str(PORT)]
        server = subprocess.Popen(command, cwd=self._home, env=self._environment, stdout=log, stderr=log)
        try:
            while server.poll() is None and not _answers():
                time.sleep(0.1)
            for is_known in (False, True, True):
                time.sleep(PAUSE_S)
                began, ended, _ = self._run(*self._create)
                self._first_batch()
                if is_known:
                    self.seconds["the same command on a server, known code"].append(ended - began)
        finally:
            server.terminate()
            server.wait()

    def _run(self, *words: str | Path) -> tuple[float, float, float]:
        """Run ``dray``. Returns when it began and ended, and its CPU time with that of its children."""
        before, began = _children_cpu(), time.time()
        self._output(self._dray, *words)
        return began, time.time(), _children_cpu() - before

    def _import_cpu(self, name: str) -> float:
        code = f"import time; began = time.process_time(); import {name}; print(time.process_time() - began)"
        return float(self._output(self._python, "-c", code))

    def _output(self, *command: str | Path) -> str:
        ran = subprocess.run(command, cwd=self._home, env=self._environment, check=True, capture_output=True, text=True)
        return ran.stdout

    def _first_batch(self) -> float:
        [first] = of_kind(read_stamps(self._stamps), "first batch")
        self._stamps.unlink()
        return first.time


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _answers() -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{PORT}/", timeout=2).close()
    except (URLError, OSError):
        return False
    return True


def measure(options: argparse.Namespace, directory: Path, paper: Paper) -> None:
    """Measure each checkout in turn."""
    paper.say(machine())
    paper.say("")
    pythons = {"now": Path(sys.executable)}
    if options.before:
        pythons = {"before": options.before.absolute() / ".venv/bin/python", **pythons}
    waits = {name: Waits(python, directory / name) for name, python in pythons.items()}
    for number in range(options.rounds + 1):
        for each in waits.values() if number % 2 else reversed(waits.values()):
            each.round()
            if number == 0:
                each.seconds.clear()  # in this round Python compiled the modules
    rows = []
    for what, target in TARGETS.items():
        taken = [each.seconds[what] for each in waits.values()]
        ratio = f"{quantile(taken[-1], 0.5) / quantile(taken[0], 0.5):.2f}" if options.before else ""
        rows.append([what, *(spread(each, "s") for each in taken), ratio, f"<= {target} s"])
    paper.table(["seconds, median (range)", *waits, "ratio", "target"], rows)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--before", type=Path, help="a checkout with a .venv, measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=4, help="of each checkout; one more is not counted")
    perform(measure, parser.parse_args(), name="first_minutes", title="The first minutes")
