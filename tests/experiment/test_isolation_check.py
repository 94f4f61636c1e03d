"""What is checked before an experiment with ``isolation: sandbox`` starts: none of its code runs outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dray
from dray.cluster.bubblewrap import why_impossible
from dray.config.load import load_config
from dray.errors import ConfigError, Invalid
from dray.experiment import isolation_check
from dray.experiment.variants import from_patch
from dray.records.directory import ExperimentDirectory

NO_SANDBOX = why_impossible()
SEARCHER = {"name": "random", "metric": "loss", "max_length": {"batches": 1}, "max_trials": 1}
CONFIG = {"entrypoint": "model_def:Trial", "searcher": SEARCHER, "isolation": "sandbox"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code that notes when it is imported."""
    monkeypatch.setattr(isolation_check, "why_impossible", lambda: "")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_def.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nclass Trial(PyTorchTrial): ...\n")
    return model


def created(model: Path, **fields: Any) -> dray.Experiment:
    return dray.Experiment({**CONFIG, **fields}, model_dir=model, path=model.parent / "experiment")


def test_creating_and_resuming_an_experiment_does_not_import_its_code(model: Path, tmp_path: Path) -> None:
    created(model).prepare()
    dray.Experiment.resume(tmp_path / "experiment")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"checkpoint_storage": {"type": "s3", "bucket": "b"}},
            "checkpoint_storage: must be a directory",
        ),
        ({"entrypoint": "model_def2:Trial"}, "entrypoint: "),
    ],
)
def test_what_it_lacks_is_reported(fields: dict[str, Any], fault: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        created(model, **fields)
    assert fault in str(caught.value)
    assert not (tmp_path / "imported").exists()


def test_a_machine_without_sandboxes_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation_check, "why_impossible", lambda: "has no bubblewrap (the command bwrap)")
    with pytest.raises(ConfigError, match=r"isolation: this machine has no bubblewrap .*; install bubblewrap"):
        created(model)


def test_a_startup_hook_is_refused(model: Path) -> None:
    (model / "startup-hook.sh").write_text("touch $HOME/written")
    with pytest.raises(ConfigError, match=r"startup-hook\.sh: can't be used with isolation: sandbox"):
        created(model)


def test_runs_in_this_process_have_no_sandbox(model: Path, tmp_path: Path) -> None:
    from dray.experiment.local import run_local

    for run in (
        lambda: dray.probe(CONFIG, model_dir=model),
        lambda: run_local(load_config(CONFIG), model, path=tmp_path / "local"),
    ):
        with pytest.raises(ConfigError, match="has no sandbox, got isolation: sandbox"):
            run()
    assert not (tmp_path / "imported").exists()


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_SANDBOX), reason=f"this machine {NO_SANDBOX}")
def test_the_code_of_a_variant_is_imported_on_trial_in_a_sandbox(model: Path, tmp_path: Path) -> None:
    created(model).prepare()
    directory = ExperimentDirectory.open(tmp_path / "experiment")
    broken = "--- a/model_def.py\n+++ b/model_def.py\n@@ -1,2 +1,3 @@\n+raise KeyError('no such thing')\n{}"
    with pytest.raises(Invalid, match=r"(?s)the variant's code can't be used: .*KeyError: 'no such thing'"):
        lines = (model / "model_def.py").read_text().splitlines(keepends=True)
        from_patch(directory, broken.format("".join(f" {line}" for line in lines)))
    assert not (tmp_path / "imported").exists()
