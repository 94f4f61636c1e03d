"""Two processes that share the one GPU, over gloo, as close to two GPUs as possible. Their data-parallel training gives
the weights of one process; an error of one of them or of its device ends both; a death is not taken for an error."""

from __future__ import annotations

import importlib
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from _measure import stamp
from part import DEVICE, ON_GPU, attempt, check, classified, figure, joined, note, on_ranks, raised

from dray import pytorch
from dray.core import DistributedContext

BATCHES = 20
FAULTS = ("none", "raises", "assert", "killed")


def main(tiny: bool) -> None:
    """Each fault of rank 1, in two processes of its own, all on one GPU."""
    meet_faults(CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])


def meet_faults(**environment: str) -> None:
    with attempt("the processes"):
        both = {fault: on_ranks(2, "gloo", "rank", fault, **environment) for fault in FAULTS}
        ended = {fault: [child.ended() for child in children] for fault, children in both.items()}
    with attempt("data-parallel"):
        check("both ranks", [how for how, _ in ended["none"]], ["exited with 0"] * 2)
        one = trained(None)
        ours, theirs = (torch.load(f"none-{rank}.pt", weights_only=True) for rank in (0, 1))
        check("both have the same weights", all(torch.equal(ours[name], theirs[name]) for name in ours), True)
        differ = max(float((ours[name] - one[name]).abs().max()) for name in one)
        check("they are those of one process", differ < 1e-4, True)
        figure("they differ from it by at most", f"{differ:.1e}")
    for fault in FAULTS[1:]:
        with attempt(fault):
            hows = [how for how, _ in ended[fault]]
            wanted = ["exited with 0", "killed by SIGKILL" if fault == "killed" else "exited with 0"]
            check(f"{fault}: both ranks end", hows, wanted)
            if hows != wanted:
                for number, (_, output) in enumerate(ended[fault]):
                    last = "\n".join(output.splitlines()[-12:])
                    note(f"{fault}, rank {number}:\n```\n{last}\n```")


def rank(fault: str) -> None:
    """One of two ranks."""
    number, peers = int(os.environ["RANK"]), joined()
    if ON_GPU and dist.get_backend() == "gloo":
        # Two ranks on one GPU are what dray refuses, as NCCL would.
        setattr(importlib.import_module("dray.pytorch.init"), "check_gpus", lambda *_: None)  # noqa: B010 - no other name
    weights: dict[str, torch.Tensor] = {}
    error = raised(lambda: weights.update(trained(peers, fault)))
    if fault == "none":
        if error is not None:
            raise error
        torch.save(weights, f"none-{number}.pt")
        return
    own = {"raises": "error", "assert": "device" if ON_GPU else "error"}
    # The other's failure is told as one, not as an error of a collective that explains nothing.
    classified(f"{fault}, rank {number}", error, own.get(fault, "none") if number == 1 else "collective")
    os._exit(0)


class Trial(pytorch.PyTorchTrial):
    """A small model, on each rank's half of a batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext, fault: str) -> None:
        self.context, self.fault = context, fault
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
        self.model = context.wrap_model(torch.nn.Sequential(*layers))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9))

    def build_training_data_loader(self) -> pytorch.DataLoader:
        x = torch.linspace(-2, 2, 32 * BATCHES * 64).sin().reshape(-1, 64)
        data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).cos())
        return pytorch.DataLoader(data, batch_size=32 // self.context.distributed.size)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        assert x.device.type == DEVICE.type
        loss = (self.model(x) - y).square().mean()
        if batch_idx == 5 and self.fault != "none" and self.context.distributed.rank == 1:
            if self.fault == "raises":
                raise ValueError("as a user's code does")
            if self.fault == "killed":
                stamp("doing", what="killed")
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss + x[torch.tensor([5000], device=x.device)].sum()
            loss.item()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": (self.model(batch[0]) - batch[1]).square().mean()}


def trained(distributed: DistributedContext | None, fault: str = "none") -> dict[str, torch.Tensor]:
    with pytorch.init(distributed=distributed, enable_tensorboard_logging=False) as context:
        trial = Trial(context, fault)
        pytorch.Trainer(trial, context).fit(max_length=pytorch.Batch(BATCHES), checkpoint_policy="none")
        return {name: weight.cpu() for name, weight in trial.model.state_dict().items()}
