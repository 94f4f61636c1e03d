"""Batches of a TensorDataset are those that torch collates, also where they are taken by one index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from dray import pytorch
from dray.pytorch.data import rows

X, Y = torch.randn(20, 3, 2), torch.arange(20)
WHOLE = TensorDataset(X, Y)


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * each for each in super().__getitem__(index))


@pytest.mark.parametrize(
    ("dataset", "records"),
    [
        (WHOLE, [3, 1, -1]),
        (TensorDataset(Y.double()), [19]),
        (TensorDataset(X > 0, X.to(torch.complex64)), [0, 0]),
        (Subset(WHOLE, range(5, 15)), [0, 9, 3]),
        (Subset(Subset(WHOLE, [7, 3, 5, 2]), [3, 0]), [1, 0, 1]),
        (TensorDataset(torch.empty(4, 0)), [2, 1]),
    ],
)
def test_rows_are_what_torch_collates(dataset: Any, records: list[int]) -> None:
    found = rows(dataset, records)
    expected = default_collate([dataset[record] for record in records])
    assert type(found) is type(expected) is list
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("dataset", "records"),
    [
        (Doubled(X, Y), [1]),
        (ConcatDataset([WHOLE, WHOLE]), [1]),
        (Subset(ConcatDataset([WHOLE]), [1]), [0]),
        (Subset(WHOLE, torch.tensor([1, 2])), [0]),  # type: ignore[arg-type]
        (TensorDataset(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)), [1]),
        (TensorDataset(Y.expand(2, 20)), [1]),
        (TensorDataset(torch.eye(3).to_sparse()), [1]),
        (TensorDataset(torch.nn.Parameter(X)), [1]),
        (WHOLE, [np.int64(1)]),
        (WHOLE, [True, False]),
        (WHOLE, []),
        (WHOLE, 3),
    ],
)
def test_what_might_differ_is_left_to_torch(dataset: Any, records: Any) -> None:
    assert rows(dataset, records) is None


def test_a_record_that_is_out_of_range_is_an_index_error_as_ever() -> None:
    with pytest.raises(IndexError):
        rows(WHOLE, [20])


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"batch_size": 6, "drop_last": True}, {"collate_fn": len}])
def test_loaders_give_the_batches_of_torchs_loader_and_draw_as_many_random_numbers(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(make: Callable[[], pytorch.DataLoader]) -> Any:
        torch.manual_seed(1)
        found = list(make().get_data_loader())
        return found, torch.rand(()).item()

    def make() -> pytorch.DataLoader:
        return pytorch.DataLoader(Subset(WHOLE, range(2, 19)), **{"batch_size": 4, **options})

    fast, drawn = batches(make)
    taken = []
    monkeypatch.setattr("dray.pytorch.data.rows", lambda *given: taken.append(given))
    slow, drawn_then = batches(make)
    assert bool(taken) == ("collate_fn" not in options)
    assert drawn == drawn_then
    assert [str(batch) for batch in fast] == [str(batch) for batch in slow]
