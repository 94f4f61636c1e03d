"""torch's compiler is imported when something is compiled, not with the first optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import importlib.util, os, pickle, sys
from ray import cloudpickle
import torch
from dray import pytorch
from dray.worker.process_group import joined
from dray.worker.ranks import Place, Ranks
from examples.digits.model_def import DigitsTrial

def train(kind, step=lambda optimizer: optimizer.step):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    take_step = step(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        take_step()
    optimizer.load_state_dict(optimizer.state_dict())
    return model.weight

def in_a_fork(check):
    if os.fork() == 0:
        check()
        os._exit(0)
    assert os.wait()[1] == 0

def compile():
    assert torch.compile(torch.nn.Linear(4, 4), backend="eager")(torch.ones(1, 4)).shape == (1, 4)
    assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
    stats = torch._dynamo.utils.counters["stats"]
    for kind, weight in weights.items():
        before = stats["unique_graphs"]
        torch.testing.assert_close(train(kind, lambda it: torch.compile(it.step, backend="eager")), weight)
        assert stats["unique_graphs"] > before
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__
    assert zero_grad.__dynamo_disable is not zero_grad

def import_submodule():
    import torch._dynamo.config as config
    assert config is torch._dynamo.config and torch._dynamo is sys.modules["torch._dynamo"]
    assert config is torch._dynamo.eval_frame.config is sys.modules["torch._dynamo.config"]

def set_attribute():
    torch._dynamo.reset = print
    assert sys.modules["torch._dynamo"].reset is print and torch._dynamo.eval_frame

def disable():
    @torch.compiler.disable()
    def untraced(values):
        assert not torch.compiler.is_compiling()
        return values
    disabled = torch._dynamo.disable(untraced)
    for function in (untraced, disabled):
        assert torch.compile(lambda values: function(values) + 1, backend="eager")(torch.zeros(1)) == 1

ranks = Ranks(world_rank=0, local_rank=0, node_rank=0, world_size=1, local_world_size=1, num_nodes=1, gpus=())
with joined(ranks, Place(node="", ip="127.0.0.1"), lambda mine: mine):
    with pytorch.init(hparams={"lr": 0.1, "hidden": 8, "global_batch_size": 64}) as context:
        trainer = pytorch.Trainer(DigitsTrial(context), context)
        trainer.fit(max_length=pytorch.Batch(3), validation_period=pytorch.Batch(2))
    weights = {kind: train(kind) for kind in (torch.optim.SGD, torch.optim.Adam)}
    for module in ("torch._dynamo", "torch._dynamo.config"):
        assert importlib.util.find_spec(module).origin.endswith(".py")  # Python holds a lock during this
    assert importlib.util.find_spec("torch._dynamo.none") is None
    assert pickle.loads(cloudpickle.dumps(torch._dynamo)) is torch._dynamo
    assert "torch._dynamo.eval_frame" not in sys.modules
    for check in (compile, import_submodule, set_attribute, disable):
        in_a_fork(check)
"""


@pytest.mark.slow
def test_training_does_without_the_compiler_until_it_is_used(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    program = f"import sys; sys.path.insert(0, {root!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
