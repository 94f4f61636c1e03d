"""A program run in this process, as Python would run it in another: here one of each is compared with the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dray
from dray import imports
from dray.compat.names import VERSION
from dray.core import ClusterInfo, TrialInfo
from dray.script import Script, ScriptFailed, users_traceback
from tests.model_code import imports_undone

ASKS = """
import json, os, sys
import my_helper
my_helper.calls += 1
class Mine: pass
assert sys.modules["__main__"].Mine is Mine
with open("told.json", "w") as file:
    json.dump({"argv": sys.argv, "path0": os.path.realpath(sys.path[0]), "cwd": os.getcwd(), "name": __name__,
               "file": os.path.realpath(__file__), "package": __package__, "calls": my_helper.calls}, file)
"""


EXITS_IN_FIT = """
import sys
from dray.training.parallel.exchange import all_or_none
from dray.training.parallel.distributed import DistributedContext

class Mine(DistributedContext):
    def allgather(self, stuff, timeout_s=None):
        sys.exit()

with all_or_none(Mine(), "starting training"):
    pass
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__init__.py").touch()
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "my_program.py").write_text(ASKS)
        (folder / "my_helper.py").write_text("calls = 0\n")
    with imports_undone():
        imports.use_model_dir(tmp_path)
        yield tmp_path
    sys.modules.pop("my_helper", None)


READS = """
import json
import reads, counts
counts.calls += 1
with open("told.json", "w") as file:
    json.dump({"lr": reads.lr, "calls": counts.calls}, file)
"""


def test_modules_that_ask_for_the_trial_at_import_are_imported_for_each(directory: Path, set_info: Any) -> None:
    (directory / "my_program.py").write_text(READS)
    (directory / "counts.py").write_text("calls = 0\n")
    # Not at its top: what asks may be a class that it makes an object of.
    asks = "import dray\ndef ask(): return dray.get_cluster_info().trial.hparams\n{}\n"
    program = Script(command="python3 my_program.py", file="my_program.py")

    def run(lr: float) -> dict[str, object]:
        trial = TrialInfo(trial_id=1, experiment_id=1, trial_seed=0, hparams={"lr": lr})
        set_info(ClusterInfo(trial=trial))
        program.run(directory)
        return told(directory)

    (directory / "reads.py").write_text(asks.format("lr = ask()['lr']"))
    assert [run(0.1), run(0.2)] == [{"lr": 0.1, "calls": 1}, {"lr": 0.2, "calls": 1}]
    (directory / "reads.py").write_text(asks.format("lr = None"))
    imports.forget_model_dir()
    assert [run(0.1), run(0.2)] == [{"lr": None, "calls": 1}, {"lr": None, "calls": 2}], "others stay imported"


def told(directory: Path) -> dict[str, object]:
    return dict(json.loads((directory / "told.json").read_text()))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (Script(command="c", file="my_program.py", arguments=("--a", "b c")), ["my_program.py", "--a", "b c"]),
        (Script(command="c", file="inner/my_program.py"), ["inner/my_program.py"]),
        (Script(command="c", module="inner.my_program", arguments=("x",)), ["-m", "inner.my_program", "x"]),
        (Script(command="c", module="my_program"), ["-m", "my_program"]),
    ],
    ids=["file", "file in a folder", "module of a package", "module"],
)
def test_program_finds_what_python_would_have_given_it(directory: Path, script: Script, words: list[str]) -> None:
    before = list(sys.argv), list(sys.path), sys.modules["__main__"], os.getcwd()
    script.run(directory)
    mine = told(directory)
    subprocess.run([sys.executable, *words], cwd=directory, check=True)
    assert mine == told(directory)
    assert before == (sys.argv, sys.path, sys.modules["__main__"], os.getcwd())


@pytest.mark.parametrize("how", [{"file": "my_program.py"}, {"module": "my_program"}])
def test_second_run_executes_the_program_anew_with_the_modules_of_the_first(
    directory: Path, how: dict[str, str]
) -> None:
    script = Script(command="c", **how)  # type: ignore[arg-type]
    script.run(directory)
    script.run(directory)
    assert told(directory)["calls"] == 2


STARTS = """
import json, os, shutil, subprocess, sys
code = "import determined; print(determined.__version__)"
done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
with open("told.json", "w") as file:
    json.dump({"version": done.stdout.strip(), "error": done.stderr, "dray": shutil.which("dray")}, file)
"""


@pytest.mark.api("10.3")
def test_processes_that_a_program_starts_find_determined_and_the_commands(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("PYTHONPATH", str(directory / "mine"))
    (directory / "starts.py").write_text(STARTS)
    before = dict(os.environ)
    Script(command="python3 starts.py", file="starts.py").run(directory)
    told = json.loads((directory / "told.json").read_text())
    assert (told["version"], told["error"]) == (f"{VERSION}+dray{dray.__version__}", "")
    assert told["dray"] == str(Path(sysconfig.get_path("scripts")) / "dray")
    assert dict(os.environ) == before, "nothing stays for the next trial"


def test_they_find_the_real_determined_where_it_is_installed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = directory / "site-packages"
    (installed / "determined").mkdir(parents=True)
    (installed / "determined" / "__init__.py").write_text("__version__ = 'the real one'\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    (directory / "starts.py").write_text(f"import os; os.environ['PYTHONPATH'] += ':{installed}'\n{STARTS}")
    monkeypatch.setenv("PYTHONPATH", str(directory / "mine"))
    Script(command="python3 starts.py", file="starts.py").run(directory)
    assert json.loads((directory / "told.json").read_text())["version"] == "the real one"


@pytest.mark.parametrize("text", ["", "raise SystemExit", "import sys; sys.exit(0)", "exit(None)"])
def test_exit_code_0_is_an_ordinary_end(directory: Path, text: str) -> None:
    (directory / "ends.py").write_text(text)
    Script(command="python3 ends.py", file="ends.py").run(directory)


@pytest.mark.parametrize("how", [{"file": "ends.py"}, {"module": "ends"}])
@pytest.mark.parametrize(("argument", "code"), [("3", 3), ("True", 1), ("'no data'", 1)])
def test_other_exit_codes_are_reported(
    directory: Path, how: dict[str, str], argument: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "ends.py").write_text(f"import sys\nsys.exit({argument})")
    with pytest.raises(ScriptFailed, match=f"python3 ends.py exited with code {code}"):
        Script(command="python3 ends.py", **how).run(directory)  # type: ignore[arg-type]
    assert capsys.readouterr().err == ("no data\n" if "data" in argument else "")


def test_exit_code_0_in_the_midst_of_training_is_no_ordinary_end(directory: Path) -> None:
    (directory / "ends.py").write_text(EXITS_IN_FIT)
    with pytest.raises(ScriptFailed, match=r"exited with code 0 during training; .*set_stop_requested"):
        Script(command="python3 ends.py", file="ends.py").run(directory)


def test_error_passes_through_with_the_programs_own_traceback(directory: Path) -> None:
    (directory / "fails.py").write_text("def f():\n    1 / 0\nf()\n")
    with pytest.raises(ZeroDivisionError) as caught:
        Script(command="c", file="fails.py").run(directory)
    lines = users_traceback(caught.value, directory).splitlines()
    assert lines[1] == f'  File "{directory}/fails.py", line 3, in <module>'
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert os.getcwd() != str(directory)
