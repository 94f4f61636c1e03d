"""A server of MLflow's, and what loggers have written, read back."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dray.serve.boards import free_port

STARTS_IN_S = 120.0


@contextmanager
def mlflow_server(home: Path) -> Iterator[str]:
    """The address of an MLflow server that keeps everything below `home`."""
    # Other tests may look for one at the same time, and the server takes seconds to be there.
    port = free_port(random.randrange(15000, 17000))
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{home}/runs.db", "--artifacts-destination", str(home / "artifacts")]
    address = f"http://127.0.0.1:{port}"
    with (home / "log").open("w") as log:
        # Jobs of its own would cost more than all that it is asked.
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=home, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + STARTS_IN_S
        while not _answers(f"{address}/health"):
            assert process.poll() is None, (home / "log").read_text()
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


class MLflow:
    """An experiment's runs, as MLflow's client reads them."""

    def __init__(self, server: str, name: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=server)
        experiment = self.client.get_experiment_by_name(name)
        assert experiment is not None
        runs = self.client.search_runs([experiment.experiment_id])
        [self.parent] = [run for run in runs if run.data.tags["dray.kind"] == "search"]
        trials = [run for run in runs if run.data.tags["dray.kind"] == "trial"]
        assert {run.data.tags["mlflow.parentRunId"] for run in trials} <= {self.parent.info.run_id}
        self.trials = {int(run.data.tags["dray.trial"]): run for run in trials}
        assert len(self.trials) == len(trials), "a trial has one run"

    def history(self, trial: int, key: str) -> list[tuple[int, float]]:
        found = self.client.get_metric_history(self.trials[trial].info.run_id, key)
        return sorted((each.step, each.value) for each in found)

    def states(self) -> dict[int, tuple[str, str]]:
        return {trial: (run.info.status, run.data.tags["dray.state"]) for trial, run in self.trials.items()}


def records(file: Path) -> Iterator[Any]:
    """The records in an offline run's file, a LevelDB log: blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at < len(data):
        if (left := -at % 32768) and left < 7:  # too little for a record's head
            at += left
            continue
        if at + 7 > len(data):
            return
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):  # torn: its process was killed, or is at it
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def _are_whole(path: Path) -> bool:
    """Whether each trial's latest run has ended; one of a killed process has not."""
    latest = {file.name: file for file in sorted(path.glob("wandb/offline-run-*/*.wandb"))}
    return all(any(each.WhichOneof("record_type") == "exit" for each in records(file)) for file in latest.values())


class WandB:
    """What is below an experiment's `wandb/`, all runs of a trial as one.

    A run's last records may come to the disk a moment after it has ended: they are waited for.
    """

    def __init__(self, path: Path) -> None:
        deadline = time.monotonic() + STARTS_IN_S
        while not _are_whole(path):
            assert time.monotonic() < deadline, "a run has no end"
            time.sleep(0.1)
        self.runs: dict[str, Any] = {}
        self.history: dict[str, list[dict[str, Any]]] = {}
        self.exits: dict[str, list[int]] = {}
        self.states: dict[str, str] = {}
        for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
            name = ""
            for record in records(file):
                match record.WhichOneof("record_type"):
                    case "run":
                        name = record.run.display_name
                        self.runs[name] = record.run
                    case "history":
                        row = {
                            item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
                        }
                        row = {key: value for key, value in row.items() if not key.startswith("_")}
                        self.history.setdefault(name, []).append(row)
                    case "summary":
                        for item in record.summary.update:
                            if (item.key or item.nested_key[0]) == "state":
                                self.states[name] = json.loads(item.value_json)
                    case "exit":
                        self.exits.setdefault(name, []).append(record.exit.exit_code)
