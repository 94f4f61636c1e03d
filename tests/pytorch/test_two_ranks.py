"""Two real processes: the same weights as one, the same end on both; also with TensorBoard, compiled models and mixed
precision. All scenarios share one pair."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dray import pytorch
from dray.core import DistributedContext
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.storage.manifest import Listed
from dray.training.checkpoint import checkpointer
from dray.training.host import Report
from dray.training.parallel.transport import TorchTransport
from tests import queued
from tests.pytorch.fakes import FakeHost, callback
from tests.pytorch.processes import results_of, serve
from tests.pytorch.regression import Regression, run, two
from tests.pytorch.resuming import assert_equal
from tests.pytorch.test_epochs import Curriculum, seeing
from tests.pytorch.test_tensorboard import scalars

pytestmark = pytest.mark.slow


TRAINED: dict[str, Any] = {"max_length": Batch(7), "reporting_period": Batch(3), "checkpoint_period": Batch(2)}


def training(directory: Path) -> dict[str, Any]:
    return two(Regression, directory, **TRAINED)


def aggregation(directory: Path) -> dict[str, Any]:
    return two(Regression, directory, max_length=Batch(6), aggregation_frequency=3)


COMPRESSED = {"optimizations": {"gradient_compression": True}}


class Grouped(Regression):
    """Notes which process groups its gradients are summed in."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.seen: set[str] = set()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        reduce = dist.all_reduce

        def noted(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            own = group is self.model.process_group and group is not dist.group.WORLD
            self.seen.add(f"{tensor.dtype}, {'own' if own else 'another'} group")
            return reduce(tensor, *args, group=group, **kwargs)

        dist.all_reduce = noted
        try:
            return super().train_batch(batch, epoch_idx, batch_idx)
        finally:
            dist.all_reduce = reduce


def compressed(directory: Path) -> dict[str, Any]:
    return two(Grouped, directory, max_length=Batch(7), exp_conf=COMPRESSED)


def compressed_and_left(directory: Path) -> dict[str, Any]:
    class Leaving(Regression):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if self.context.distributed.rank == 1 and batch_idx == 2:
                queued.gone_for(invalid)
            return super().train_batch(batch, epoch_idx, batch_idx)

    def invalid() -> None:
        raise pytorch.InvalidHP("too wide")

    return two(Leaving, directory, max_length=Batch(7), exp_conf=COMPRESSED)


def last(directory: Path) -> list[tuple[int, str | None]]:
    """Three local runs that train on; each rank with results of its own."""
    os.environ["DRAY_HOME"] = str(directory / os.environ["RANK"])
    begun: list[tuple[int, str | None]] = []

    started = callback(on_trial_startup=lambda first_batch_idx, uuid: begun.append((first_batch_idx, uuid)))

    class Starting(Regression):
        def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
            return started

    for length in (1, 3, 4):
        peers = DistributedContext.from_torch_distributed()
        with pytorch.init(hparams={"global_batch_size": 8}, distributed=peers) as context:
            pytorch.Trainer(Starting(context), context).fit(max_length=Batch(length), latest_checkpoint="last")
    return begun


def unseeded(directory: Path) -> dict[str, Any]:
    """A local run, whose ranks come with random numbers of their own."""
    os.environ["DRAY_HOME"] = str(directory)
    peers = DistributedContext.from_torch_distributed()
    torch.manual_seed(40 + peers.rank)
    with pytorch.init(distributed=peers) as context:
        trained, frozen = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        nn.init.normal_(frozen[1].running_mean)
        drawn = [tensor.clone() for tensor in (trained.weight, frozen[0].weight, frozen[1].running_mean)]
        trained, frozen = context.wrap_model(trained), context.wrap_model(frozen)
        begun = [trained.module.weight, frozen[0].weight, frozen[1].running_mean]
        return {"drawn": drawn, "begun": [each.detach() for each in begun], "seed": context.get_trial_seed()}


@pytorch.pretrained
def embedding(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def pretrained_weights(directory: Path) -> dict[str, Any]:
    """A frozen part that each rank loads, its buffers different on each, and a head."""
    peers = DistributedContext.from_torch_distributed()
    with use_host(FakeHost(directory)), pytorch.init(distributed=peers) as context:
        torch.manual_seed(40 + peers.rank)
        net = nn.Sequential(embedding(1), nn.Linear(4, 1))
        nn.init.normal_(net[0][1].running_mean)
        address = net[0][0].weight.data_ptr()
        net = context.wrap_model(net)
        is_shared = net.module[0][0].weight.data_ptr() == address == embedding(1)[0].weight.data_ptr()
        state = {name: value.clone() for name, value in net.module.state_dict().items()}
        context.backward(net(torch.randn(8, 4)).sum())
        gradient = net.module[1].weight.grad

    class Different(Regression):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            context.wrap_model(nn.Sequential(embedding(peers.rank), nn.Linear(4, 1)))

    error = two(Different, directory / "different", max_length=Batch(1))["error"]
    return {"state": state, "shared": is_shared, "gradient": gradient, "error": error}


@contextmanager
def all_are_large() -> Iterator[None]:
    """Checkpoints of any size are written while training goes on."""
    before, checkpointer.AT_ONCE_BYTES = checkpointer.AT_ONCE_BYTES, 0
    yield
    checkpointer.AT_ONCE_BYTES = before


def failure_behind(directory: Path) -> dict[str, Any]:
    class Broken(FakeHost):
        def commit(self, staging: Path, report: Report, known: Mapping[str, Listed]) -> str:
            raise LookupError("the store is gone")

    peers = DistributedContext.from_torch_distributed()
    with all_are_large():
        return run(Regression, Broken(directory), distributed=peers, max_length=Batch(7), checkpoint_period=Batch(2))


def hook_on_one_rank(directory: Path) -> dict[str, Any]:
    def prepare(trial: Any) -> None:
        trial.seen = []
        if trial.context.distributed.rank == 1:
            trial.callbacks.update(callback(on_checkpoint_upload_end=lambda uuid: trial.seen.append(uuid)))

    with all_are_large():
        return two(Regression, directory, max_length=Batch(4), checkpoint_period=Batch(2), prepare=prepare)


def custom_metrics(directory: Path) -> dict[str, Any]:
    class Custom(Regression):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.seen: list[Any] = []
            self.order = context.wrap_reducer(lambda values: "".join(map(str, values)), name="order")

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.order.update(2 * batch_idx + self.context.distributed.rank)
            return super().train_batch(batch, epoch_idx, batch_idx)

    def prepare(trial: Any) -> None:
        def trained(avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
            trial.seen.append((avg_metrics, [float(row["loss"]) for row in batch_metrics]))

        trial.callbacks = callback(
            on_training_workload_end=trained,
            on_validation_end=lambda metrics: trial.seen.append(dict(metrics)),
            on_checkpoint_upload_end=lambda uuid: trial.seen.append(uuid),
        )

    return two(Custom, directory, max_length=Batch(3), prepare=prepare)


def full_dataset(directory: Path) -> dict[str, Any]:
    class Full(Regression):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.seen: list[int] = []

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            self.seen.append(len(data_loader.dataset))
            return {"validation_loss": 2.0}

    return two(Full, directory, max_length=Batch(1))


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self(x), y)


class Parted(Regression):
    """Its model has buffers, which a forward pass in training exchanges."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context, self.callbacks, self.seen = context, {}, list[Any]()
        self.model = self.wrap(Forces())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.data(12)  # two batches on one rank, one on the other


def gradients_in_validation(directory: Path) -> dict[str, Any]:
    def force(trial: Any, x: torch.Tensor) -> float:
        with torch.enable_grad():
            x = x.clone().requires_grad_(True)
            (found,) = torch.autograd.grad(trial.model(x).sum(), x)
        return float(found.pow(2).mean())

    class Batches(Parted):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"validation_loss": force(self, batch[0])}

        def evaluation_reducer(self) -> pytorch.Reducer:  # type: ignore[override]
            return pytorch.Reducer.AVG

    class Full(Parted):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

        def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
            return {"validation_loss": sum(force(self, x) for x, _ in data_loader)}

    found = {}
    for kind in (Batches, Full):
        found[kind.__name__] = two(kind, directory / kind.__name__, max_length=Batch(4), validation_period=Batch(2))
    return found


def unaveraged(directory: Path) -> dict[str, Any]:
    """Ways to train with gradients that are each rank's own, and one that only looks like it."""

    class Method(Parted):
        def loss(self, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = self.model.loss(*batch)
            return loss

    class Later(Parted):
        def loss(self, batch: Any) -> torch.Tensor:
            if self.context.current_train_batch() >= 3:
                return nn.functional.mse_loss(self.model.head(self.model.body(batch[0])), batch[1])
            return super().loss(batch)

    class Unfrozen(Parted):
        def wrap(self, model: nn.Module) -> Any:
            model.body.requires_grad_(False)  # type: ignore[operator, union-attr]
            return super().wrap(model)

        def loss(self, batch: Any) -> torch.Tensor:
            self.model.body.requires_grad_(self.context.current_train_batch() >= 1)
            return super().loss(batch)

    class Unwrapped(Parted):
        def wrap(self, model: nn.Module) -> Any:
            super().wrap(nn.Linear(1, 1))
            return model

    class FrozenAfterWrapping(Parted):
        def wrap(self, model: nn.Module) -> Any:
            model = self.context.wrap_model(model, ddp_kwargs={"find_unused_parameters": True})
            model.body.requires_grad_(False)  # type: ignore[operator, union-attr]
            return model

        def loss(self, batch: Any) -> torch.Tensor:
            self.model.body.requires_grad_(self.context.current_train_batch() >= 1)
            return super().loss(batch)

    kinds = (Method, Later, Unfrozen, Unwrapped, FrozenAfterWrapping)
    return {kind.__name__: two(kind, directory / kind.__name__, max_length=Batch(6)) for kind in kinds}


def copies(directory: Path) -> dict[str, Any]:
    class Target(Parted):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.target = context.wrap_model(copy.deepcopy(self.model).requires_grad_(False))
            self.average = torch.optim.swa_utils.AveragedModel(self.model)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            metrics = super().train_batch(batch, epoch_idx, batch_idx)
            self.average.update_parameters(self.model)
            if batch_idx == 2:
                self.target.load_state_dict(self.model.state_dict())
                self.seen = [
                    list(self.model.state_dict()),
                    list(self.target.state_dict()),
                    list(self.average.state_dict()),
                ]
                self.seen.append(torch.equal(self.target.head.weight, self.model.head.weight))
                if self.context.distributed.rank == 0:
                    self.target(batch[0].requires_grad_(True)).sum().backward()  # waits for no other rank
            return metrics

    return two(Target, directory, max_length=Batch(3))


def words_of_all_lengths(directory: Path) -> list[list[Any]]:
    """A rank's message may or may not fit into the usual single exchange, on one rank or on both."""
    peers = DistributedContext.from_torch_distributed()
    room = TorchTransport.ROOM
    told: list[Any] = []
    for lengths in ((1, 2), (room - 30, 3), (room, 1), (2, 3 * room), (9 * room, room), (1, 1)):
        told.append([len(word) for word in peers.allgather("x" * lengths[peers.rank])] == list(lengths))
    return told


class Heard:
    """How many of these this rank has received."""

    count = 0

    def __setstate__(self, state: Any) -> None:
        Heard.count += 1


def gathered(directory: Path) -> tuple[int, Any]:
    """How many objects came to this rank, and what of them."""
    peers = DistributedContext.from_torch_distributed()
    heard = Heard()
    heard.of = peers.rank  # type: ignore[attr-defined]
    rows = peers.gather([heard, "x" * TorchTransport.ROOM, peers.rank])
    return Heard.count, rows and [row[2] for row in rows]


class Shown(Regression):
    """Metrics that differ between ranks."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = super().train_batch(batch, epoch_idx, batch_idx)["loss"]
        rank = self.context.distributed.rank
        return {"loss": loss, "rank": torch.tensor(float(rank)), "at": float(2 * batch_idx + rank)}


class Compiled(Regression):
    def wrap(self, model: nn.Module) -> Any:
        return torch.compile(super().wrap(model), backend="eager")


@pytorch.cached
def table() -> torch.Tensor:
    """Random, but the same on all ranks."""
    return torch.randn(24, 4)


class OnCachedData(Regression):
    """The trial's own random numbers, its weights among them, are those of a trial without the data."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        everywhere = context.distributed.allgather(table().tolist())
        assert everywhere == [table().tolist()] * context.distributed.size
        super().__init__(context)


class Half(Regression):
    """In mixed precision."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(torch.bfloat16)
        super().__init__(context)


KINDS: dict[str, Any] = {
    "plain": Regression,
    "shown": Shown,
    "compiled": Compiled,
    "on cached data": OnCachedData,
    "half": Half,
}


def features(directory: Path) -> dict[str, Any]:
    return {kind: two(trial, directory / kind, **TRAINED) for kind, trial in KINDS.items()}


def curriculum(directory: Path) -> list[dict[int, set[Any]]]:
    """What each epoch saw, with two persistent loader workers on each rank: in a whole run, and in one of three parts,
    of which the first ends within an epoch, and the second with one."""
    data = seeing(Curriculum(), batch_size=1, shuffle=True, num_workers=2, persistent_workers=True)
    peers, made = DistributedContext.from_torch_distributed(), list[Any]()
    for name, lengths in (("whole", (15,)), ("parts", (7, 10, 15))):
        host = FakeHost(directory / name)
        for length in lengths:
            latest = peers.broadcast([None, *host.checkpoints()][-1])
            kwargs: dict[str, Any] = {"max_length": Batch(length), "latest_checkpoint": latest}
            run(data, host, distributed=peers, prepare=made.append, **kwargs)
    return [trial.saw for trial in made]


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def backend() -> str:
    return "gloo"


@pytest.fixture(scope="module", params=["gloo", "queued"])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The ranks' results in the scenarios `ENDS`, also on a backend that behaves like NCCL."""
    if request.param == "gloo":
        return request.getfixturevalue("ranks")  # type: ignore[no-any-return]
    return results_of(2, __file__, tmp_path_factory.mktemp("queued"), "queued")


@pytest.mark.api("2.16")
def test_two_processes_train_what_one_trains(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = run(Regression, FakeHost(tmp_path), **TRAINED)
    assert alone["epochs"] == ranks[0]["training"]["epochs"] == pytest.approx(7 / 3)
    for rank in ranks:
        torch.testing.assert_close(rank["training"]["weights"], alone["weights"])
    assert_equal(ranks[0]["training"]["weights"], ranks[1]["training"]["weights"])


def test_compressed_gradients_travel_in_float16(ranks: list[dict[str, Any]]) -> None:
    assert_equal(ranks[0]["compressed"]["weights"], ranks[1]["compressed"]["weights"])
    assert [rank["compressed"]["trial"] for rank in ranks] == [{"torch.float16, own group"}] * 2


def test_a_rank_that_leaves_keeps_none_waiting_for_its_compressed_gradients(left: list[dict[str, Any]]) -> None:
    assert [rank["compressed_and_left"]["error"] for rank in left] == ["InvalidHP: too wide"] * 2


def test_compressed_gradients_lose_little(ranks: list[dict[str, Any]]) -> None:
    whole, compressed = ranks[0]["training"]["weights"], ranks[0]["compressed"]["weights"]
    for name in whole:
        torch.testing.assert_close(compressed[name], whole[name], rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(compressed[name], whole[name]) for name in whole), "some of each is lost"


def test_the_chief_alone_speaks_to_the_host(ranks: list[dict[str, Any]]) -> None:
    assert [batches for batches, *_ in ranks[0]["training"]["reports"]] == [2, 3, 4, 6, 7]
    assert ranks[1]["training"]["reports"] == []


@pytest.mark.api("6.1", "6.6")
def test_metrics_are_those_of_one_process(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = run(Regression, FakeHost(tmp_path), **TRAINED)
    for (_, training, validation, _), (_, expected, expected_validation, _) in zip(
        ranks[0]["training"]["reports"], alone["reports"], strict=True
    ):
        assert training["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert (validation is None) == (expected_validation is None)


@pytest.mark.api("2.20")
def test_gradient_aggregation_gives_the_same_over_two(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = run(Regression, FakeHost(tmp_path), max_length=Batch(6), aggregation_frequency=3)
    torch.testing.assert_close(ranks[0]["aggregation"]["weights"], alone["weights"])


@pytest.mark.api("9.5")
def test_a_checkpoint_of_two_processes_has_plain_names_and_loads_in_one(
    ranks: list[dict[str, Any]], directory: Path
) -> None:
    path = directory / "training" / "checkpoint_7"
    state = torch.load(path / "state-dict.pth", weights_only=True)
    assert sorted(state["models_state_dict"][0]) == ["0.bias", "0.weight", "3.bias", "3.weight"]
    assert sorted(file.name for file in (path / "rng").iterdir()) == ["rank_0.pth", "rank_1.pth"]
    trial: Any = pytorch.load_trial_from_checkpoint_path(path, trial_class=Regression)
    assert_equal(trial.model.state_dict(), ranks[0]["training"]["weights"])


@pytest.mark.api("2.12")
@pytest.mark.api("9.7")
def test_last_is_the_chiefs_last_checkpoint_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    chief, other = (rank["last"] for rank in ranks)
    assert other == chief
    assert [begun for begun, _ in chief] == [0, 1, 3]


def test_unseeded_ranks_begin_with_the_chiefs_weights_of_frozen_models_too(ranks: list[dict[str, Any]]) -> None:
    chief, other = (rank["unseeded"] for rank in ranks)
    assert chief["seed"] == other["seed"] == 40
    for drawn, elsewhere, begun, there in zip(
        chief["drawn"], other["drawn"], chief["begun"], other["begun"], strict=True
    ):
        assert not torch.equal(drawn, elsewhere), "no rank's random numbers were changed"
        assert torch.equal(begun, drawn)
        assert torch.equal(there, drawn)


def test_pretrained_weights_stay_where_they_are_and_the_rest_is_the_chiefs(ranks: list[dict[str, Any]]) -> None:
    chief, other = (rank["pretrained_weights"] for rank in ranks)
    assert chief["shared"]
    assert other["shared"]
    assert_equal(chief["state"], other["state"])
    assert torch.equal(chief["gradient"], other["gradient"])  # averaged over ranks that saw different records
    assert chief["error"] == other["error"]
    assert chief["error"].startswith("RuntimeError: ranks 0 and 1 have loaded different pretrained weights")


@pytest.mark.api("3.3")
def test_ranks_hear_one_another_however_much_they_say(ranks: list[dict[str, Any]]) -> None:
    assert [rank["words_of_all_lengths"] for rank in ranks] == [[True] * 6] * 2


def test_what_is_gathered_comes_to_the_chief_alone(ranks: list[dict[str, Any]]) -> None:
    assert [rank["gathered"] for rank in ranks] == [(2, [0, 1]), (0, None)]


@pytest.mark.api("6.3", "6.5", "6.6", "7.7", "7.9")
def test_metrics_and_ids_reach_the_callbacks_of_both(ranks: list[dict[str, Any]]) -> None:
    chief, other = (rank["custom_metrics"]["trial"] for rank in ranks)
    assert chief == other
    (averages, rows), validated, uuid = chief
    assert averages["order"] == "012345", "the order of one process"
    assert averages["loss"] == pytest.approx(sum(rows) / 3)
    assert validated["batches_seen"] == 5.0
    assert uuid == ranks[0]["custom_metrics"]["reports"][-1][3]


@pytest.mark.api("1.8")
def test_evaluate_full_dataset_runs_on_the_chief_over_everything(ranks: list[dict[str, Any]]) -> None:
    assert [rank["full_dataset"]["trial"] for rank in ranks] == [[20], []]
    assert ranks[0]["full_dataset"]["reports"][-1][2] == {"validation_loss": 2.0}


def test_a_failure_behind_the_chiefs_back_ends_both(left: list[dict[str, Any]]) -> None:
    assert left[0]["failure_behind"]["error"] == "LookupError: the store is gone"
    assert left[1]["failure_behind"]["error"].startswith("PeerFailed: rank 0 failed while ")


def test_a_hook_of_any_rank_makes_all_wait_for_checkpoints(ranks: list[dict[str, Any]]) -> None:
    reported = [checkpoint for *_, checkpoint in ranks[0]["hook_on_one_rank"]["reports"]]
    assert None not in reported
    assert ranks[1]["hook_on_one_rank"]["trial"] == reported


def test_a_validation_that_enables_gradients_ends_on_ranks_with_different_numbers_of_batches(
    left: list[dict[str, Any]],
) -> None:
    for kind in ("Batches", "Full"):
        assert [rank["gradients_in_validation"][kind]["error"] for rank in left] == [None, None]
        one, other = (rank["gradients_in_validation"][kind]["weights"] for rank in left)
        assert torch.equal(one["body.0.weight"], other["body.0.weight"])


@pytest.mark.parametrize(
    ("kind", "parameter", "cause"),
    [
        ("Method", "'body.0.weight'", "the trial has used model.loss. Move"),
        ("Later", "'body.0.weight'", "the trial has used model.body and model.head. Move"),
        ("Unfrozen", "'body.0.weight'", "They were frozen, or did not exist, when the model was wrapped."),
        ("Unwrapped", "'a parameter'", "They belong to no wrapped model"),
    ],
)
def test_gradients_that_are_not_averaged_fail_on_both_and_nothing_is_saved(
    left: list[dict[str, Any]], kind: str, parameter: str, cause: str
) -> None:
    one, other = (rank["unaveraged"][kind] for rank in left)
    assert one["error"] == other["error"]
    assert one["error"].startswith("RuntimeError: the slots train different models: ")
    assert parameter in one["error"]
    assert cause in one["error"]
    assert one["reports"] == []


def test_parameters_that_are_frozen_after_wrapping_can_be_unfrozen(left: list[dict[str, Any]]) -> None:
    one, other = (rank["unaveraged"]["FrozenAfterWrapping"] for rank in left)
    assert one["error"] is None
    assert_equal(one["weights"], other["weights"])


def test_a_copy_of_a_wrapped_model_is_what_it_is_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["copies"]["error"] is None
        own, target, average, is_same = rank["copies"]["trial"]
        assert own == target == list(Forces().state_dict())
        assert average == ["n_averaged", *(f"module.{name}" for name in own)]
        assert is_same


def test_every_kind_trains_and_ranks_agree(ranks: list[dict[str, Any]]) -> None:
    assert {kind: found["error"] for kind, found in ranks[0]["features"].items()} == dict.fromkeys(KINDS)
    for kind in KINDS:
        assert_equal(*(rank["features"][kind]["weights"] for rank in ranks))


def test_cached_data_are_the_same_on_all_ranks_and_leave_the_trials_random_numbers_alone(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        assert_equal(*(rank["features"][kind]["weights"] for kind in ("on cached data", "plain")))


@pytest.mark.api("2.11")
def test_the_chief_writes_scalars_averaged_over_ranks(ranks: list[dict[str, Any]], directory: Path) -> None:
    place = directory / "features" / "shown" / "tensorboard"
    assert len(list(place.iterdir())) == 1
    found = scalars(place)
    assert found["Determined/rank"] == [(i, 0.5) for i in range(7)]
    assert found["Determined/at"] == [(i, 2 * i + 0.5) for i in range(7)]
    (reported,) = [training for batches, training, *_ in ranks[0]["features"]["shown"]["reports"] if batches == 2]
    losses = [value for _, value in found["Determined/loss"][:2]]
    assert sum(losses) / 2 == pytest.approx(reported["loss"])
    assert [step for step, _ in found["Determined/validation_loss"]] == [7]
    records, batches = (found[f"system/{name}_per_second"][-1][1] for name in ("records", "batches"))
    assert records == pytest.approx(8 * batches, rel=1e-5), "of both ranks"


@pytest.mark.api("2.16")
def test_a_compiled_model_trains_what_a_plain_one_trains(
    ranks: list[dict[str, Any]], directory: Path, tmp_path: Path
) -> None:
    torch.testing.assert_close(ranks[0]["features"]["compiled"]["weights"], ranks[0]["features"]["plain"]["weights"])
    # Its checkpoint is one of the plain model, for one process too.
    resumed = run(
        KINDS["plain"],
        FakeHost(tmp_path),
        **TRAINED,
        latest_checkpoint=str(directory / "features" / "compiled" / "checkpoint_4"),
    )
    torch.testing.assert_close(resumed["weights"], ranks[0]["features"]["plain"]["weights"])


@pytest.mark.api("2.25")
def test_mixed_precision_is_close_to_full(ranks: list[dict[str, Any]]) -> None:
    for name, weight in ranks[0]["features"]["plain"]["weights"].items():
        half = ranks[0]["features"]["half"]["weights"][name]
        assert half.dtype is torch.float32
        assert not torch.equal(half, weight)
        torch.testing.assert_close(half, weight, rtol=0.05, atol=0.02)


def test_each_epoch_reaches_the_data_sets_of_all_loader_workers_of_both_ranks_also_after_a_resume(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        whole, *parts = rank["curriculum"]
        assert {epoch: {level for level, _ in seen} for epoch, seen in whole.items()} == {0: {0}, 1: {1}, 2: {2}}
        assert parts == [{0: whole[0], 1: whole[1]}, {1: whole[1]}, {2: whole[2]}]
        assert whole == ranks[0]["curriculum"][0], "what set_epoch draws is the same on both ranks"


# How ranks end is tested on both backends, and what they compute on gloo alone.
ENDS = [compressed, compressed_and_left, gradients_in_validation, unaveraged, failure_behind]

if __name__ == "__main__":
    rest = [words_of_all_lengths, gathered, training, aggregation, last, unseeded, pretrained_weights, copies]
    rest += [hook_on_one_rank, custom_metrics, full_dataset, features, curriculum]
    serve(ENDS + (rest if os.environ["TEST_BACKEND"] == "gloo" else []))
