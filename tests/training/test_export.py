"""Exports of sharded models: the same weights in one file, in little memory."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.records.checkpoints import export
from dray.storage import CheckpointError, Location
from dray.storage.manifest import write_manifest
from dray.training.checkpoint import files, shard_file, sharded
from dray.training.checkpoint.shard_file import TensorPiece
from dray.training.progress import Progress

safetensors = pytest.importorskip("safetensors.torch")


def pieces_of(tensor: torch.Tensor, dim: int, ranks: int) -> list[TensorPiece]:
    offsets = [0] * tensor.ndim
    found = []
    for piece in tensor.chunk(ranks, dim):
        found.append(TensorPiece(piece, tuple(offsets)))
        offsets[dim] += piece.shape[dim]
    return found


def save(directory: Path, model: dict[str, Any], dims: dict[str, int], ranks: int = 2) -> Path:
    """A checkpoint of a model some of whose tensors are divided along these dimensions."""
    state = OrderedDict(
        (name, torch.empty_like(value, device="meta") if name in dims else value) for name, value in model.items()
    )
    contents = files.contents(
        state={"models_state_dict": [state]},
        progress=Progress(),
        ranks=[files.RankState(rng={})] * ranks,
        description=files.Description(metadata={}),
    )
    shards: list[dict[str, TensorPiece]] = [{} for _ in range(ranks)]
    for name, dim in dims.items():
        for rank, piece in enumerate(pieces_of(model[name], dim, ranks)):
            shards[rank][f"models_state_dict.0.{name}"] = piece
    parts = {sharded.file_of(rank): part for rank, part in enumerate(shards)}
    directory.mkdir(parents=True)
    files.write(directory, files.Contents(objects=contents.objects, texts=contents.texts, nbytes=0, shards=parts))
    write_manifest(directory, {})
    return directory


def exported(checkpoint: Path, target: Path, form: Any = "state-dict") -> Any:
    file, *_ = export(Location.of(checkpoint), target, form)
    return torch.load(file, weights_only=True) if form == "state-dict" else safetensors.load_file(file)


MODEL = {
    "rows": torch.arange(35.0).reshape(7, 5),
    "columns": torch.arange(40, dtype=torch.int16).reshape(4, 10),
    "middle": torch.randn(3, 4, 5).to(torch.bfloat16),
    "whole": torch.randn(6, dtype=torch.float64),
    "scalar": torch.tensor(3),
    "none": torch.empty(0, 4),
    "a/name": torch.arange(4.0),
}
DIMS = {"rows": 0, "columns": 1, "middle": 1, "a/name": 0}


@pytest.mark.parametrize("form", ["state-dict", "safetensors"])
def test_all_pieces_come_together(tmp_path: Path, form: str) -> None:
    found = exported(save(tmp_path / "checkpoint_1", MODEL, DIMS, ranks=3), tmp_path / "model", form)
    assert found.keys() == MODEL.keys()
    for name, tensor in MODEL.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_plain_checkpoints_keep_ties_and_what_is_in_no_order(tmp_path: Path) -> None:
    rows = torch.arange(35.0).reshape(7, 5)
    model = {**MODEL, "tied": rows, "rows": rows, "columns": rows.t(), "part": rows[2:4, 1:], "channel": rows[:, 1]}
    checkpoint = save(tmp_path / "checkpoint_1", model, {})
    for form in ("state-dict", "safetensors"):
        found = exported(checkpoint, tmp_path / form, form)
        assert found.keys() == model.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
        assert (found["tied"].data_ptr() == found["rows"].data_ptr()) is (form == "state-dict")


def test_checkpoints_of_torchs_oldest_format_are_exported(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "checkpoint_1", MODEL, {})
    state = torch.load(checkpoint / files.STATE, weights_only=True)
    torch.save(state, checkpoint / files.STATE, _use_new_zipfile_serialization=False)
    (checkpoint / "manifest.json").unlink()
    assert torch.equal(exported(checkpoint, tmp_path / "model")["columns"], MODEL["columns"])


def test_what_is_no_tensor_is_kept_or_refused(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "checkpoint_1", {**MODEL, "_extra_state": {"scale": 3}}, DIMS)
    assert exported(checkpoint, tmp_path / "model")["_extra_state"] == {"scale": 3}
    with pytest.raises(ValueError, match=r"_extra_state in the model's state is a dict.*state-dict"):
        exported(checkpoint, tmp_path / "other", "safetensors")
    assert not (tmp_path / "other").exists()


def test_a_missing_shard_ends_the_export(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "checkpoint_1", MODEL, DIMS)
    (checkpoint / "manifest.json").unlink()
    (checkpoint / sharded.file_of(1)).unlink()
    with pytest.raises(CheckpointError, match=r"of the 35 elements of models_state_dict\.0\.rows, sharded/ has 20"):
        exported(checkpoint, tmp_path / "model")
    assert not (tmp_path / "model").exists()


MEASURE = """
import sys, threading
from pathlib import Path
import torch
from dray.records.checkpoints import export
from dray.storage import Location

def used():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10

before, seen, over = used(), [], threading.Event()
def watch():
    while not over.wait(0.001):
        seen.append(used())
thread = threading.Thread(target=watch)
thread.start()
for form in ("state-dict", "safetensors"):
    export(Location.of(sys.argv[1]), Path(sys.argv[2], form), form)
over.set()
thread.join()
print(max(seen) - before)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    # Ten tensors of 5 MB are sharded, and as many are not.
    model = {f"{kind}.{n}": torch.full((1600, 800), float(n)) for kind in ("sharded", "whole") for n in range(10)}
    dims = {name: n % 2 for n, name in enumerate(model) if name.startswith("sharded")}
    checkpoint = save(tmp_path / "checkpoint_1", model, dims)
    used = subprocess.check_output([sys.executable, "-c", MEASURE, checkpoint, tmp_path], text=True)
    assert int(used) <= 25 << 20, "either half is 50"


def test_a_rank_file_is_a_safetensors_file(tmp_path: Path) -> None:
    shards = {name: TensorPiece(tensor, (0,) * tensor.ndim) for name, tensor in MODEL.items()}
    with (tmp_path / "a.safetensors").open("wb") as file:
        shard_file.write(file, shards)
    theirs, ours = safetensors.load_file(tmp_path / "a.safetensors"), shard_file.read(tmp_path / "a.safetensors")
    for name, tensor in MODEL.items():
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(ours[name].load(), tensor)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"F32"', b'"F99"'),
        (b'"shape": [7, 5]', b'"shape": [8, 5]'),
        (b'"shape": [7, 5]', b'"shape": [-7,5]'),
        (b'"data_offsets": [', b'"data_offsets": {'),
        (b"saved_offsets", b"saved_offsetz"),
        (b"{", b"["),
    ],
)
def test_a_damaged_header_is_an_error(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        shard_file.write(file, {"rows": TensorPiece(MODEL["rows"], (0, 0))})
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"a.safetensors is damaged: .*; use an earlier checkpoint"):
        shard_file.read(path)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="rows is not as large as its shape"):
        shard_file.read(path)


def test_a_type_without_a_name_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"z is of torch.complex128, which safetensors can't hold"):
        shard_file.header({"z": torch.zeros(1, dtype=torch.complex128)}, {})
