"""Mixed precision: what runs in which type, how gradients are scaled, and what of it a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.hosts import use_host
from dray.pytorch import Batch
from dray.training.optimisation import Optimisation
from dray.training.precision import MixedPrecision
from tests.pytorch.conftest import Fit
from tests.pytorch.fakes import FULL, FakeHost, OneWeight, one_weight, trial

# The weights of OneWeight's first seven steps, 1 - 1/2^n, are exact in bfloat16.


class Types(OneWeight):
    """Keeps the types that it sees."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp(torch.bfloat16)
        super().__init__(context)
        self.types: list[tuple[str, torch.dtype]] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.types.append(("train", self.model(batch).dtype))
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.types.append(("evaluate", self.model(batch).dtype))
        return super().evaluate_batch(batch, batch_idx)


def optimisation_of(trial: OneWeight) -> Optimisation:
    return trial.context._run.optimisation  # noqa: SLF001 - use_amp() scales gradients only on a GPU


def scaling(**scaler: Any) -> Callable[[OneWeight], None]:
    """As `use_amp()` on a GPU, with torch's scaler for the CPU: the scaling is the same."""

    def prepare(trial: OneWeight) -> None:
        optimisation = optimisation_of(trial)
        optimisation.scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **scaler})
        optimisation.amp = MixedPrecision(torch.device("cpu"), torch.bfloat16, optimisation.scaler)

    return prepare


def with_scale(scale: float) -> Callable[[OneWeight], None]:
    """Begin with this scale of the gradients, if there is a scaler.

    The usual one, 2**16, makes the first gradient of OneWeight, -1, infinite in float16: no step would be taken.
    """

    def prepare(trial: OneWeight) -> None:
        scaler = optimisation_of(trial).scaler
        if scaler is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})

    return prepare


def state(checkpoint: str) -> dict[str, Any]:
    return torch.load(Path(checkpoint) / "state-dict.pth", weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.api("2.25")
def test_forward_passes_run_in_bfloat16_and_weights_stay(fit: Fit) -> None:
    trial = fit(Types, max_length=Batch(5))
    assert set(trial.types) == {("train", torch.bfloat16), ("evaluate", torch.bfloat16)}
    assert trial.model.weight.dtype is torch.float32
    assert trial.weight == one_weight(5)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.api("2.25")
def test_evaluate_full_dataset_runs_under_autocast(fit: Fit, host: FakeHost) -> None:
    full = trial(
        **FULL,
        at_init=lambda self: self.context.experimental.use_amp(dtype=torch.bfloat16),
        evaluate_full_dataset=lambda self, data_loader: {
            "types": [str(self.model(batch).dtype) for batch in data_loader]
        },
    )
    fit(full, max_length=Batch(1))
    assert host.reports[-1].validation == {"types": ["torch.bfloat16"] * 3}


@pytest.mark.api("2.25")
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_on_a_cpu_float16_trains_as_usual(fit: Fit, host: FakeHost, dtype: torch.dtype | None) -> None:
    class Plain(Types):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            context.experimental.use_amp(dtype)
            OneWeight.__init__(self, context)
            self.types = []

    trial = fit(Plain, max_length=Batch(9))
    assert {kind for _, kind in trial.types} == {torch.float32}
    assert trial.weight == pytest.approx(one_weight(9), abs=0)
    assert "scaler_state_dict" not in state(host.checkpoints()[-1])


@pytest.mark.api("2.25")
def test_backward_is_not_under_autocast(fit: Fit) -> None:
    seen: list[bool] = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    class Trial(Types):
        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = Asking.apply(super().loss(batch))
            return loss

        def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"validation_loss": 0.0}

    fit(Trial, max_length=Batch(1))
    assert seen == [True, False]


@pytest.mark.api("2.25")
def test_scaled_gradients_make_the_same_steps_and_the_scale_grows(fit: Fit, host: FakeHost) -> None:
    trial = fit(OneWeight, prepare=scaling(growth_interval=3), max_length=Batch(5))
    assert trial.weight == one_weight(5)
    saved = state(host.checkpoints()[-1])["scaler_state_dict"]
    assert (saved["scale"], saved["_growth_tracker"]) == (2048.0, 2)


