"""The command line: what it runs, what it says of bad input, how it exits."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import dray
from dray.cli import main
from dray.errors import ExperimentError, FoundInTraining
from searchers.errors import JournalError
from tests.cli.said import Said

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits"
CONFIG = "searcher: {name: single, metric: loss, max_length: {batches: 4}}\nentrypoint: my_model:MyTrial\n"


class FakeExperiment:
    """Records what it was made with; ``run`` does what the test says."""

    made: ClassVar[list[tuple[Any, ...]]] = []
    outcome: ClassVar[BaseException | None] = None
    states: ClassVar[list[str]] = ["COMPLETED"]

    def __init__(
        self, config: Any, model_dir: Any = None, trial: Any = None, path: Any = None, storage_path: str | None = None
    ) -> None:
        self.made.append((config.name, model_dir, path if storage_path is None else storage_path))

    @classmethod
    def of_command(cls, *arguments: Any, **options: Any) -> FakeExperiment:
        return cls(*arguments, **options)

    def run(self) -> Any:
        if self.outcome is not None:
            raise self.outcome
        return SimpleNamespace(trials={"state": self.states})


@pytest.fixture(autouse=True)
def experiment(monkeypatch: pytest.MonkeyPatch) -> type[FakeExperiment]:
    # Into the dictionary: asking the module for it would import torch and Ray.
    monkeypatch.setitem(vars(dray), "Experiment", FakeExperiment)
    FakeExperiment.made.clear()
    FakeExperiment.outcome = None
    FakeExperiment.states = ["COMPLETED"]
    return FakeExperiment


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "one.yaml").write_text(CONFIG)
    return tmp_path / "one.yaml"


def run(*arguments: object) -> Said:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return Said(code=int(end.value.code or 0), out=out.getvalue(), err=err.getvalue())


@pytest.mark.parametrize(
    ("options", "code", "place"),
    [
        (["code"], Path("code"), None),
        ([], None, None),
        ([".", "--path", "results"], Path("."), Path("results")),
        (["--storage-path", "s3://bucket/results"], None, "s3://bucket/results"),
    ],
)
def test_create_runs_the_config_with_the_models_code_by_default_that_beside_it(
    config: Path, options: list[str], code: Path | None, place: Path | str | None
) -> None:
    assert run("experiment", "create", config, *options).code == 0
    assert FakeExperiment.made == [("one", config.parent if code is None else code, place)]


def test_the_demo_is_the_search_of_the_digits_example() -> None:
    result = run("demo")
    assert (result.code, FakeExperiment.made) == (0, [("digits-asha", DIGITS, None)])
    assert f"cp -r {DIGITS} digits" in result.err


def test_a_local_run_has_no_object_store(config: Path) -> None:
    result = run("e", "create", config, "--storage-path", "s3://bucket/results", "--local")
    assert result.code == 2
    assert "--storage-path can't be used with --local" in result.err


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["COMPLETED", "PRUNED", "INVALID_HP"], 0),
        (["COMPLETED", "ERRORED"], 3),
        (["COMPLETED", "OUT_OF_MEMORY"], 3),
    ],
)
def test_a_search_with_failed_trials_has_an_exit_code_of_its_own(config: Path, states: list[str], code: int) -> None:
    FakeExperiment.states = states
    assert run("e", "create", config).code == code


def test_a_fault_of_the_config_that_a_trial_found_is_a_failure_and_not_bad_usage(config: Path) -> None:
    FakeExperiment.outcome = FoundInTraining([("searcher.metric", "no such metric")])
    result = run("e", "create", config)
    assert (result.code, "searcher.metric: no such metric" in result.err) == (1, True)


def test_exit_of_a_local_program_is_reported_with_its_line(config: Path, tmp_path: Path) -> None:
    config.write_text(CONFIG.replace("my_model:MyTrial", "python3 my_program.py"))
    (tmp_path / "my_program.py").write_text("import sys\n\nsys.exit(3)\n")
    path = list(sys.path)
    result = run("e", "create", config, "--local", "--path", tmp_path / "results")
    sys.path[:] = path
    assert result.code == 1
    told = result.err[result.err.index("dray: ") :].splitlines()
    assert told[0] == "dray: python3 my_program.py exited with code 3"
    assert told[1].endswith("my_program.py:3, in <module>")
    assert told[2:] == ["    sys.exit(3)"]


def test_a_metric_that_a_local_program_does_not_report_is_one_line(config: Path, tmp_path: Path) -> None:
    config.write_text(
        CONFIG.replace("my_model:MyTrial", "python3 my_program.py").replace("single, ", "random, max_trials: 2, ")
    )
    (tmp_path / "my_program.py").write_text(
        "from dray import core\n\nwith core.init() as context:\n"
        "    context.train.report_validation_metrics(1, {'other': 1.0})\n"
    )
    path = list(sys.path)
    result = run("e", "create", config, "--local", "--path", tmp_path / "results")
    sys.path[:] = path
    assert result.code == 1
    [told] = [line for line in result.err.splitlines() if "searcher.metric" in line]
    assert told.startswith("dray: searcher.metric: the search compares ")
    assert "Traceback" not in result.err


@pytest.mark.parametrize("options", [[], ["--max-trials", "0"], ["--max-length", "a"]])
def test_extend_without_a_budget_is_bad_input(tmp_path: Path, options: list[str]) -> None:
    result = run("e", "extend", tmp_path, *options)
    assert result.code == 2
    assert "--max-" in result.err
    assert FakeExperiment.made == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["e", "creat", "one.yaml"], "dray: no such command 'creat'; did you mean 'create'; see dray e --help"),
        (["run", "one.yaml"], "dray: no such command; did you mean dray experiment create"),
        (["sweep", "one.yaml"], "dray: no such command; did you mean dray experiment create"),
        (["logs"], "dray: no such command; did you mean dray experiment logs or dray trial logs"),
        (["e", "create"], "dray: missing argument 'CONFIG'; see dray e create --help"),
    ],
)
def test_bad_usage_is_one_line_that_points_to_help(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == told + "\n"


def test_fields_are_changed_from_the_command_line() -> None:
    changed = ["--config", "searcher.max_trials=16", "--config", "searcher.max_length={epochs: 32}"]
    result = run("preview", DIGITS / "asha.yaml", *changed)
    assert result.code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line]
    assert [row[2] for row in rows] == ["2", "8", "32"]
    assert rows[0][3] == "16"


def test_a_bad_change_is_one_message() -> None:
    for command in (["preview"], ["e", "create"]):
        result = run(*command, DIGITS / "asha.yaml", "--config", "searcher.max_trails=8")
        assert result.code == 2
        assert "searcher.max_trails: unknown field; did you mean max_trials?" in result.err
    assert FakeExperiment.made == []


def test_bad_config_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(CONFIG.replace("metric: loss", "metrik: loss"))
    result = run("e", "create", tmp_path / "bad.yaml")
    assert result.code == 2
    assert "searcher.metrik: unknown field; did you mean metric?" in result.err
    assert "Traceback" not in result.err
    assert FakeExperiment.made == []


@pytest.mark.parametrize(
    ("outcome", "code", "says"),
    [
        (ExperimentError("no trial completed: 64 of 64 ended in an error"), 1, "no trial completed"),
        (JournalError("journal.jsonl is being written by process 7"), 2, "written by process 7"),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C"),
    ],
)
def test_exit_code_says_how_the_search_ended(
    config: Path, experiment: type[FakeExperiment], outcome: BaseException, code: int, says: str
) -> None:
    experiment.outcome = outcome
    result = run("e", "create", config)
    assert (result.code, says in result.err, "Traceback" in result.err) == (code, True, False)


def test_version_is_printed() -> None:
    assert run("--version").out == f"dray {dray.__version__}\n"
