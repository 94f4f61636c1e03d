"""Each file of dray's own, damaged in each way, read by each command: what every one of them answers."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import typer

from dray.cli import main
from dray.cli.errors import handle_errors
from dray.records.directory import ExperimentDirectory
from dray.records.metrics import MetricsLog, read_metrics
from dray.records.result import Result
from dray.records.timeline import Timeline
from dray.serve import tokens
from dray.serve.address import write as write_address
from dray.serve.app import listening
from dray.serve.control import Share
from dray.serve.lanes import Bar, LaneFile
from dray.serve.queue import Queue, open_queue
from dray.serve.quota import Quota
from searchers.journal import Journal
from searchers.rows import SAID
from tests.cli.conftest import checkpoint
from tests.model_code import imports_undone
from tests.report.simulated import rows, simulated
from tests.serve.fake import FakeControl

NAME, TOKEN, PORT = "digits-1", "secret-token", 20_000 + os.getpid() % 10_000
MODEL = "from dray.pytorch import PyTorchTrial\n\n\nclass DigitsTrial(PyTorchTrial):\n    pass\n"

Lines: TypeAlias = list[bytes]


# ---------------------------------------------------------------------------------------------------------- the damages
def _inside(lines: Lines, line: bytes) -> Lines:
    """Another line in the middle; in a file with one document, the whole of it."""
    return [*lines[: len(lines) // 2], line, *lines[len(lines) // 2 :]]


def _changed(content: bytes, change: Callable[[Any], Any]) -> bytes:
    """The middle row, or the document, with other values; a file of another form is not changed."""
    lines = content.splitlines(keepends=True)
    middle = len(lines) // 2
    with contextlib.suppress(ValueError):
        return json.dumps(change(json.loads(content))).encode()
    with contextlib.suppress(ValueError, IndexError):
        return b"".join(
            [*lines[:middle], json.dumps(change(json.loads(lines[middle]))).encode() + b"\n", *lines[middle + 1 :]]
        )
    return content


def _of_other_types(value: Any) -> Any:
    return {name: {"was": str(each)} for name, each in value.items()} if isinstance(value, dict) else {}


def _with_few_fields(value: Any) -> Any:
    return dict(list(value.items())[:1]) if isinstance(value, dict) else {}


def _line(line: bytes) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        lines = content.splitlines(keepends=True)
        return b"".join(_inside(lines, line + b"\n")) if len(lines) > 1 else line

    return damage


def _nuls_inside(content: bytes) -> bytes:
    middle = content.find(b"\n", len(content) // 2) + 1 or len(content) // 2
    return content[:middle] + b"\0" * 20 + content[middle + 20 :]


def _doubled(content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join(_inside(lines, lines[len(lines) // 2]))


CONTENT: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content.rstrip()[:-7],
    "NULs at the end": lambda content: content + b"\0" * 512,
    "NULs inside": _nuls_inside,
    "garbage": _line(b"%$ {not JSON: ["),
    "[]": _line(b"[]"),
    "null": _line(b"null"),
    "other types": lambda content: _changed(content, _of_other_types),
    "missing fields": lambda content: _changed(content, _with_few_fields),
    "not UTF-8": lambda content: _line(b'{"event": "\xff\xfe"}')(content),
    "doubled line": _doubled,
}
TRAINS = (("journal.jsonl", "cut"),)
"""Where the search goes on, on Ray: its end was cut."""
DAMAGES = (*CONTENT, "a directory", "unreadable", "missing")


def damage(file: Path, how: str) -> None:
    """Damage a file. Nobody, root included, can read a link to itself."""
    content = file.read_bytes()
    file.unlink()
    if how in CONTENT:
        file.write_bytes(CONTENT[how](content))
    elif how == "a directory":
        file.mkdir()
    elif how == "unreadable":
        file.symlink_to(file.name)


# ------------------------------------------------------------------------------------------------------------ the files
FILES = {
    "journal.jsonl": f"{NAME}/journal.jsonl",
    "experiment.yaml": f"{NAME}/experiment.yaml",
    "metrics/_tail.jsonl": f"{NAME}/metrics/_tail.jsonl",
    "metrics/_timeline.jsonl": f"{NAME}/metrics/_timeline.jsonl",
    "metrics/part-00001.parquet": f"{NAME}/metrics/part-00001.parquet",
    "trial_0/logs/rank_0.log": f"{NAME}/trial_0/logs/rank_0.log",
    "checkpoint_10/manifest.json": f"{NAME}/trial_0/checkpoint_10/manifest.json",
    "storage.json": f"{NAME}/storage.json",
    "secrets.yaml": f"{NAME}/secrets.yaml",
    "requests/ID.json": f"{NAME}/requests/00000000000000000001-00000000.json",
    "variants/ID/change.diff": f"{NAME}/variants/3f9c01ab52de/change.diff",
    "local/metrics.jsonl": "local/run-1/metrics.jsonl",
    ".server/queue.jsonl": ".server/queue.jsonl",
    ".server/lanes.jsonl": ".server/lanes.jsonl",
    ".server/tokens.json": ".server/tokens.json",
    ".server.json": ".server.json",
}


def make(root: Path) -> Path:
    """A results directory with a finished experiment, another one, a local run, and what a server has left."""
    directory = simulated(root / NAME, 4)
    simulated(root / "other-2", 1)
    text = directory.config_file.read_text()
    directory.config_file.write_text(text + "data: {secrets: {key: '********'}}\n" if "\ndata:" not in text else text)
    directory.secrets_file.write_text("data.secrets:\n  key: hidden-value\n")
    directory.storage_file.write_text(json.dumps({"location": str(directory.path), "secrets": {}}))
    directory.code.mkdir()
    (directory.code / "model_def.py").write_text(MODEL)
    log = MetricsLog(directory.metrics)
    tail = [
        {**row, "batches": 1000 + at, "name": "late"}
        for at in range(3)
        for row in rows({"lr": 0.1, "optimizer": "sgd", "hidden": 1}, 1, 1_700_000_100.0)
    ]
    log.append(0, tail)
    checkpoint(directory.store(0), 10)
    (directory.trial(0) / "logs").mkdir()
    (directory.trial(0) / "logs/rank_0.log").write_text("one\ntwo\nthree\nfour\n")
    request = directory.path / "requests/00000000000000000001-00000000.json"
    request.parent.mkdir()
    request.write_text('{"trial": 0, "event": "requested"}')
    variant = directory.variants / "3f9c01ab52de"
    (variant / "code").mkdir(parents=True)
    (variant / "change.diff").write_text("--- a/model_def.py\n+++ b/model_def.py\n@@ -1 +1 @@\n-a\n+b\n")
    run = root / "local/run-1/metrics.jsonl"
    run.parent.mkdir(parents=True)
    run.write_text(
        "".join(json.dumps({"batches": at, "training": {"loss": 0.5}, "time": 1e9 + at}) + "\n" for at in range(1, 6))
    )
    server = root / tokens.STATE
    tokens.create(root, "agent", "submit", Quota(slots=2))
    with Journal(server / "queue.jsonl") as journal:
        queue = Queue([], journal.append, clock=lambda: 1_700_000_000.0)
        for name in (NAME, "other-2"):
            queue.add(root / name, Share())
            queue.move(name, "stop")
            queue.change(name, {"notes": "a note", "tags": ["a"]})
    lanes, now = LaneFile(server / "lanes.jsonl"), 4e9
    for at in range(5):
        lanes.keep(asdict(Bar(experiment=NAME, trial=at, kind="cpu", lanes=[0], began=now + at, ended=now + at + 1)))
    write_address(root, "http://127.0.0.1:1", TOKEN)
    known = json.loads((root / ".server.json").read_text())
    (root / ".server.json").write_text(json.dumps({**known, "pid": 0}))
    return root


# --------------------------------------------------------------------------------------------------------- the commands
@dataclass(frozen=True, slots=True)
class Said:
    """What a command has written: its output, and what it says besides."""

    out: str
    said: tuple[str, ...]
    trouble: str = ""  # a traceback, or what it took down


def _captured(function: Callable[[], Any]) -> Said:
    SAID.clear()  # each command is a process of its own
    out, err, log, trouble = io.StringIO(), io.StringIO(), io.StringIO(), ""
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), imports_undone():
            try:
                function()
            except typer.Exit:
                pass
            except SystemExit as ended:
                if ended.code not in (0, 1, 2, 3, None):
                    trouble = f"exit code {ended.code}"
            except BaseException:
                trouble = traceback.format_exc()
    finally:
        logging.getLogger().removeHandler(handler)
    said = tuple(dict.fromkeys(line for line in (err.getvalue() + log.getvalue()).splitlines() if line.strip()))
    return Said(out.getvalue(), said, trouble)


def _command(*arguments: str) -> Callable[[Path], Said]:
    return lambda root: _captured(lambda: main(list(arguments)))


def _list(root: Path) -> Said:
    found = _captured(lambda: main(["experiment", "list"]))
    if not found.trouble and "other-2" not in found.out:
        return Said(found.out, found.said, "the other experiment is not listed")
    return found


def _result(root: Path) -> Said:
    def read() -> None:
        try:
            result = Result(root / NAME)
            for each in (result.overview, result.metrics, result.system_metrics, result.timeline, result.trials):
                print(each if not hasattr(each, "to_csv") else each.to_csv())
            print(result.config.name, result.best_trial.metric)
        except Exception as error:
            if not type(error).__module__.startswith(("dray", "searchers")):
                raise
            print(error, file=sys.stderr)

    return _captured(read)


def _resume(root: Path) -> Said:
    """The command; then what `Run` opens for a search that is not done."""

    def resume() -> None:
        main(["experiment", "resume", NAME])

    found = _captured(resume)
    # Its own lines have times, which differ from run to run.
    about = tuple(
        line for line in found.said if line.startswith("dray: ") or "is damaged" in line or "can't be" in line
    )
    if found.trouble or any(line.startswith("dray: ") for line in about):
        return Said("", about, found.trouble)

    def run() -> None:
        directory = ExperimentDirectory(root / NAME)
        with handle_errors(), contextlib.closing(MetricsLog(directory.metrics)) as metrics:
            Timeline(directory.metrics).close()
            metrics.append(
                0, [{"batches": 5000, "epochs": None, "kind": "training", "name": "new", "value": 1.0, "time": 1e9}]
            )
        print(len(read_metrics(directory.metrics)))

    again = _captured(run)
    return Said(again.out, (*about, *again.said), again.trouble)


PAGES = ("", "/config", "/trials", "/trials/0", "/trials/0/metrics", "/trials/0/system", "/trials/0/logs", "/logs")
PAGES += ("/checkpoints", "/curves", "/figures/slots", "/failures", "/variants/3f9c01ab52de")


def _page(root: Path) -> Said:
    """The server's list, and all views of the experiment."""
    SAID.clear()
    out, trouble, log = list[str](), "", io.StringIO()
    said: dict[str, None] = {}
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    with listening(FakeControl(root), root, "127.0.0.1", PORT, tokens.Tokens(root, TOKEN)) as url:
        connection = http.client.HTTPConnection("127.0.0.1", int(url.rpartition(":")[2]), timeout=30)

        def get(path: str) -> tuple[int, Any]:
            connection.request("GET", f"/api/v1{path}", headers={"Authorization": f"Bearer {TOKEN}"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())

        while (reply := get("/experiments"))[0] == 200 and reply[1]["unread"]:
            pass
        listed = {each["name"]: each for each in reply[1].get("experiments", ())}
        if "other-2" not in listed or listed["other-2"]["state"] == "DAMAGED":
            trouble = f"the other experiment is not listed: {reply}"
        for path in PAGES:
            status, body = get(f"/experiments/{NAME}{path}")
            if "error" in body and status != 200:
                said[body["error"]] = None
                if (status == 500 and "its log says why" in body["error"]) or "\n" in body["error"]:
                    trouble = trouble or f"{path}: {body['error']}\n{log.getvalue()}"
            else:
                # Times of the answers differ.
                out.append(re.sub(r'"(pace|status|version|wait_s|at)": (?!\[)[^,]*', "", json.dumps(body)))
        connection.close()
    logging.getLogger().removeHandler(handler)
    if "Traceback" in log.getvalue():
        trouble = trouble or log.getvalue()
    return Said("\n".join(out), (*said, *log.getvalue().splitlines()), trouble)


def _server(root: Path) -> Said:
    """What a server reads at its start."""

    def start() -> None:
        with handle_errors(), Journal(root / tokens.STATE / "queue.jsonl") as journal:
            queue = open_queue(journal)
            print([(each.name, each.state, each.notes) for each in queue.items()])
            print(LaneFile(root / tokens.STATE / "lanes.jsonl").kept)
            print(list(tokens.Tokens(root, TOKEN).all()))

    return _captured(start)


COMMANDS: Mapping[str, Callable[[Path], Said]] = {
    "list": _list,
    "describe": _command("experiment", "describe", NAME),
    "trial list": _command("trial", "list", NAME),
    "report": _command("report", NAME),
    "logs": _command("experiment", "logs", NAME),
    "Result": _result,
    "page": _page,
    "server": _server,
    "resume": _resume,  # the last: it writes
}
LOCAL = {"describe": _command("experiment", "describe", "run-1"), "trial list": _command("trial", "metrics", "run-1")}


# ------------------------------------------------------------------------------------------------------------ the table
_ABSENT = re.compile(r"no experiment|has not started|has no trial|has validated yet|has reported no metrics")
"""What is said where a file is missing or empty."""


AS_IT_IS = ("rank_0.log", "manifest.json", "change.diff")
"""Text is shown as it is, and checkpoints are not verified before they are used."""


def _verdict(said: Said, whole: Said, file: Path, how: str) -> str:
    """How a command answers:

    `=`: the same as for the undamaged files; `1`: one line that names the file, or says what is not there; `~`: another
    answer in silence, because the end of a file was cut, a line is there twice, the file is gone, or its text is shown
    as it is; `?`: one line that does not name the file; `2`: several lines; `✗`: a traceback, a wrong answer in
    silence, or an answer about other experiments that is missing.
    """
    if said.trouble:
        return "✗"
    new = [line for line in said.said if line not in whole.said]
    about = [line for line in new if file.name in line or _ABSENT.search(line)]
    if new and not about:
        return "?"
    if len({re.sub(r"^dray: |^\S+ can't be read: |^WARNING: \[\d+\] [\w.]+: ", "", line) for line in new}) > 1:
        return "2"
    if new:
        return "1"
    if said.out == whole.out:
        return "="
    return (
        "~" if file.name in AS_IT_IS or how in ("empty", "cut", "NULs at the end", "missing", "doubled line") else "✗"
    )


def _commands_for(path: str) -> Collection[str]:
    """The commands that may read a file; the others never open it."""
    if path.startswith(".server"):
        return ("list", "server") if path.startswith(".server/") else ("list", "describe", "page")
    if path.startswith("local/"):
        return "list", "describe", "trial list", "page"
    if path.endswith(("journal.jsonl", "experiment.yaml", "_tail.jsonl", "_timeline.jsonl", ".parquet")):
        return [name for name in COMMANDS if name != "server"]
    return "list", "describe", "trial list", "Result", "page", "resume"


@contextlib.contextmanager
def results(root: Path) -> Iterator[None]:
    """Commands use this results directory in the block."""
    before = dict(os.environ)
    os.environ.update(DRAY_HOME=str(root), COLUMNS="200")
    for name in ("RAY_ADDRESS", "DRAY_SERVER"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def cells(
    scratch: Path,
    files: Mapping[str, str] = FILES,
    damages: tuple[str, ...] = DAMAGES,
    only: Collection[str] = tuple(COMMANDS),
) -> Iterator[tuple[str, str, str, str, Said]]:
    """File, damage, command, mark, and what was said, for each cell."""
    made = make(scratch / "made")
    root = scratch / "results"  # always the same, so that answers can be compared
    with results(root):

        def answers(path: str, file: str = "", how: str = "") -> Iterator[tuple[str, Said]]:
            for name, command in COMMANDS.items():
                if name in only and name in _commands_for(path) and not (name == "resume" and (file, how) in TRAINS):
                    yield name, (LOCAL.get(name, command) if path.startswith("local/") else command)(root)

        whole: dict[str, dict[str, Said]] = {}
        for file, path in files.items():
            kind = path.partition("/")[0]
            for how in (None, *damages):
                if how is None and kind in whole:
                    continue
                shutil.rmtree(root, ignore_errors=True)
                shutil.copytree(made, root, symlinks=True)
                # Copies know their own paths.
                for text in (root / NAME / "storage.json", root / ".server/queue.jsonl"):
                    text.write_text(text.read_text().replace(str(made), str(root)))
                if how is None:
                    whole[kind] = dict(answers(path))
                    continue
                damage(root / path, how)
                for name, said in answers(path, file, how):
                    yield file, how, name, _verdict(said, whole[kind][name], root / path, how), said
