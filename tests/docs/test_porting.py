"""docs/porting.md: its scripts run, its trial learns like the original loop; the snippets of porting-more.md train."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dray import pytorch
from dray.hosts import use_host
from tests.docs.pages import PAGES, blocks, files
from tests.forks.process import run_script
from tests.pytorch.fakes import FakeHost

HPARAMS = {"global_batch_size": 64, "hidden": 128, "lr": 1e-2}


FILES = files("porting.md")
SNIPPETS = [block.text for block in blocks("python", page="porting-more.md")]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the page's files."""
    directory = tmp_path / "project"
    directory.mkdir()
    for name, text in FILES.items():
        (directory / name).write_text(text)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "home"))
    return directory


def checkpoints(project: Path) -> list[int]:
    """Batches trained, of each checkpoint of the only run."""
    [run] = (project.parent / "home" / "local").iterdir()
    return sorted(int(manifest.parent.name.rpartition("_")[2]) for manifest in run.glob("checkpoint_*/manifest.json"))


def last_accuracy(output: str) -> float:
    return float(re.findall(r"accuracy[ =]([\d.]+)", output)[-1])


def namespace() -> dict[str, Any]:
    """The names that the page's snippets have: those of model_def.py."""
    module = ModuleType("model_def")
    exec(FILES["model_def.py"], vars(module))
    return vars(module)


def test_every_block_of_python_is_a_file() -> None:
    programs = {name for name in FILES if name.endswith(".py")}
    assert programs == {"by_hand.py", "model_def.py", "train.py", "train_anywhere.py"}
    assert len(programs) == len(blocks("python", page="porting.md"))


@pytest.mark.parametrize("snippet", SNIPPETS[:-2], ids=lambda text: re.search(r"class (\w+)\(DigitsTrial", text)[1])
def test_snippet_trains(snippet: str, tmp_path: Path) -> None:
    names = namespace()
    exec(snippet, names)
    [trial_class] = [
        thing
        for thing in names.values()
        if isinstance(thing, type) and issubclass(thing, names["DigitsTrial"]) and thing is not names["DigitsTrial"]
    ]
    host = FakeHost(tmp_path)
    with use_host(host), pytorch.init(hparams=HPARAMS, max_length=pytorch.Batch(2)) as context:
        pytorch.Trainer(trial_class(context), context).fit()
    validation = host.reports[-1].validation
    assert validation is not None
    assert {"accuracy", "mistakes"} & validation.keys()


@pytest.mark.api("2.6", "9.4", "9.7")
def test_snippets_on_checkpoints_resume_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names = namespace()
    for snippet in SNIPPETS[-2:]:
        exec(snippet, names)
    assert names["context"].get_initial_batch() == 10
    assert all(
        (p == q).all() for p, q in zip(names["model"].parameters(), names["trial"].model.parameters(), strict=True)
    )


def test_names_on_the_page_exist() -> None:
    used = set(
        re.findall(r"\b(?:context|experimental|pytorch)\.([a-z_]+)\(", PAGES["porting.md"] + PAGES["porting-more.md"])
    )
    assert {"wrap_model", "step_optimizer", "use_amp", "init"} <= used
    homes = (pytorch, pytorch.PyTorchTrialContext, pytorch.PyTorchExperimentalContext)
    assert [name for name in used if not any(hasattr(home, name) for home in homes)] == []


@pytest.mark.long
@pytest.mark.slow
def test_trial_learns_like_the_original_loop(project: Path) -> None:
    by_hand = last_accuracy(run_script(project / "by_hand.py", directory=project))
    assert by_hand > 0.93
    assert last_accuracy(run_script(project / "train.py", directory=project)) == pytest.approx(by_hand, abs=0.04)


@pytest.mark.slow
@pytest.mark.long
def test_script_for_anywhere_runs_locally(project: Path) -> None:
    run_script(project / "train_anywhere.py", directory=project)
    assert checkpoints(project) == [8 * 23]  # 1,437 records, 64 a batch
