"""A loop of one's own with the core API: metrics, checkpoints, preemption, several processes."""

import argparse
import json
import logging
import pathlib

import torch
from sklearn.datasets import load_wine
from torch import distributed as dist
from torch import nn

import determined as det


def load_data():
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(axis=0)) / x.std(axis=0), dtype=torch.float32)
    y = torch.tensor(y)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(3))
    return x[order], y[order]


def load_state(model, optimizer, core_context, checkpoint, trial_id):
    with core_context.checkpoint.restore_path(checkpoint) as path:
        saved = torch.load(pathlib.Path(path) / "checkpoint.pt")
        steps = json.loads((pathlib.Path(path) / "state.json").read_text())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    # A checkpoint of another trial gives its weights, not its place.
    return steps["epochs"] if steps["trial_id"] == trial_id else 0


def main(core_context, hparams, epochs, checkpoint, trial_id):
    rank, size = core_context.distributed.rank, core_context.distributed.size
    torch.manual_seed(hparams["seed"])
    model = nn.Sequential(nn.Linear(13, hparams["hidden"]), nn.ReLU(), nn.Linear(hparams["hidden"], 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=hparams["lr"], momentum=0.9)
    first = load_state(model, optimizer, core_context, checkpoint, trial_id) if checkpoint else 0
    net = nn.parallel.DistributedDataParallel(model) if size > 1 else model

    x, y = load_data()
    train_x, train_y, test_x, test_y = x[:144][rank::size], y[:144][rank::size], x[144:], y[144:]
    batch_size = hparams["global_batch_size"] // size
    per_epoch = len(train_y) // batch_size

    for epoch in range(first, epochs):
        net.train()
        for batch in range(per_epoch):
            span = slice(batch * batch_size, (batch + 1) * batch_size)
            loss = nn.functional.cross_entropy(net(train_x[span]), train_y[span])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # The mean over the processes, which have batches of one size.
            losses = core_context.distributed.gather(loss.item())
            steps = epoch * per_epoch + batch + 1
            if rank == 0:
                core_context.train.report_training_metrics(steps, {"loss": sum(losses) / size})

        if rank == 0:
            net.eval()
            with torch.no_grad():
                output = model(test_x)
            core_context.train.report_validation_metrics(
                steps_completed=steps,
                metrics={
                    "validation_loss": nn.functional.cross_entropy(output, test_y).item(),
                    "accuracy": (output.argmax(dim=1) == test_y).float().mean().item(),
                    "epochs": epoch + 1,
                },
            )
            core_context.train.report_progress((epoch + 1) / epochs)
            with core_context.checkpoint.store_path({"steps_completed": steps}) as (path, uuid):
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved, path / "checkpoint.pt")
                (path / "state.json").write_text(json.dumps({"epochs": epoch + 1, "trial_id": trial_id}))
        if core_context.preempt.should_preempt():
            return


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hparams", type=json.loads, help="for a run without a cluster")
    args = parser.parse_args()

    info = det.get_cluster_info()
    if info is None:
        hparams, checkpoint, trial_id = args.hparams, None, -1
    else:
        hparams, checkpoint, trial_id = info.trial.hparams, info.latest_checkpoint, info.trial.trial_id

    # Always under torchrun: Determined's launcher, or by hand.
    dist.init_process_group("gloo")
    distributed = det.core.DistributedContext.from_torch_distributed()
    with det.core.init(distributed=distributed) as core_context:
        main(core_context, hparams, args.epochs, checkpoint, trial_id)
    dist.destroy_process_group()