@pytest.mark.api("2.25", "2.19")
def test_gradients_are_unscaled_and_averaged_before_they_are_clipped(fit: Fit, host: FakeHost) -> None:
    seen: list[float] = []

    class Clipping(OneWeight):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.context.backward(loss)
            self.context.step_optimizer(
                self.optimizer, clip_grads=lambda params: seen.extend(float(p.grad) for p in params)
            )
            return {"loss": loss}

    trial = fit(Clipping, prepare=scaling(), init={"aggregation_frequency": 2}, max_length=Batch(6))
    assert seen == [-2 * (1 - one_weight(step)) for step in range(3)]
    assert trial.weight == one_weight(3)
    assert state(host.checkpoints()[-1])["scaler_state_dict"]["_growth_tracker"] == 3, "adapted where it stepped"


@pytest.mark.api("2.25")
def test_an_infinite_gradient_makes_no_step_and_halves_the_scale(fit: Fit, host: FakeHost) -> None:
    class Exploding(OneWeight):
        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            loss = super().loss(batch)
            return loss * torch.inf if len(self.seen) == 3 else loss

    trial = fit(Exploding, prepare=scaling(), max_length=Batch(6))
    assert trial.weight == one_weight(5)
    assert state(host.checkpoints()[-1])["scaler_state_dict"]["scale"] == 512.0


@pytest.mark.api("2.25")
def test_the_scale_adapts_once_a_batch_with_two_optimizers(fit: Fit, host: FakeHost) -> None:
    class Two(OneWeight):
        def at_init(self) -> None:
            self.other = self.context.wrap_model(torch.nn.Linear(1, 1))
            self.second = self.context.wrap_optimizer(torch.optim.SGD(self.other.parameters(), lr=0.1))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.backward((self.other(batch) ** 2).mean())
            self.context.step_optimizer(self.second)
            return super().train_batch(batch, epoch_idx, batch_idx)

    fit(Two, prepare=scaling(), max_length=Batch(4))
    assert state(host.checkpoints()[-1])["scaler_state_dict"]["_growth_tracker"] == 4


@pytest.mark.api("2.25")
def test_a_resumed_trial_has_the_gradient_scale_that_it_had(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    prepare = scaling(growth_interval=2)
    fit(OneWeight, prepare=prepare, max_length=Batch(5), checkpoint_period=Batch(3))
    resumed = FakeHost(tmp_path / "resumed")
    trial = fit(OneWeight, resumed, prepare=prepare, max_length=Batch(5), latest_checkpoint=host.checkpoints()[0])
    assert trial.weight == one_weight(5)
    whole, again = (state(h.checkpoints()[-1])["scaler_state_dict"] for h in (host, resumed))
    assert whole == again
    assert whole["scale"] == 4096.0


@pytest.mark.api("2.25")
def test_a_trial_without_a_scaler_takes_the_checkpoint_of_one_with_and_the_reverse(
    fit: Fit, host: FakeHost, tmp_path: Path
) -> None:
    fit(OneWeight, prepare=scaling(), max_length=Batch(2))
    plain = FakeHost(tmp_path / "plain")
    assert fit(OneWeight, plain, max_length=Batch(4), latest_checkpoint=host.checkpoints()[0]).weight == one_weight(4)
    scaled = FakeHost(tmp_path / "scaled")
    trial = fit(OneWeight, scaled, prepare=scaling(), max_length=Batch(6), latest_checkpoint=plain.checkpoints()[-1])
    assert trial.weight == one_weight(6)


@pytest.mark.api("2.24")
def test_a_scaler_that_is_switched_off_is_saved_and_loaded(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    class Off(OneWeight):
        enabled = False

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", enabled=self.enabled))
            super().__init__(context)

    class On(Off):
        enabled = True

    fit(Off, max_length=Batch(2))
    assert state(host.checkpoints()[-1])["scaler_state_dict"] == {}
    fit(On, FakeHost(tmp_path / "on"), max_length=Batch(3), latest_checkpoint=host.checkpoints()[-1])


@pytest.mark.api("2.24")
def test_the_users_own_scaler_is_stepped_by_them_and_saved(fit: Fit, host: FakeHost, tmp_path: Path) -> None:
    class Own(OneWeight):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            self.scaler = context.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2))
            super().__init__(context)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.context.backward(self.scaler.scale(loss))
            self.scaler.unscale_(self.optimizer)
            self.context.step_optimizer(self.optimizer, scaler=self.scaler)
            self.scaler.update()
            return {"loss": loss}

    assert fit(Own, max_length=Batch(3)).weight == one_weight(3)
    assert state(host.checkpoints()[-1])["scaler_state_dict"]["scale"] == 16.0
    trial = fit(Own, FakeHost(tmp_path / "on"), max_length=Batch(4), latest_checkpoint=host.checkpoints()[-1])
    assert trial.scaler.get_scale() == 32.0


