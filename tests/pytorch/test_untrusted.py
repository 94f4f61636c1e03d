"""Checkpoints that somebody else has had a hand on: damaged ones are refused, and nothing in any of them is run."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.storage import CheckpointError, verify
from dray.storage.manifest import DETERMINED_STATE, write_manifest
from tests.pytorch.fakes import FakeHost, OneWeight

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
    pytest.mark.filterwarnings("ignore:'torch.load' received a zip file"),
]


class Malice:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def fit(directory: Path, **fit: Any) -> FakeHost:
    """A run that is cut in the middle of an aggregation, so that its checkpoint has gradients too."""
    host = FakeHost(directory / "trial")
    host.code_dir = directory / "model"
    host.code_dir.mkdir(parents=True, exist_ok=True)
    (host.code_dir / "model_def.py").write_text("x = 1\n")
    init = {"aggregation_frequency": 2, "hparams": {"global_batch_size": 2}, "exp_conf": {"name": "x"}}
    with use_host(host), pytorch.init(**init) as context:
        pytorch.Trainer(OneWeight(context), context).fit(max_length=Batch(3), **fit)
    return host


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fit(tmp_path_factory.mktemp("saved")).checkpoints()[0])


FILES = [
    "code/model_def.py",
    "experiment.yaml",
    "gradients/rank_0.pth",
    "hparams.json",
    "manifest.json",
    "metadata.json",
    "progress.json",
    "rng/rank_0.pth",
    "state-dict.pth",
]


def test_these_are_the_files_of_a_checkpoint(saved: Path) -> None:
    found = [path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()]
    assert sorted(found) == FILES


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        flip,
        lambda path: path.unlink(),
        lambda path: path.with_name(path.name + ".more").touch(),
    ],
    ids=["truncated", "emptied", "flipped", "deleted", "one too many"],
)
def test_a_damaged_checkpoint_is_loaded_by_nobody(
    saved: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    copy = tmp_path / "checkpoint_3"
    shutil.copytree(saved, copy)
    verify(copy)
    damage(copy / name)
    with pytest.raises(CheckpointError):
        verify(copy)
    if not (copy / "manifest.json").exists():  # a user's own path loads all the same: see tests/hosts/test_local.py
        return
    with pytest.raises(CheckpointError):
        pytorch.load_trial_from_checkpoint_path(copy, trial_class=OneWeight)
    with pytest.raises(CheckpointError):
        fit(tmp_path, latest_checkpoint=str(copy))


def zipped(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def before_1_6(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


FORMS = pytest.mark.parametrize("form", [zipped, before_1_6, pickle.dumps], ids=["zip", "before 1.6", "pickle"])


def rewritten(saved: Path, directory: Path, name: str, content: bytes) -> Path:
    """A copy with this file. Its manifest is right: whoever can write the one can write the other."""
    copy = directory / "checkpoint_3"
    shutil.copytree(saved, copy)
    (copy / name).write_bytes(content)
    (copy / "manifest.json").unlink()
    write_manifest(copy, {})
    return copy


@FORMS
@pytest.mark.parametrize("name", ["state-dict.pth", "rng/rank_0.pth", "gradients/rank_0.pth"])
def test_malicious_code_in_a_dray_checkpoint_is_not_run(
    saved: Path, tmp_path: Path, name: str, form: Callable[[Any], bytes]
) -> None:
    mark = tmp_path / "it has run"
    copy = rewritten(saved, tmp_path, name, form({"callbacks": Malice(mark)}))
    refused = pytest.raises(ValueError, match=rf"{name} can't be loaded as data: .*nothing in it was run")
    with refused:
        fit(tmp_path, latest_checkpoint=str(copy))
    if name == "state-dict.pth":
        with refused:
            pytorch.load_trial_from_checkpoint_path(copy, trial_class=OneWeight)
    assert not mark.exists()


@FORMS
def test_malicious_code_in_a_determined_checkpoint_is_not_run(tmp_path: Path, form: Callable[[Any], bytes]) -> None:
    name, mark, old = DETERMINED_STATE, tmp_path / "it has run", tmp_path / "old"
    old.mkdir()
    (old / name).write_bytes(form({"models_state_dict": [Malice(mark)]}))
    refused = pytest.raises(ValueError, match=rf"{name} can't be loaded as data: .*nothing in it was run")
    with refused:
        fit(tmp_path, latest_checkpoint=str(old))
    with refused:
        pytorch.load_trial_from_checkpoint_path(old, trial_class=OneWeight)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["trial_state.pkl", "workload_sequencer.pkl"])
def test_malicious_code_in_a_determined_position_is_not_run(saved: Path, tmp_path: Path, name: str) -> None:
    mark, old = tmp_path / "it has run", tmp_path / "old"
    old.mkdir()
    shutil.copy(saved / "state-dict.pth", old / "state_dict.pth")
    (old / name).write_bytes(pickle.dumps({"batches_trained": Malice(mark)}))
    with pytest.raises(ValueError, match=rf"{name} can't be read as plain data: it names builtins.exec"):
        fit(tmp_path, latest_checkpoint=str(old))
    assert not mark.exists()


def test_a_compiled_program_in_the_place_of_a_state_is_refused(saved: Path, tmp_path: Path) -> None:
    """TorchScript, which `torch.load` would run."""
    program = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), program)
    copy = rewritten(saved, tmp_path, "state-dict.pth", program.getvalue())
    with pytest.raises(Exception, match=r"TorchScript"):
        fit(tmp_path, latest_checkpoint=str(copy))


@pytest.mark.parametrize(("name", "content"), [("rng/rank_0.pth", [1]), ("gradients/rank_0.pth", {"a": 1})])
def test_a_part_of_another_type_is_an_error(saved: Path, tmp_path: Path, name: str, content: Any) -> None:
    copy = rewritten(saved, tmp_path, name, zipped(content))
    with pytest.raises(ValueError, match=rf"{name} must hold a (list|dict), got {type(content).__name__};"):
        fit(tmp_path, latest_checkpoint=str(copy))
