"""An endless stream for training, sampled by ourselves for validation. Determined's data loader takes no streams, so a
bare one of torch's has to share the data out among the slots, and to go on where a checkpoint was made."""

import itertools
from typing import Any, Dict, Iterator, Tuple

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from determined.pytorch import PyTorchTrial, PyTorchTrialContext, samplers


class Waves(IterableDataset):
    """Record n of the stream is always the same one."""

    def __init__(self, first: int, step: int) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        for n in itertools.count(self.first, self.step):
            yield wave(n)


def wave(n: int) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    frequency, phase = torch.rand(2, generator=generator) * torch.tensor([3.0, 6.28])
    times = torch.linspace(0, 1, 17)
    values = torch.sin(frequency * 6.28 * times + phase)
    return values[:16], values[16:]


class WaveTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        context.experimental.disable_dataset_reproducibility_checks()
        self.recurrent = context.wrap_model(nn.GRU(1, context.get_hparam("hidden"), batch_first=True))
        self.head = context.wrap_model(nn.Linear(context.get_hparam("hidden"), 1))
        parameters = [*self.recurrent.parameters(), *self.head.parameters()]
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(parameters, lr=context.get_hparam("lr")))

    def predict(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(values.unsqueeze(2))[0][:, -1])

    def build_training_data_loader(self) -> DataLoader:
        rank, size = self.context.distributed.get_rank(), self.context.distributed.get_size()
        batch_size = self.context.get_per_slot_batch_size()
        seen = self.context.get_initial_batch() * batch_size * size
        return DataLoader(Waves(seen + rank, size), batch_size=batch_size)

    def build_validation_data_loader(self) -> DataLoader:
        held_out = [wave(10**6 + n) for n in range(120)]
        sampler = samplers.ReproducibleShuffleSampler(torch.utils.data.SequentialSampler(held_out), seed=9)
        sampler = samplers.DistributedSampler(
            sampler, num_workers=self.context.distributed.get_size(), rank=self.context.distributed.get_rank()
        )
        batches = torch.utils.data.BatchSampler(sampler, batch_size=15, drop_last=False)
        return DataLoader(held_out, batch_sampler=batches)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Dict[str, Any]:
        assert epoch_idx == 0, "a stream has one epoch"
        values, following = batch
        loss = nn.functional.mse_loss(self.predict(values), following)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> Dict[str, Any]:
        values, following = batch
        return {"mse": nn.functional.mse_loss(self.predict(values), following).item()}
