"""The contents of checkpoints, and state that they refuse."""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dray.training import rng
from dray.training.checkpoint import files as checkpoint
from dray.training.checkpoint.files import Description, RankState
from dray.training.checkpoint.plain_state import UnsavableState
from dray.training.progress import Progress


class Colour(enum.Enum):
    RED = 1


class Thing:
    pass


def written(directory: Path, state: dict[str, Any], **kwargs: Any) -> Path:
    contents = checkpoint.contents(
        state=state,
        progress=Progress(batches=3, saved=3),
        ranks=[RankState(rng=rng.capture(torch.device("cpu")))],
        description=Description(metadata={"framework": "torch"}, **kwargs),
    )
    checkpoint.write(directory, contents)
    return directory


@pytest.mark.parametrize(
    ("value", "kind"),
    [(deque([1]), "collections.deque"), (Colour.RED, "Colour"), (Thing(), "Thing"), (Path("x"), "Path")],
)
def test_state_that_would_not_load_is_refused_when_saved(tmp_path: Path, value: Any, kind: str) -> None:
    state = {"callbacks": {"early_stop": {"history": [1, {"last": value}]}}}
    with pytest.raises(UnsavableState, match=rf"callback 'early_stop' at \['history'\]\[1\]\['last'\].*{kind}"):
        written(tmp_path, state)
    assert not (tmp_path / "state-dict.pth").exists()


def test_plain_state_and_numpy_come_back_equal(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "numbers": (1, 2.5, True, None, 1j, b"x"),
        "set": {1, 2},
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "array": np.arange(3, dtype=np.int16),
        "scalar": np.float32(0.5),
        "flag": np.bool_(True),
        "words": np.array(["a", "bc"]),
        "tensor": torch.ones(2, dtype=torch.bfloat16),
        "dtype": torch.float16,
    }
    loaded = checkpoint.read_state(written(tmp_path, {"callbacks": {"c": values}}), [])["callbacks"]["c"]
    assert loaded.keys() == values.keys()
    for name in ("numbers", "set", "ordered", "counter", "scalar", "flag", "dtype"):
        assert loaded[name] == values[name]
        assert type(loaded[name]) is type(values[name])
    for name in ("array", "words"):
        np.testing.assert_array_equal(loaded[name], values[name])
        assert loaded[name].dtype == values[name].dtype
    assert torch.equal(loaded["tensor"], values["tensor"])


def test_gradients_of_two_ranks_are_averaged_for_one(tmp_path: Path) -> None:
    state = rng.capture(torch.device("cpu"))
    ranks = [RankState(rng=state, gradients=[[torch.tensor([v]), None]]) for v in (1.0, 3.0)]
    contents = checkpoint.contents(
        state={}, progress=Progress(batches=1), ranks=ranks, description=Description(metadata={})
    )
    checkpoint.write(tmp_path, contents)
    own = checkpoint.read_rank(tmp_path, {}, 1, 2)
    assert own is not None
    assert own.gradients == [[torch.tensor([3.0]), None]]
    alone = checkpoint.read_rank(tmp_path, {}, 0, 1)
    assert alone is not None
    assert alone.gradients == [[torch.tensor([2.0]), None]]
