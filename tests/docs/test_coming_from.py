"""The pages for users of other tools: the program of the other tool and dray's both run and learn.

coming-from.md has the model of from-hydra.md, from-katib.md, from-lightning.md, from-optuna.md, from-ray-tune.md and
from-wandb-sweeps.md; what needs a Ray is run in tests/ray/test_pages.py.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.config.load import load_config
from dray.experiment.local import run_local
from tests.docs.pages import blocks, files
from tests.forks.process import run_script
from tests.loggers import WandB
from tests.model_code import imports_undone

SIMILAR = ("from-optuna.md", "from-wandb-sweeps.md", "from-katib.md")
"""Their program for dray is the same."""


def project(page: str, directory: Path) -> Path:
    """A directory with the page's files, the model, and the trial of from-lightning.md unless it has its own."""
    directory.mkdir()
    trial = {"model_def.py": files("from-lightning.md")["model_def.py"]}
    for name, text in {**files("coming-from.md"), **trial, **files(page)}.items():
        (directory / name).write_text(text)
    return directory


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    with imports_undone():
        yield tmp_path / "results"


def run_command(page: str, program: str, directory: Path) -> str:
    """The output of the page's command for this program."""
    commands = [
        shlex.split(line, comments=True) for block in blocks("sh", page=page) for line in block.text.splitlines()
    ]
    [arguments] = [words[2:] for words in commands if words[:2] == ["python", program]]
    return run_script(directory / program, *arguments, directory=directory)


def split(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def losses(run: Path) -> list[float]:
    """The validation losses of a local run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["validation"]["validation_loss"] for row in rows if "validation" in row]


def assert_learned(found: list[float], validations: int = 9) -> None:
    """These are the validation losses of a training that has led somewhere; at chance a loss is 2.3."""
    assert len(found) == validations
    assert found[-1] < min(found[0], 0.6)


# ---------------------------------------------------------------------------------------------------------- dray's side
def test_pages_with_the_same_program_have_the_same() -> None:
    assert len({files(page)["train.py"] for page in SIMILAR}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "validations"),
    [
        ("from-optuna.md", 9),
        pytest.param("from-hydra.md", 9, marks=pytest.mark.long),
        ("from-ray-tune.md", 3),  # it validates at its rungs
    ],
)
def test_a_trial_of_drays_search_learns(page: str, validations: int, tmp_path: Path, results: Path) -> None:
    code = project(page, tmp_path / "code")
    raw = yaml.safe_load((code / "search.yaml").read_text())
    raw["hyperparameters"]["lr"] = 0.01
    assert_learned(losses(run_local(load_config(raw), code)), validations)


# ----------------------------------------------------------------------------------------------------- the other side
@pytest.mark.slow
@pytest.mark.long
def test_optuna(tmp_path: Path) -> None:
    printed = run_command("from-optuna.md", "study.py", project("from-optuna.md", tmp_path / "code"))
    [loss] = re.findall(r"^\{'hidden': \d+, 'dropout': [\d.]+, 'lr': [\d.]+\} ([\d.]+)$", printed, re.MULTILINE)
    assert float(loss) < 0.6
    assert "Trial 15" in printed
    assert "pruned" in printed


@pytest.mark.slow
@pytest.mark.long
def test_hydra(tmp_path: Path, results: Path) -> None:
    code = project("from-hydra.md", tmp_path / "code")
    printed = run_command("from-hydra.md", "hydra_train.py", code)
    found = [float(loss) for loss in re.findall(r"validation_loss ([\d.]+)", printed)]
    assert len(found) == 4 * 9, "four jobs"
    assert found[-1] < 0.6
    assert sorted(path.name for path in code.glob("multirun/*/*/[0-9]")) == ["0", "1", "2", "3"]
    run_command("from-hydra.md", "train.py", code)
    [run] = (results / "local").iterdir()
    assert_learned(losses(run))


@pytest.mark.slow
@pytest.mark.long
def test_wandb(tmp_path: Path) -> None:
    """As the agent starts it; the sweep itself needs W&B's server."""
    code = project("from-wandb-sweeps.md", tmp_path / "code")
    sweep = yaml.safe_load((code / "sweep.yaml").read_text())
    drawn = {name: space["max"] / 10 for name, space in sweep["parameters"].items()}
    drawn["hidden"] = int(drawn["hidden"])
    (code / "drawn.yaml").write_text(yaml.safe_dump({name: {"value": value} for name, value in drawn.items()}))
    run_script(
        code / sweep["program"], directory=code, WANDB_MODE="offline", WANDB_SWEEP_PARAM_PATH=str(code / "drawn.yaml")
    )
    [history] = WandB(code).history.values()
    assert_learned([row[sweep["metric"]["name"]] for row in history])


@pytest.mark.slow
@pytest.mark.long
def test_katib(tmp_path: Path) -> None:
    """The trial's container as a process; `test_katibs_experiment_is_valid` checks the rest."""
    code = project("from-katib.md", tmp_path / "code")
    spec = katib()["spec"]
    [container] = spec["trialTemplate"]["trialSpec"]["spec"]["template"]["spec"]["containers"]
    drawn = {"lr": "0.01", "hidden": "64", "dropout": "0.1"}
    assert list(drawn) == [each["name"] for each in spec["parameters"]]
    filled = [
        re.sub(r"\$\{trialParameters\.(\w+)\}", lambda match: drawn[match[1]], each) for each in container["args"]
    ]
    python, program = container["command"]
    assert python == "python"
    printed = run_script(code / program, *filled, directory=code)
    # As Katib's collector of metrics reads the output by default.
    named = re.findall(r"([\w|-]+)\s*=\s*([+-]?\d*(?:\.\d+)?(?:[Ee][+-]?\d+)?)", printed)
    assert {name for name, _ in named} == {spec["objective"]["objectiveMetricName"]}
    assert_learned([float(value) for _, value in named])


def katib() -> dict[str, Any]:
    experiment: dict[str, Any] = yaml.safe_load(files("from-katib.md")["katib.yaml"])
    return experiment


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Valid config keys have changed:UserWarning")
def test_katibs_experiment_is_valid() -> None:
    from kubeflow_katib_api.models.v1beta1_experiment import V1beta1Experiment

    parsed = V1beta1Experiment.from_dict(katib())
    assert parsed is not None
    assert parsed.to_dict() == katib(), "an unknown field is dropped"


@pytest.mark.slow
@pytest.mark.long
def test_lightning(tmp_path: Path, results: Path) -> None:
    code = project("from-lightning.md", tmp_path / "code")
    # In one process: Lightning takes seconds to import.
    (code / "both.py").write_text(
        "import runpy\n"
        "runpy.run_path('module.py', run_name='__main__')\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    printed = run_script(code / "both.py", directory=code)
    assert printed.count("`max_epochs=9` reached") == 2
    [run] = (results / "local").iterdir()
    assert_learned(losses(run))