@pytest.mark.api("2.26")
def test_apex_switched_off_returns_what_it_was_given(host: FakeHost) -> None:
    given: tuple[list[Any], Any] = ([object(), object()], object())
    with use_host(host), pytorch.init() as context, pytest.warns(FutureWarning, match="use_amp"):
        assert context.configure_apex_amp(*given, enabled=False) == given


@pytest.mark.api("2.26")
def test_apex_without_cuda_is_an_error(host: FakeHost) -> None:
    with use_host(host), pytorch.init() as context:
        context.device = torch.device("cpu")
        with (
            pytest.warns(FutureWarning),
            pytest.raises(RuntimeError, match="needs a CUDA device, but this trial is on cpu; pass enabled=False"),
        ):
            context.configure_apex_amp([], [])


@pytest.mark.gpu
@pytest.mark.api("2.25")
def test_on_a_gpu_float16_is_the_default_and_scales(fit: Fit, host: FakeHost) -> None:
    class Half(Types):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            context.experimental.use_amp()
            OneWeight.__init__(self, context)
            self.types = []

    trial = fit(Half, max_length=Batch(5), prepare=with_scale(1024.0))
    assert {kind for _, kind in trial.types} == {torch.float16}
    assert trial.weight == one_weight(5)
    assert state(host.checkpoints()[-1])["scaler_state_dict"]["_growth_tracker"] == 5


@pytest.mark.gpu
@pytest.mark.api("2.26")
@pytest.mark.parametrize(("opt_level", "kind"), [("O0", torch.float32), ("O1", torch.float16), ("O2", torch.float16)])
def test_apex_on_a_gpu_is_torchs_own_amp(fit: Fit, opt_level: str, kind: torch.dtype) -> None:
    class Apex(Types):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            OneWeight.__init__(self, context)
            self.types = []
            with pytest.warns(FutureWarning):
                self.model, self.optimizer = context.configure_apex_amp(self.model, self.optimizer, opt_level=opt_level)

    trial = fit(Apex, max_length=Batch(5), prepare=with_scale(1024.0))
    assert {found for _, found in trial.types} == {kind}
    assert trial.weight == one_weight(5)


@pytest.mark.gpu
@pytest.mark.api("2.26")
def test_apex_all_in_half_precision_is_refused(host: FakeHost) -> None:
    with (
        use_host(host),
        pytorch.init() as context,
        pytest.warns(FutureWarning),
        pytest.raises(ValueError, match="opt_level must be 'O0', 'O1' or 'O2', got 'O3'"),
    ):
        context.configure_apex_amp([], [], opt_level="O3")


class Multiplying(torch.optim.SGD):
    """Multiplies matrices in its step, as Muon and Shampoo do."""

    def step(self, closure: Any = None) -> Any:
        self.product = (torch.eye(2) @ torch.eye(2)).dtype
        return super().step(closure)


