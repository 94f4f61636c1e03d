"""Bad input of `FullyShard` and of meshes: one clear error, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, torch_version

from dray import pytorch
from dray.hosts import use_host
from dray.memory import machine_cores
from dray.pytorch import CheckpointLoadContext, FullyShard
from dray.training.parallel import fully_shard
from dray.training.parallel.mesh_shape import mesh_shape
from tests.pytorch.fakes import FakeHost, OneWeight

pytestmark = pytest.mark.slow  # FullyShard imports FSDP, a quarter of the time to collect the fast tests


def test_an_optimizer_on_the_cpu_gets_its_ranks_share_of_the_cores_unless_the_user_has_chosen(tmp_path: Path) -> None:
    by_ray = {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}
    assert fully_shard.threads_for_offload(by_ray, 96) == 12
    assert fully_shard.threads_for_offload(by_ray | {"OMP_NUM_THREADS": "4"}, 96) == 4
    assert [fully_shard.threads_for_offload(each, 6) for each in ({}, by_ray)] == [6, 1]
    (tmp_path / "cpu.max").write_text("100000 100000")
    assert machine_cores(tmp_path) == 1, "those of its container"


@pytest.fixture
def context(tmp_path: Path) -> Iterator[pytorch.PyTorchTrialContext]:
    with use_host(FakeHost(tmp_path)), pytorch.init() as context:
        yield context
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": [3]}, r"FullyShard\(units=\.\.\.\) must be classes of modules, .* got \[3\]"),
        ({"units": int}, "must be classes of modules"),
        ({"mp_policy": "bfloat16"}, "must be a torch.distributed.fsdp.MixedPrecisionPolicy or a dict of param_dtype"),
        ({"mp_policy": {"params": "bfloat16"}}, "or a dict of param_dtype, reduce_dtype"),
        ({"mp_policy": {"param_dtype": "bf16"}}, r"param_dtype must be a dtype or its name \(bfloat16\), got 'bf16'"),
        ({"compile": 1}, r"FullyShard\(compile=\.\.\.\) must be a bool, got 1"),
        ({"activation_checkpointing": "some"}, "must be a bool or 'selective', got 'some'"),
        ({"reshard_after_forward": "no"}, "must be a bool, a number of ranks or None, got 'no'"),
        ({"init": 3}, "must be a function of a module, got 3"),
    ],
)
def test_options_of_another_type_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FullyShard(**arguments)


def test_float8_is_refused_where_it_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="can't be combined with cpu_offload=True"):
        FullyShard(float8=True, cpu_offload=True)
    monkeypatch.setattr(fully_shard, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs torchao, which is not installed: pip install torchao"):
        FullyShard(float8=True)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "warnings"), [(16, 0), (12, 1)])
def test_float8_that_fits_no_layer_is_warned_of(
    host: FakeHost, caplog: pytest.LogCaptureFixture, width: int, warnings: int
) -> None:
    with use_host(host), pytorch.init() as context:
        context.wrap_model(nn.Sequential(nn.Linear(width, 16)), parallel=FullyShard(float8=True))
    assert caplog.text.count("FullyShard(float8=True) has no effect: no linear layer") == warnings


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    model[1][0].weight = model[0].weight
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 3), NoReset())


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (nn.Linear(1, 1), FullyShard(units=["Block"]), "Block is the class of no module in the model; it has Linear"),
        (nn.Linear(1, 1), FullyShard(units=nn.Conv2d), "Conv2d is the class of no module"),
        (
            nn.Linear(1, 1),
            FullyShard(units=lambda module: False),
            "False for each of the model's 1 modules",
        ),
        (tied(), FullyShard(units=[nn.Sequential]), r"the parameter weight of .* also belongs to another unit"),
        (on_meta(), FullyShard(), r"1 \(NoReset\) is on the meta device and has no reset_parameters\(\)"),
    ],
)
def test_models_that_cannot_be_sharded_so_are_refused(
    context: pytorch.PyTorchTrialContext, model: nn.Module, parallel: FullyShard, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        context.wrap_model(model, parallel=parallel)
    assert not context.models


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_an_optimizer_that_was_made_before_the_shards_is_refused(tmp_path: Path, wrapped_first: bool) -> None:
    class Early(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.context = context
            model = nn.Linear(1, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if wrapped_first:
                context.wrap_optimizer(optimizer)
            context.wrap_model(model, parallel=FullyShard())
            if not wrapped_first:
                context.wrap_optimizer(optimizer)

    refused = pytest.raises(ValueError, match=r"optimizer 0 has parameters that .* replaced by shards, and would train")
    with use_host(FakeHost(tmp_path)), pytorch.init() as context, refused:
        pytorch.Trainer(Early(context), context).fit(max_length=pytorch.Batch(1))


def test_sharding_over_several_slots_with_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version.TorchVersion("2.10.0+cpu"))
    model = nn.Linear(1, 1)
    fully_shard.check_arguments(model, FullyShard(), {}, compress=False, ranks=1, averaging=1)
    with pytest.raises(RuntimeError, match=r"over 2 slots needs torch 2\.11 or newer, but this is torch 2\.10\.0"):
        fully_shard.check_arguments(model, FullyShard(), {}, compress=False, ranks=2, averaging=2)


def test_settings_of_ddp_are_refused(context: pytorch.PyTorchTrialContext, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ddp_kwargs are arguments of .*; leave out bucket_cap_mb"):
        context.wrap_model(nn.Linear(1, 1), {"bucket_cap_mb": 1}, parallel=FullyShard())
    with pytest.raises(TypeError, match=r"parallel must be a pytorch\.FullyShard, got 'fsdp'"):
        context.wrap_model(nn.Linear(1, 1), parallel="fsdp")  # type: ignore[arg-type]
    compressed = {"optimizations": {"gradient_compression": True}}
    refused = pytest.raises(ValueError, match="gradient_compression is for DistributedDataParallel")
    with use_host(FakeHost(tmp_path)), pytorch.init(exp_conf=compressed) as other, refused:
        other.wrap_model(nn.Linear(1, 1), parallel=FullyShard())


@pytest.mark.parametrize(
    ("asked", "ranks", "shape"),
    [
        (None, 4, {"dp_replicate": 1, "dp_shard": 4, "tp": 1}),
        ({"tp": 2}, 4, {"dp_replicate": 1, "dp_shard": 2, "tp": 2}),
        ({"tp": 4}, 4, {"dp_replicate": 1, "dp_shard": 1, "tp": 4}),
        ({"tp": 2, "dp_replicate": 2}, 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
        ({"pp": 2, "cp": 2, "dp": 2}, 8, {"dp_replicate": 1, "dp": 2, "dp_shard": 1, "cp": 2, "pp": 2, "tp": 1}),
        ({"tp": 3}, 4, r"tp 3 does not divide the trial's 4 slot\(s\)"),
        ({"tp": 8}, 4, r"tp 8 does not divide the trial's 4 slot\(s\)"),
        ({"dp_shard": 2}, 4, r"dp_shard 2 is not the trial's 4 slot\(s\)"),
        ({"dp": 2}, 4, r"dp 2 is not the trial's 4 slot\(s\)"),
        ({"tp": 0}, 4, "tp must be an int >= 1, got 0"),
        ({"p p": 2}, 4, "must be an identifier, such as tp, got 'p p'"),
        ({2: 2}, 4, "must be an identifier, such as tp, got 2"),
    ],
)
def test_sizes_of_a_mesh_are_those_of_the_ranks(asked: Any, ranks: int, shape: dict[str, int] | str) -> None:
    if isinstance(shape, dict):
        assert mesh_shape(asked, ranks).dims == tuple(shape.items())
    else:
        with pytest.raises(ValueError, match=shape):
            mesh_shape(asked, ranks)


def test_only_ranks_along_the_dimensions_of_the_data_have_different_records() -> None:
    shape = mesh_shape({"tp": 2, "dp_replicate": 2}, 8)
    assert [shape.replica(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (shape.replicas, shape.sharing, shape.model_parallel) == (4, 2, 2)
    shape = mesh_shape({"ep": 2, "cp": 2}, 8)
    assert [shape.replica(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (shape.replicas, shape.sharing, shape.model_parallel) == (2, 4, 2)


def test_mesh_of_one_process_has_all_dimensions(context: pytorch.PyTorchTrialContext) -> None:
    mesh = context.device_mesh
    assert (mesh.mesh_dim_names, mesh.shape) == (("dp_replicate", "dp_shard", "tp"), (1, 1, 1))
    assert context.device_mesh is mesh


def test_mesh_comes_from_the_config_and_must_divide_the_slots(tmp_path: Path) -> None:
    config = {"resources": {"mesh": {"tp": 2}}}
    refused = pytest.raises(ValueError, match=r"tp 2 does not divide the trial's 1 slot")
    with use_host(FakeHost(tmp_path)), refused, pytorch.init(exp_conf=config):
        pass
    with use_host(FakeHost(tmp_path)), pytorch.init(exp_conf=config, mesh={}) as context:
        assert context.device_mesh.shape == (1, 1, 1)


def test_model_that_is_only_loaded_stays_whole() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model = CheckpointLoadContext(exp_conf={"resources": {"mesh": {"tp": 2}}}).wrap_model(
        model, parallel=FullyShard(units=[nn.Linear])
    )
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert torch.equal(model[1].weight, torch.ones(3))
    assert not dist.is_initialized()
