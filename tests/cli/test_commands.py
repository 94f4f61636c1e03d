"""Every command, on a finished, a running and a broken experiment, and on none."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from dray.cli import app, main
from dray.cli.description import as_json
from dray.cli.reader import opened
from dray.records.directory import ExperimentDirectory
from dray.records.listing import StoredExperiment
from dray.records.metrics import TAIL, MetricsLog
from dray.records.numbering import take_number
from dray.records.result import Result
from searchers.journal import Journal
from tests.cli.conftest import TRIALS, WEIGHT, checkpoint
from tests.cli.said import Said
from tests.records.story import happened
from tests.report.simulated import BEGAN
from tests.report.written import Written

Dray = Callable[..., Said]

#: What reads an experiment, with its other arguments; whether it reads the metrics.
READING = {
    "experiment describe": ((), True),
    "experiment logs": ((), False),
    "trial list": ((), True),
    "trial describe": (("0",), True),
    "trial logs": (("0",), True),
    "trial metrics": (("0",), True),
    "checkpoint list": ((), True),
    "checkpoint verify": ((), False),
    "report": (("-o", "report.html"), True),
}
#: What does something with an experiment.
DOING = {
    "experiment resume": (),
    "experiment stop": (),
    "experiment extend": ("--max-trials", "99"),
    "experiment download": ("-o", "copy"),
    "experiment delete": ("--yes",),
    "experiment pause": (),
    "experiment activate": (),
    "experiment kill": (),
    "experiment wait": (),
    "experiment set priority": ("10",),
    "experiment set weight": ("2",),
    "experiment set max-slots": ("4",),
    "experiment set tags": ("baseline",),
    "experiment set notes": ("text",),
    "experiment fork": (),
    "trial stop": ("0",),
    "trial fork": ("0",),
    "trial add": (),
    "checkpoint download": ("-o", "copy"),
    "checkpoint export": ("-o", "copy"),
    "ui": (),
}
#: What needs none, or two; tested below, in test_diff.py, test_migrate.py, tests/test_cli.py,
#: tests/test_cluster_yaml.py, tests/checks/test_check.py, tests/experiment/test_probe.py, tests/agents,
#: tests/serve/test_commands.py, tests/serve/test_tokens.py and tests/cli/test_bisect.py.
OTHERS = {
    "demo",
    "experiment create",
    "experiment list",
    "bisect",
    "diff",
    "preview",
    "config schema",
    "migrate",
    "probe",
    "serve",
    "mcp",
    "agents skill",
}
OTHERS |= {f"serve token {name}" for name in ("create", "list", "revoke")}
OTHERS |= {f"cluster {name}" for name in ("status", "check", "validate")}

ON_ONE = {**{name: arguments for name, (arguments, _) in READING.items()}, **DOING}


def commands(group: Any, *before: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:  # another name of one that is not
            continue
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)
        if not hasattr(command, "commands") or command.invoke_without_command:
            yield " ".join((*before, name))


HAS = set(commands(typer.main.get_command(app)))
on_one = pytest.mark.parametrize("command", sorted(ON_ONE))
reading = pytest.mark.parametrize("command", sorted(READING))


def test_every_command_is_in_these_tables() -> None:
    assert {*ON_ONE, *OTHERS} == HAS


@pytest.mark.parametrize("command", ["", "experiment", "config", *sorted(HAS)])
def test_help_is_short_to_ask_for_and_gives_flags_no_type(command: str, dray: Dray) -> None:
    said = dray(*command.split(), "-h")
    assert said.code == 0
    assert re.search(r"│ .*-h .*Show this message", said.out)
    assert "bool" not in said.out.lower()


@pytest.mark.parametrize("kind", ["", "experiment", "trial", "checkpoint"])
def test_ls_is_list(kind: str, home: Path, dray: Dray) -> None:
    of_one = [] if kind in ("", "experiment") else ["latest"]
    assert dray(*kind.split(), "ls", *of_one).out == dray(*(kind or "experiment").split(), "list", *of_one).out != ""


# ------------------------------------------------------------------------------------------------------- bad uses


@on_one
def test_an_unknown_name_is_one_line(command: str, home: Path, dray: Dray) -> None:
    message = dray(*command.split(), "digit-7", *ON_ONE[command]).is_one_line()
    assert f"no experiment 'digit-7' in {home}; did you mean digits-1?" in message


def test_a_directory_that_is_no_experiment_is_one_line(home: Path, dray: Dray) -> None:
    assert f"no experiment in {home}: it has no experiment.yaml" in dray("e", "describe", home).is_one_line()
    assert "no such directory" in dray("e", "describe", "./nowhere").is_one_line()
    inside = dray("e", "describe", home / "digits-1" / "trial_0").is_one_line()
    assert f"it is inside the experiment {home / 'digits-1'}" in inside


@reading
def test_a_journal_that_is_damaged_in_its_middle_is_one_line(
    command: str, digits: ExperimentDirectory, dray: Dray
) -> None:
    lines = digits.journal.read_text().splitlines(keepends=True)
    digits.journal.write_text("".join([lines[0], "{torn\n", *lines[1:]]))
    if command == "checkpoint verify":  # needs no journal to be read
        assert dray(*command.split(), "digits").code in (0, 2)
        return
    message = dray(*command.split(), "digits", *ON_ONE[command]).is_one_line()
    assert "journal.jsonl: line 2 is damaged" in message


def test_a_record_of_another_kind_is_one_line(digits: ExperimentDirectory, dray: Dray) -> None:
    with digits.journal.open("a") as file:
        file.write('{"event": "exited"}\n')
    for command in ("describe", "logs"):
        assert "is damaged: it has no trial" in dray("e", command, "digits").is_one_line()


def test_an_experiment_whose_journal_was_cut_says_so_once_and_not_to_resume(
    digits: ExperimentDirectory, dray: Dray
) -> None:
    Journal(digits.journal).close()  # notes how many records there are
    digits.journal.write_bytes(b"")
    shown = dray("e", "describe", "digits").out
    assert shown.count("it was cut, deleted, or replaced by an older copy") == 1
    assert "resume with" not in shown


@pytest.mark.parametrize("command", sorted({name for name, (_, reads) in READING.items() if reads}))
def test_metrics_that_are_damaged_are_one_line(command: str, digits: ExperimentDirectory, dray: Dray) -> None:
    for part in digits.metrics.glob("*.parquet"):
        part.write_bytes(part.read_bytes()[:100])
    message = dray(*command.split(), "digits", *ON_ONE[command]).is_one_line()
    assert f"{digits.metrics / 'part-00001.parquet'} can't be read" in message


@reading
def test_an_experiment_that_has_not_begun_is_one_line(command: str, digits: ExperimentDirectory, dray: Dray) -> None:
    digits.journal.unlink()
    if command == "checkpoint verify":
        assert dray(*command.split(), "digits").code == 0
    else:
        assert "has not started" in dray(*command.split(), "digits", *ON_ONE[command]).is_one_line()


@pytest.mark.parametrize("command", sorted(name for name in ON_ONE if name.startswith(("trial", "checkpoint"))))
def test_a_trial_that_is_missing_is_one_line(command: str, home: Path, dray: Dray) -> None:
    if command in ("trial list", "trial add"):
        return
    message = dray(*command.split(), "digits", "99").is_one_line()
    assert f"digits-1 has no trial 99; it has {TRIALS}, numbered from 0; give a trial's number, or 'best'" in message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trial kill 7", "did you mean dray trial stop"),
        ("t kill 7 2", "did you mean dray trial stop"),
        ("trial cancel 7", "did you mean dray trial stop"),
        ("trial create 7", "did you mean dray trial add"),
        ("t rm 7 1", "did you mean dray trial stop"),
        ("trial pause 7 1", "no such command 'pause'"),
        ("serve token rm me", "did you mean dray serve token revoke"),
        ("serve token ls", "did you mean dray serve token list"),
        ("trial run 7", "did you mean dray trial add"),
        ("trial status 7", "did you mean dray trial describe"),
        ("experiment status 7", "did you mean dray experiment describe"),
        ("e ps", "did you mean dray experiment list"),
        ("experiment rm 7", "did you mean dray experiment delete"),
        ("experiment submit a.yaml", "did you mean dray experiment create"),
        ("exp list", "did you mean dray experiment"),
        ("jobs", "did you mean dray experiment"),
        ("submit a.yaml", "did you mean dray experiment create"),
        ("kill 7", "did you mean dray experiment kill"),
        ("rm 7", "did you mean dray experiment delete"),
        ("ps", "dray experiment list"),
        ("status", "dray experiment describe"),
        ("e cancel 7", "dray experiment stop"),
    ],
)
def test_the_verbs_of_other_tools_lead_to_ours(typed: str, meant: str, dray: Dray) -> None:
    assert meant in dray(*typed.split()).is_one_line()


@pytest.mark.parametrize(
    "typed", ["checkpoint kill 7", "checkpoint rm 7", "trial rm 7", "trial delete 7", "trial kill 7"]
)
def test_no_hint_ends_more_than_was_typed(typed: str, dray: Dray) -> None:
    message = dray(*typed.split()).is_one_line()
    assert not any(f"experiment {verb}" in message for verb in ("kill", "stop", "delete"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["experiment", "lits"], "id you mean"),
        (["e", "cancel", "7"], "no such command; instead of det experiment cancel, use dray experiment stop"),
        (["tensorboard", "start", "7"], "no such command; instead of det tensorboard, use dray ui EXPERIMENT"),
        (["experiment", "label", "7"], "no such command 'label'; see dray experiment --help"),
        (["experiment", "describe"], "EXPERIMENT"),
        (
            ["trial", "metrics", "digits", "0", "--kind", "trainig"],
            "no metric of kind 'trainig'; the kinds are: training, val",
        ),
        (
            ["trial", "list", "digits", "--state", "lost"],
            "no trial of digits-1 is in state 'lost'; the trials' states are: ",
        ),
        (
            ["checkpoint", "export", "digits", "0", "--batches", "7"],
            "no checkpoint after 7 batches; there are checkpoints after 10 batches",
        ),
        (
            ["experiment", "logs", "digits", "--json", "-f"],
            "--json prints one complete value, so it can't be used with --follow",
        ),
        (["trial", "add", "digits", "--set", "lr="], "--set lr=: must be NAME=VALUE"),
        (["trial", "add", "digits", "--set", "lr=1", "--set", "lr=2"], "--set lr=2: lr is given twice"),
        (["experiment", "list", "nowhere"], "no such directory: nowhere"),
        (["experiment", "describe", "s3://"], "has no bucket"),
    ],
)
def test_other_bad_uses_are_one_line(arguments: list[str], says: str, home: Path, dray: Dray) -> None:
    assert says in dray(*arguments).is_one_line()


def test_nothing_is_written_over(home: Path, dray: Dray) -> None:
    (home.parent / "copy").mkdir()
    (home.parent / "copy" / "mine").touch()
    for command in ("experiment download", "checkpoint download", "checkpoint export"):
        at = ["--at", "last"] if command.startswith("checkpoint") else []
        assert "copy already exists" in dray(*command.split(), "digits", *at, "-o", "copy").is_one_line()
    assert os.listdir(home.parent / "copy") == ["mine"]


# ------------------------------------------------------------------------------------------- a finished experiment


@pytest.mark.slow
@pytest.mark.parametrize("command", ["experiment list", "trial logs"])
def test_a_reader_who_has_read_enough_is_no_error(command: str, home: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    experiment = ["digits", *ON_ONE[command]] if command in ON_ONE else []
    with os.fdopen(write_end, "w") as left:
        arguments = [sys.executable, "-m", "dray.cli", *command.split(), *experiment]
        ended = subprocess.run(arguments, stdout=left, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("error", [KeyError, PermissionError, BrokenPipeError])
def test_what_is_the_users_bug_has_a_traceback_of_the_users_files(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # restored after the test
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    (tmp_path / "train.py").write_text(f"raise {error.__name__}('lr')\n")
    config = {"name": "t", "entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    with pytest.raises(error, match="lr") as raised:  # as a debugger sees it
        main(["experiment", "create", str(tmp_path / "config.yaml"), "--local"])
    capfd.readouterr()
    sys.excepthook(error, raised.value, raised.value.__traceback__)
    note, *shown = capfd.readouterr().err.splitlines()
    assert note == "dray: an error in your code; DRAY_TRACEBACK=1 also shows the frames of libraries"
    assert shown[:2] == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 1, in <module>',
    ]
    assert (len(shown), shown[-1]) == (4, traceback.format_exception_only(raised.value)[0].strip())
    monkeypatch.setenv("DRAY_TRACEBACK", "1")
    sys.excepthook(error, raised.value, raised.value.__traceback__)
    assert f"{os.sep}dray{os.sep}script.py" in capfd.readouterr().err


def test_a_check_of_drays_own_is_one_line_and_a_bug_is_a_whole_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    from dray.cli.errors import show_uncaught
    from dray.config.entrypoint import parse_entrypoint
    from dray.text import printable

    def shown(call: Callable[[], object]) -> str:
        with pytest.raises(Exception, match=r".") as raised:
            call()
        assert raised.value.__traceback__ is not None
        show_uncaught(raised.type, raised.value, raised.value.__traceback__.tb_next)
        return capfd.readouterr().err

    assert shown(lambda: parse_entrypoint("")).startswith("dray: must not be empty; for example")
    assert shown(lambda: parse_entrypoint("")).count("\n") == 1
    assert shown(lambda: printable(5)).startswith("Traceback")  # type: ignore[arg-type]


def test_list_shows_states_and_the_best_newest_last(digits: ExperimentDirectory, home: Path, dray: Dray) -> None:
    (home / "broken").mkdir()
    (home / "broken" / "experiment.yaml").write_text("{")
    broken, found = dray("e", "list", "--json").value
    best = Result(digits.path).trials["best_metric"].min()
    assert (broken["name"], broken["state"]) == ("broken", "DAMAGED")
    assert "experiment.yaml" in broken["why"]
    assert found["state"] == "COMPLETED"
    assert (found["trials"], found["ended"], found["max_trials"]) == (TRIALS, TRIALS, TRIALS)
    assert found["best_metric"] == pytest.approx(best)
    assert found["began"] == BEGAN
    table = dray("e", "list")
    assert [line.split()[1:4] for line in table.out.splitlines()[1:]] == [
        ["broken", "DAMAGED", "0/0"],
        ["digits-1", "COMPLETED", f"{TRIALS}/{TRIALS}"],
    ]
    assert "broken can't be read" in table.err


def test_list_shows_the_newest_of_some_states(home: Path, dray: Dray) -> None:
    for number in (2, 3):
        shutil.copytree(home / "digits-1", home / f"digits-{number}")
    (home / "broken").mkdir()
    (home / "broken" / "experiment.yaml").write_text("{")

    def listed(*arguments: object) -> list[str]:
        return [each["name"] for each in dray("e", "list", *arguments, "--json").value]

    assert listed() == ["broken", "digits-1", "digits-2", "digits-3"]
    assert listed("--limit", 2) == ["digits-2", "digits-3"]
    assert listed("--state", "damaged") == ["broken"]
    assert listed("--state", "COMPLETED", "--limit", 1) == ["digits-3"]
    assert listed("--state", "COMPLETED", "--state", "DAMAGED") == listed()
    assert listed("--state", "RUNNING") == []
    assert "no experiments are RUNNING" in dray("e", "list", "--state", "running").err
    told = dray("e", "list", "--state", "done").is_one_line()
    assert "--state DONE: must be one of COMPLETED, DAMAGED, " in told
    assert "PARTLY_FAILED" in told
    shown = dray("e", "list", "--limit", 1)
    assert [line.split()[1] for line in shown.out.splitlines()] == ["name", "digits-3"]
    assert shown.err == "3 older ones are not shown\n"


def test_commands_that_only_read_files_load_neither_torch_nor_ray_nor_pandas(home: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_def.py").write_text("from determined import pytorch\n")
    code = (
        "import sys\nfrom dray.cli import main\n"
        "for arguments in (['--help'], ['e', 'list'], ['migrate', 'model']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as e: assert not e.code, e.code\n"
        "    assert arguments[0] == 'migrate' or 'dray.config.schema' not in sys.modules\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"torch", "ray", "pandas", "optuna", "determined", "model_def"} & set(loaded)


def test_each_command_imports_what_it_needs() -> None:
    code = "import sys\nfrom dray.cli import main\ntry: main(['--version'])\nfinally: print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    others = {"torch", "ray", "pandas", "numpy", "pyarrow", "searchers.space", "importlib.metadata"}
    assert loaded[0] == "dray"
    assert not others & set(loaded)


def test_list_of_nothing_says_so_and_is_no_error(tmp_path: Path, dray: Dray) -> None:
    assert dray("e", "list", tmp_path, "--json").value == []
    assert "no experiments in" in dray("e", "list", tmp_path).err


def test_describe_shows_the_best_trial_and_its_checkpoint(digits: ExperimentDirectory, dray: Dray) -> None:
    best = Result(digits.path).trials.sort_values("best_metric").iloc[0]
    found = dray("e", "describe", "digits", "--json").value
    trial = int(best["trial_id"])
    assert found["best"]["trial"] == trial
    assert found["best"]["metric"] == pytest.approx(best["best_metric"])
    assert found["best"]["hparams"]["hidden"] == best["hparams.hidden"]
    assert type(found["best"]["hparams"]["hidden"]) is int, "also where a table would make a float of it"
    assert found["best"]["checkpoint"] is None, "it was not kept"
    assert "; there are checkpoints after 10 batches" in found["best"]["checkpoint_error"]
    for command in ("download", "export"):
        said = dray("c", command, "digits")
        assert said.code == 2
        assert said.err == f"dray: {found['best']['checkpoint_error']}\n"
    listed = dray("c", "list", "digits")
    assert (listed.code, listed.err) == (0, f"dray: {found['best']['checkpoint_error']}\n")
    assert sum(found["states"].values()) == TRIALS
    shown = dray("e", "describe", "digits").out
    assert f"trial {trial}: validation_loss" in shown
    assert "can't be used: " in shown


def test_batches_are_the_length_trained_and_best_at_is_the_batch_of_the_best_value(home: Path, dray: Dray) -> None:
    happened(home / "story")  # trial 0 was trained for 30 batches, and was best after 20
    trials = dray("t", "list", "story", "--json").value
    best = dray("e", "describe", "story", "--json").value["best"]
    assert [(each["batches"], each["best_batches"]) for each in (trials[0], best)] == [(30, 20), (30, 20)]
    one = Result(home / "story").best_trial
    row = Result(home / "story").trials.iloc[0]
    assert [(each.batches, each.best_batches) for each in (one, row)] == [(30, 20), (30, 20)]

    def cells(text: str) -> list[str]:
        lines = [line.split("  ") for line in text.splitlines()]
        found = next(number for number, line in enumerate(lines) if line[0] == "trial" and "best at" in line)
        heading, first = ([cell.strip() for cell in line if cell] for line in lines[found : found + 2])
        return [first[heading.index(name)] for name in ("trial", "batches", "best at")]

    assert cells(dray("t", "list", "story", "--best").out) == ["0", "30", "20"]
    described = dray("e", "describe", "story").out
    assert cells(described) == ["0", "30", "20"]
    assert re.search(r"best +trial 0: validation_loss 0\.126 after 20 of 30 batches", described)
    shown = Result(home / "story")._repr_html_()
    assert "<th>batches</th><th>best at</th>" in shown
    assert "<td>30</td><td>20</td>" in shown
    dray("report", "story", "-o", "report.html")
    best, *_ = Written(Path("report.html")).answers["/trials", "rank"]["trials"]
    assert (best["batches"], best["best_batches"]) == (30, 20)


def test_the_lowest_value_of_a_short_training_stands_beside_the_best(home: Path, dray: Dray) -> None:
    story = happened(home / "story")
    found = dray("e", "describe", "story", "--json").value
    assert (found["best"]["trial"], found["lowest"], found["lowest_trial"]) == (0, None, None)
    assert "lowest" not in dray("e", "describe", "story").out
    with Journal(story.journal) as journal:
        journal.append({"event": "extended", "max_trials": None, "max_length": 120, "actions": []})
        for trial in (2, 5, 7):
            journal.append({"event": "reported", "trial": trial, "step": 40, "value": 0.7, "actions": []})
    found = dray("e", "describe", "story", "--json").value
    assert (found["best"]["trial"], found["lowest"]["trial"], found["lowest_trial"]) == (7, 0, 0)
    assert (found["lowest"]["metric"], found["lowest_metric"]) == (0.126, 0.126)
    shown = dray("e", "describe", "story").out
    assert re.search(r"best +trial 7: validation_loss 0.25 after 20", shown)
    assert re.search(r"lowest +trial 0: validation_loss 0.126 after 20 of 30 batches", shown)
    assert "best validation_loss 0.25 of trial 7, lowest 0.126 of trial 0" in shown
    result = Result(home / "story")
    assert (result.best_trial.trial_id, result.lowest.trial_id, result.lowest.best_by) == (7, 0, "one seed")


def test_describe_names_a_slow_rank(home: Path, dray: Dray) -> None:
    log = MetricsLog(happened(home / "story").metrics)
    row = {"batches": 90, "epochs": None, "kind": "system", "name": "slowest_rank_percent/gpu-7/3", "time": 2e9}
    log.append(2, [{**row, "value": 38.4}])
    log.close()
    told = "rank 3 on gpu-7 takes 38% longer per step than the median of the others"
    assert re.search(f"slow ranks +trial 2: {told}", dray("e", "describe", "story").out)
    assert dray("e", "describe", "story", "--json").value["stragglers"] == f"trial 2: {told}"
    assert re.search(f"slow rank +{told}", dray("t", "describe", "story", "2").out)
    assert dray("t", "describe", "story", "2", "--json").value["straggler"] == told
    assert "slow rank" not in dray("t", "describe", "story", "0").out


def test_describe_says_how_well_each_rung_ranks(digits: ExperimentDirectory, dray: Dray) -> None:
    first, second = dray("e", "describe", "digits", "--json").value["rungs"]
    assert (first["length"], first["trials"], first["continues"]) == (1, TRIALS, 0.25)
    assert (second["length"], second["trials"]) == (4, first["compared"])
    assert re.search(r"rungs +1 epoch: rank correlation with the next ", dray("e", "describe", "digits").out)


def test_rungs_are_of_the_same_time_as_what_is_described_with_them(home: Path) -> None:
    story = happened(home / "story")
    read = opened(StoredExperiment.here(story))
    with Journal(story.journal) as journal:
        journal.append({"event": "reported", "trial": 7, "step": 30, "value": 0.1, "actions": []})
    [then], [now] = as_json(read)["rungs"], as_json(opened(StoredExperiment.here(story)))["rungs"]
    assert now.compared == then.compared + 1


def test_where_every_trial_failed_only_a_number_names_one(home: Path, dray: Dray) -> None:
    story = happened(home / "story")
    with Journal(story.journal) as journal:
        for trial in range(9):
            journal.append({"event": "exited", "trial": trial, "reason": "errored", "actions": []})
    why = "no best trial, because every trial that validated failed; the best of these is trial 1"
    assert why in dray("c", "export", "story").is_one_line()
    assert why in dray("e", "describe", "story").out
    assert dray("t", "describe", "story", 1, "--json").value["best_metric"] == 0.01


def test_logs_tell_what_the_search_decided(digits: ExperimentDirectory, dray: Dray) -> None:
    out = dray("e", "logs", "digits").out
    assert "trial 0 started: hidden=" in out
    assert "-> search done (completed)" in out.splitlines()[-1]
    assert len(dray("e", "logs", "digits", "-n", "3").out.splitlines()) == 3
    assert dray("e", "logs", "digits", "--json").value == Journal.read(digits.journal)


def test_a_trials_logs_are_what_its_ranks_print(digits: ExperimentDirectory, dray: Dray) -> None:
    assert dray("t", "logs", "digits", "0").out == "one\ntwo\nthr\n"
    assert dray("t", "logs", "digits", "0", "-n", "1").out == "thr\n"
    for rank, seconds in ((0, (1, 3)), (1, (2, 4))):
        lines = [f"2026-11-21T19:23:3{second}.254Z {second}" for second in seconds]
        (digits.trial(0) / "logs" / f"rank_{rank}.log").write_text("\n".join([*lines, "  more"]))
    found = dray("t", "logs", "digits", "0", "--json").value
    assert [(line[:8], line[-1]) for line in found] == [
        ("rank 0 |", "1"),
        ("rank 1 |", "2"),
        ("rank 0 |", "3"),
        ("rank 0 |", "e"),
        ("rank 1 |", "4"),
        ("rank 1 |", "e"),
    ]
    assert dray("t", "logs", "digits", "0", "--rank", "1", "-n", "1").out == "  more\n"
    assert "has printed nothing" in dray("t", "logs", "digits", "1").err


def test_failures_are_reported_with_the_error(digits: ExperimentDirectory, dray: Dray) -> None:
    error = 'Traceback ...\n  File "model_def.py", line 7, in train_batch\nZeroDivisionError: division by zero'
    where = "ZeroDivisionError at model_def.py:7 in train_batch"
    with Journal(digits.journal) as journal:
        for event, trial in (("restarted", 3), ("restarted", 3), ("gave_up", 5)):
            journal.append({"event": event, "trial": trial, "error": error, "where": where, "why": "enough"})
        journal.append({"event": "gave_up", "trial": 6, "error": "the worker died at 7", "where": "died: 7", "why": ""})
    out = dray("e", "describe", "digits").out
    assert "trial 3 2x, 5: ZeroDivisionError: division by zero (model_def.py:7 in train_batch)" in out
    assert "trial 6: the worker died at 7\n" in out
    found = dray("e", "describe", "digits", "--json").value
    assert found["restarts"] == 2
    assert (found["failures"], found["failure_groups"][0]["traceback"]) == (4, error)
    assert [(each["restarted"], each["given_up"]) for each in found["failure_groups"]] == [(2, 1), (0, 1)]
    assert error in dray("t", "describe", "digits", "5").out
    twice = dray("t", "describe", "digits", "3").out
    assert twice.count(error) == 1
    assert "restarted: the same error as before" in twice
    failures = dray("t", "describe", "digits", "3", "--json").value["failures"]
    assert [(each["again"], each["error"]) for each in failures] == [(True, error), (True, error)]


def test_what_an_error_says_is_text_and_short(digits: ExperimentDirectory, dray: Dray) -> None:
    head = f"ValueError: \x1b]0;title\x07{'x' * 100_000}\n  model_def.py:7, in train_batch"
    error = f"{head}\n\nTraceback (most recent call last):\n  File"
    with Journal(digits.journal) as journal:
        journal.append({"event": "gave_up", "trial": 5, "error": error, "why": "enough"})
    [line] = [line for line in dray("e", "describe", "digits").out.splitlines() if "ValueError" in line]
    assert r"ValueError: \x1b]0;title\x07xxx" in line
    assert len(line) < 600
    assert r"ValueError: \x1b]0;title\x07xxx" in dray("t", "describe", "digits", "5").out


def test_a_failed_extension_is_reported_beside_the_state_that_the_trial_keeps(
    digits: ExperimentDirectory, dray: Dray
) -> None:
    error = "ValueError: the learning rate schedule OneCycleLR has ended"
    with Journal(digits.journal) as journal:
        message = {"trial": 3, "error": error, "where": "", "why": "the same error twice"}
        journal.append({"event": "restarted", **message})
        journal.append({"event": "gave_up", **message, "kept": "completed"})
    assert f"trial 3 2x: {error}; in the extension, so still completed\n" in dray("e", "describe", "digits").out
    [group] = dray("e", "describe", "digits", "--json").value["failure_groups"]
    assert (group["count"], group["kept"]) == (2, ["completed"])
    assert "not restarted in the extension, so still completed" in dray("t", "describe", "digits", "3").out
    log = dray("e", "logs", "digits").out
    assert "the extension of trial 3 failed for good, so it is still completed: the same error twice" in log


def test_a_report_is_one_file(digits: ExperimentDirectory, dray: Dray) -> None:
    assert dray("report", "digits", "-o", "one.html").out.strip().endswith("one.html")
    assert "validation_loss" in Path("one.html").read_text()
    assert dray("report", "digits").out.strip() == str(digits.path / "report.html")


# ------------------------------------------------------------------------------------------------------ checkpoints


def test_a_damaged_checkpoint_is_found(digits: ExperimentDirectory, dray: Dray) -> None:
    assert dray("c", "verify", "digits").out == f"{TRIALS} checkpoints verified, 0 damaged\n"
    state = digits.trial(2) / "checkpoint_10" / "state-dict.pth"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    (digits.trial(3) / "checkpoint_10" / "manifest.json").unlink()
    said = dray("c", "verify", "digits")
    assert said.code == 1
    assert "trial_2/checkpoint_10 is damaged: state-dict.pth does not match its checksum" in said.out
    assert "trial_3/checkpoint_10 is not a checkpoint: it has no manifest.json" in said.out
    assert f"{TRIALS} checkpoints verified, 2 damaged" in said.out
    listed = json.loads(dray("c", "verify", "digits", "--json").out)
    assert [Path(each["path"]).parent.name for each in listed if not each["is_whole"]] == ["trial_2", "trial_3"]
    assert dray("c", "verify", "digits", "1").code == 0
    assert dray("c", "verify", digits.trial(2) / "checkpoint_10").code == 1
    copy = digits.trial(3) / "checkpoint_10"
    copy.rename(digits.path / "copied")  # as from on_checkpoint_write_end, without the manifest
    assert dray("c", "verify", digits.path / "copied").code == 1
    assert dray("c", "export", digits.path / "copied", "-o", digits.path / "exported").code == 0
    for command in ("download", "export"):
        assert "is damaged" in dray("c", command, "digits", "2", "-o", "copy").is_one_line()
    assert not Path("copy").exists(), "nothing is left of it"


def test_a_checkpoint_of_the_best_validation_is_the_one_that_is_taken(digits: ExperimentDirectory, dray: Dray) -> None:
    trial = dray("e", "describe", "digits", "--json").value["best"]["trial"]
    best = dray("t", "describe", "digits", "best", "--json").value["best_batches"]
    checkpoint(digits.store(trial), best)
    checkpoint(digits.store(trial), best + 1)
    assert dray("c", "download", "digits", "-o", "copy").out == "copy\n"
    assert json.loads(Path("copy/progress.json").read_text())["batches"] == best
    dray("c", "download", "digits", trial, "--batches", "10", "-o", "other")
    assert json.loads(Path("other/progress.json").read_text())["batches"] == 10
    listed = dray("c", "list", "digits", trial, "--json")
    assert listed.err == ""
    [mine] = [each for each in listed.value if each["is_best"]]
    assert mine["batches"] == best
    assert mine["size"] == sum(path.stat().st_size for path in Path("copy").rglob("*") if path.is_file())


def test_what_is_exported_loads_as_plain_data_into_a_plain_model(digits: ExperimentDirectory, dray: Dray) -> None:
    for where in (["digits", "4"], [digits.trial(4) / "checkpoint_10"]):
        target = Path(f"weights-{len(where)}")
        files = dray("c", "export", *where, "-o", target).out.splitlines()
        assert files == [str(target / name) for name in ("model.pt", "hparams.json", "checkpoint.json")]
        model = torch.nn.Linear(2, 1, bias=False)
        model.load_state_dict(torch.load(target / "model.pt", weights_only=True))
        assert torch.equal(model.weight.detach(), WEIGHT)
        assert json.loads((target / "hparams.json").read_text()) == {"hidden": 16}
        about = json.loads((target / "checkpoint.json").read_text())
        assert about["batches"] == 10
        assert about["checkpoint"] == str(digits.trial(4) / "checkpoint_10")


def test_checkpoints_of_determined_and_of_several_models_are_exported(tmp_path: Path, dray: Dray) -> None:
    (tmp_path / "uuid").mkdir()
    torch.save({"models_state_dict": [{"weight": WEIGHT}, {"bias": WEIGHT}]}, tmp_path / "uuid" / "state_dict.pth")
    (tmp_path / "uuid" / "trial_state.pkl").write_bytes(pickle.dumps({"batches_trained": 7}))
    (tmp_path / "uuid" / "load_data.json").write_text(json.dumps({"trial_cls_spec": "a:B", "hparams": {"lr": 0.5}}))
    assert dray("c", "export", tmp_path / "uuid", "-o", tmp_path / "out").code == 0
    for name, key in (("model_0.pt", "weight"), ("model_1.pt", "bias")):
        assert torch.equal(torch.load(tmp_path / "out" / name, weights_only=True)[key], WEIGHT)
    about = json.loads((tmp_path / "out" / "checkpoint.json").read_text())
    assert about["models"] == ["model_0.pt", "model_1.pt"]
    assert (about["batches"], about["trial_class"]) == (7, "a:B")
    torch.save({"models_state_dict": [torch.nn.Linear(1, 1)]}, tmp_path / "uuid" / "state_dict.pth")
    assert "can't be loaded as data" in dray("c", "export", tmp_path / "uuid", "-o", tmp_path / "2").is_one_line()


# --------------------------------------------------------------------------------------------- download and delete


def test_a_copy_is_the_whole_experiment(digits: ExperimentDirectory, dray: Dray) -> None:
    assert dray("e", "download", "digits", "-o", "copy").out == "copy\n"
    names = {path.relative_to("copy").as_posix() for path in Path("copy").rglob("*") if path.is_file()}
    mine = {path.relative_to(digits.path).as_posix() for path in digits.path.rglob("*") if path.is_file()}
    assert names == mine - {"journal.jsonl.lock"}
    assert Result(Path("copy")).trials.equals(Result(digits.path).trials)
    assert dray("c", "verify", "./copy").code == 0


def test_a_copy_with_a_damaged_checkpoint_says_so(digits: ExperimentDirectory, dray: Dray) -> None:
    (digits.trial(2) / "checkpoint_10" / "state-dict.pth").write_bytes(b"")
    said = dray("e", "download", "digits", "-o", "copy")
    assert said.code == 1
    assert "copy/trial_2/checkpoint_10 is damaged" in said.err


def test_delete_asks_where_there_is_someone_to_ask(digits: ExperimentDirectory, dray: Dray) -> None:
    assert "There is no terminal to confirm it on; give --yes" in dray("e", "delete", "digits").is_one_line()
    assert digits.path.exists()


# -------------------------------------------------------------------------------------------- a running experiment


@reading
def test_a_running_experiment_can_be_looked_at_while_records_are_written(
    command: str, held: Journal, digits: ExperimentDirectory, dray: Dray
) -> None:
    with digits.journal.open("ab") as file:
        file.write(b'{"event":"star')
    with (digits.metrics / TAIL).open("ab") as file:
        file.write(b'{"trial_id": 0, "bat')
    assert dray(*command.split(), "digits", *ON_ONE[command]).code == 0


def test_a_running_experiment_is_shown_as_running(held: Journal, digits: ExperimentDirectory, dray: Dray) -> None:
    assert dray("e", "list", "--json").value[0]["state"] == "RUNNING"
    assert dray("e", "describe", "digits", "--json").value["state"] == "RUNNING"
    held.close()
    assert dray("e", "list", "--json").value[0]["state"] == "STOPPED"
    assert "dray experiment resume digits-1" in dray("e", "describe", "digits").out
    take_number(digits.path)
    assert re.search(r"resume with +dray experiment resume 1$", dray("e", "describe", "1").out, re.MULTILINE)


def test_logs_are_followed_until_the_trial_has_ended(
    held: Journal, digits: ExperimentDirectory, monkeypatch: pytest.MonkeyPatch, dray: Dray
) -> None:
    log = digits.trial(3) / "logs" / "rank_0.log"
    log.parent.mkdir()
    log.write_text("one\ntw")
    turns = iter(
        [
            lambda: log.open("a").write("o\nthree\n"),
            lambda: held.append({"event": "exited", "trial": 2, "reason": "stopped", "actions": []}),
            lambda: (log.open("a").write("fo"), held.append({"event": "exited", "trial": 3, "reason": "stopped"})),
        ]
    )
    # What happens while it waits for the next look.
    monkeypatch.setattr("dray.records.logs.time", SimpleNamespace(sleep=lambda s: next(turns)()))
    assert dray("t", "logs", "digits", "3", "-f").out == "one\ntwo\nthree\nfo\n"
    assert next(turns, None) is None, "the end of another trial is not its own"


def test_checkpoints_that_are_being_written_are_not_damaged(
    held: Journal, digits: ExperimentDirectory, dray: Dray
) -> None:
    (digits.trial(3) / "checkpoint_10" / "manifest.json").unlink()
    assert dray("c", "verify", "digits").code == 0
    held.close()
    assert dray("c", "verify", "digits").code == 1
