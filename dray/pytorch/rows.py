"""Batches of a TensorDataset, by indexing each tensor once per batch instead of once per record."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, default_collate


class TorchLoader(torch.utils.data.DataLoader[Any]):
    """Torch's loader, with `rows` in place of its collation where the result is the same."""

    def _get_iterator(self) -> _BaseDataLoaderIter:
        batches = super()._get_iterator()
        # A private attribute of torch's, only of iterators without worker processes.
        fetcher = getattr(batches, "_dataset_fetcher", None)
        whole = self.dataset
        while type(whole) is Subset:
            whole = whole.dataset
        if fetcher is not None and type(whole) is TensorDataset and self.collate_fn is default_collate:
            fetch = fetcher.fetch
            fetcher.fetch = lambda records: rows(self.dataset, records) or fetch(records)
        return batches


def rows(dataset: Any, records: Any) -> list[torch.Tensor] | None:
    """What `default_collate` makes of these records; None where only calling it can tell.

    >>> dataset = Subset(TensorDataset(torch.arange(10), torch.eye(10)), range(5, 10))
    >>> rows(dataset, [0, 2])[0]
    tensor([5, 7])
    """
    while type(dataset) is Subset:
        if not isinstance(dataset.indices, (list, range)) or not _are_ints(records):
            return None
        records, dataset = [dataset.indices[record] for record in records], dataset.dataset
    if type(dataset) is not TensorDataset or not _are_ints(records):
        return None
    # Of a tensor in another memory format, such as channels_last, the batch would have that format too.
    if any(type(each) is not torch.Tensor or not _is_plain(each) for each in dataset.tensors):
        return None
    chosen = torch.tensor(records)
    return [each[chosen] for each in dataset.tensors]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _are_ints(records: Any) -> bool:
    return type(records) is list and bool(records) and all(type(record) is int for record in records)