@pytest.mark.api("2.25", "2.19")
@pytest.mark.parametrize("scale", [False, True])
def test_clipping_and_the_step_are_not_under_autocast(fit: Fit, scale: bool) -> None:
    class Trial(Types):
        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context)
            self.optimizer = context.wrap_optimizer(Multiplying(self.model.parameters(), lr=self.lr))

        def clip(self, parameters: Any) -> None:
            self.types.append(("clip", (torch.eye(2) @ torch.eye(2)).dtype))

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.backward(self.loss(batch))
            self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
            self.types += [("step", self.optimizer.product), ("forward", self.model(batch).dtype)]
            return {}

    trial = fit(Trial, prepare=scaling() if scale else lambda trial: None, max_length=Batch(2))
    seen = {("clip", torch.float32), ("step", torch.float32), ("forward", torch.bfloat16)}
    assert {kind for kind in trial.types if kind[0] != "evaluate"} == seen
    assert trial.weight == one_weight(2)


@pytest.mark.api("2.25", "2.19")
def test_a_forward_pass_after_a_step_has_the_new_weights(fit: Fit) -> None:
    class Twice(Types):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            super().train_batch(batch, epoch_idx, batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    assert fit(Twice, max_length=Batch(3)).weight == one_weight(6)


class Critic(OneWeight):
    """Steps its optimizer three times a batch, as a WGAN does its critic's. The gradients of another one are from
    before these steps, which it comes after."""

    explodes = -1
    clips = False

    def at_init(self) -> None:
        self.other = self.context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.zeros_(self.other.weight)
        self.second = self.context.wrap_optimizer(torch.optim.SGD(self.other.parameters(), lr=self.lr))
        self.gradients: list[float] = []
        self.backwards = 0

    def note(self, parameters: Any) -> None:
        self.gradients += [float(parameter.grad) for parameter in parameters]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.backward(((self.other(batch) - 1) ** 2).mean())
        for _ in range(3):
            loss = self.loss(batch)
            self.context.backward(loss * torch.inf if self.backwards == self.explodes else loss)
            self.backwards += 1
            self.context.step_optimizer(self.optimizer, clip_grads=self.note if self.clips else None)
        self.context.step_optimizer(self.second)
        return {"loss": loss}


@pytest.mark.api("2.25", "2.19")
@pytest.mark.parametrize("clips", [False, True])
def test_an_optimizer_may_step_several_times_a_batch(fit: Fit, host: FakeHost, clips: bool) -> None:
    trial = fit(type("Trial", (Critic,), {"clips": clips}), prepare=scaling(growth_interval=1), max_length=Batch(2))
    assert trial.weight == one_weight(6)
    assert float(trial.other.weight.detach()) == one_weight(2)
    assert trial.gradients == ([-2 * (1 - one_weight(step)) for step in range(6)] if clips else [])
    saved = state(host.checkpoints()[-1])["scaler_state_dict"]
    assert saved["scale"] == 4096.0, "doubled once a batch"


@pytest.mark.api("2.25", "2.19")
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("explodes", [0, 1, 2])
def test_any_of_its_steps_may_be_left_out_for_an_infinite_gradient(
    fit: Fit, host: FakeHost, clips: bool, explodes: int
) -> None:
    trial = fit(
        type("Trial", (Critic,), {"clips": clips, "explodes": explodes}), prepare=scaling(), max_length=Batch(1)
    )
    assert trial.weight == one_weight(2)
    assert float(trial.other.weight.detach()) == one_weight(1)
    assert state(host.checkpoints()[-1])["scaler_state_dict"]["scale"] == 512.0, "halved once"


@pytest.mark.gpu
@pytest.mark.api("2.25", "2.19")
def test_on_a_gpu_an_optimizer_may_step_several_times_a_batch(fit: Fit) -> None:
    class Half(Critic):
        clips = True

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            context.experimental.use_amp()
            super().__init__(context)

    trial = fit(Half, prepare=with_scale(1024.0), max_length=Batch(2))
    assert trial.weight == one_weight(6)
    assert trial.gradients == [-2 * (1 - one_weight(step)) for step in range(6)]
