"""Sharded and tensor-parallel models in two and four real processes: the same training as DDP's or one process's, on a
part of the memory. All scenarios of a number of processes share them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from dray import pytorch
from dray.pytorch import Batch
from dray.training.checkpoint import shard_file, sharded
from dray.training.checkpoint.export import whole_models, write_safetensors
from dray.worker.isolation.snapshot import ProcessSnapshot
from tests.pytorch import fsdp_ranks
from tests.pytorch.fsdp_ranks import Full, OfMeta, Plain, run, variant, weights
from tests.pytorch.processes import results_of
from tests.pytorch.test_profiler import traced
from tests.training.test_event_file import read

pytestmark = pytest.mark.slow

Runs = dict[str, Any]


class Operators(TorchDispatchMode):
    """Counts calls of tanh."""

    tanh = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tanh += operator is torch.ops.aten.tanh.default
        return operator(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    return results_of(2, fsdp_ranks.__file__, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    return results_of(4, fsdp_ranks.__file__, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def queued(tmp_path_factory: pytest.TempPathFactory) -> list[Runs]:
    """On a backend that treats its ranks as NCCL does, see `tests.queued`."""
    return results_of(2, fsdp_ranks.__file__, tmp_path_factory.mktemp("queued"), "queued")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same trial in this process alone, with clipped gradients."""
    return run(variant(Plain, **fsdp_ranks.CLIPPED), tmp_path_factory.mktemp("one"), **fsdp_ranks.SHORT)


def close(run: Runs, other: Runs, rel: float = 1e-5) -> bool:
    assert (run["error"], other["error"]) == (None, None)
    assert len(run["losses"]) == len(other["losses"]) > 0
    return run["losses"] == pytest.approx(other["losses"], rel=rel, abs=1e-6)


def assert_same_metrics(run: Runs, other: Runs, rel: float) -> None:
    assert len(run["reports"]) == len(other["reports"]) > 0
    for mine, theirs in zip(run["reports"], other["reports"], strict=True):
        for metrics, expected in zip(mine[1:3], theirs[1:3], strict=True):
            numbers = {name: value for name, value in (expected or {}).items() if name != "records"}
            assert {name: (metrics or {})[name] for name in numbers} == pytest.approx(numbers, rel=rel)
            assert (metrics or {}).get("records") == (expected or {}).get("records")


def test_sharded_model_trains_as_with_ddp(two: list[Runs]) -> None:
    for rank in two:
        assert close(rank["clipped"]["Trial"], rank["clipped"]["Plain"], 1e-6)
        assert len(rank["clipped"]["Trial"]["losses"]) == 60


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("kind", ["synced", "unsynced"])
def test_sharded_model_trains_as_with_ddp_also_if_gradients_are_aggregated(
    two: list[Runs], kind: str, averages: bool
) -> None:
    for rank in two:
        assert close(rank["aggregated"][kind, averages], rank["aggregated"]["DDP", averages], 1e-3)


def test_a_rank_holds_only_its_shards_of_aggregated_gradients(two: list[Runs], four: list[Runs]) -> None:
    for rank in (*two, *four):
        assert rank["held"]["default"]["held"] == [(pytest.approx(1, rel=0.1), False)] * 8
        # A reduce-scatter of each block and of the rest.
        assert rank["held"]["default"]["sums"] == 8 * (fsdp_ranks.BLOCKS + 1)


def test_replicas_of_shards_are_summed_only_in_batches_that_step(four: list[Runs]) -> None:
    for rank in four:
        expected = [(pytest.approx(1, rel=0.1), batch % 4 != 3) for batch in range(8)]
        assert rank["held"]["replicas"]["held"] == expected


def test_gradients_are_summed_only_in_batches_that_step_if_asked_for(two: list[Runs]) -> None:
    for rank in two:
        assert rank["held"]["unsynced"]["held"] == [
            (pytest.approx(1 + (batch % 4 != 3), rel=0.1), False) for batch in range(8)
        ]
        assert rank["held"]["unsynced"]["sums"] == 2 * (fsdp_ranks.BLOCKS + 1)


def test_units_that_some_batches_of_an_aggregation_do_not_use_train_in_replicas_too(four: list[Runs]) -> None:
    for rank in four:
        assert close(rank["skipping"]["replicas"], rank["skipping"]["shards"])
        assert rank["skipping"]["resumed"]["losses"] == rank["skipping"]["replicas"]["losses"][6:]


def test_scales_of_weights_in_float8_are_agreed_on_once_a_forward_pass(two: list[Runs]) -> None:
    # Of eight batches, and three of validation.
    assert [rank["held"]["float8"]["scales"] for rank in two] == [8 + 3] * 2


def test_metrics_of_sharded_model_are_those_of_ddp(two: list[Runs]) -> None:
    assert_same_metrics(two[0]["clipped"]["Trial"], two[0]["clipped"]["Plain"], 1e-5)
    assert two[0]["clipped"]["Trial"]["reports"][0][1]["norm"] > 0


def test_validation_counts_each_record_once_though_ranks_have_different_numbers_of_batches(two: list[Runs]) -> None:
    # Five batches on two ranks: the second waits in the last forward pass, with a batch that does not count.
    for trained, validations in ((two[0]["clipped"]["Trial"], 4), (two[0]["tensor_parallel"], 2)):
        assert [each[2]["records"] for each in trained["reports"] if each[2]] == [list(range(20))] * validations


@pytest.mark.parametrize("size", [2, 4])
def test_memory_of_a_rank_is_its_share(two: list[Runs], four: list[Runs], size: int) -> None:
    for rank in two if size == 2 else four:
        share = rank["memory"]["Trial"]["seen"] / rank["memory"]["Plain"]["seen"]
        assert share <= {2: 0.55, 4: 0.30}[size]


def test_four_ranks_train_as_with_ddp(four: list[Runs]) -> None:
    for rank in four:
        plain = rank["losses_of_four"]["Plain"]
        assert close(rank["losses_of_four"]["Trial"], plain)
        assert close(rank["replicated"], plain)


def test_tensor_parallel_ranks_train_as_one_process(two: list[Runs], one: Runs) -> None:
    for rank in two:
        assert close(rank["tensor_parallel"], one, 1e-6)
    assert_same_metrics(two[0]["tensor_parallel"], one, 1e-5)


def test_shards_of_tensor_parallel_ranks_train_as_two_processes(two: list[Runs], four: list[Runs]) -> None:
    for index, rank in enumerate(four):
        plain = two[index // 2]["clipped"]["Plain"]
        assert close(rank["both"], {**plain, "losses": plain["losses"][:40]})
    reports = [each[2]["records"] for each in four[0]["both"]["reports"] if each[2]]
    assert reports == [list(range(20))] * 2


def test_tensor_parallel_model_whose_gradients_nothing_averages_is_refused(two: list[Runs]) -> None:
    for rank in two:
        assert "its 2 replicas would never average their gradients" in rank["without_replicas"]["error"]


@pytest.mark.parametrize("where", ["forward", "step", "validation"])
@pytest.mark.parametrize("backend", ["gloo", "queued"])
def test_rank_that_leaves_ends_all(two: list[Runs], queued: list[Runs], backend: str, where: str) -> None:
    runs = [rank["left"] for rank in (two if backend == "gloo" else queued)]
    assert [run[f"{where} ShouldExit"]["error"] for run in runs] == [None] * 2
    assert [run[f"{where} InvalidHP"]["error"] for run in runs] == ["InvalidHP: too wide"] * 2
    assert [run[f"{where} LookupError"]["error"] for run in runs] == [
        "PeerFailed: rank 1 failed while training: LookupError('gone')",
        "LookupError: gone",
    ]


@pytest.mark.parametrize("backend", ["gloo", "queued"])
def test_rank_that_leaves_a_tensor_parallel_model_ends_all(
    two: list[Runs], queued: list[Runs], one: Runs, backend: str
) -> None:
    runs = [rank["left_tensor_parallel"] for rank in (two if backend == "gloo" else queued)]
    for where in ("forward", "step", "validation"):
        assert [run[where]["error"] for run in runs] == [
            "PeerFailed: rank 1 failed while training: LookupError('gone')",
            "LookupError: gone",
        ]
    # In float32, and without clipping; the first loss is of the same weights.
    assert [run["validation"]["losses"] for run in runs] == [two[0]["left_tensor_parallel"]["validation"]["losses"]] * 2
    assert runs[0]["validation"]["losses"][0] == pytest.approx(one["losses"][0], rel=1e-5)


def test_what_was_trained_is_saved_unless_some_shards_are_a_step_older(two: list[Runs]) -> None:
    for error in ("ShouldExit", "InvalidHP"):
        saved = {
            where: two[0]["left"][f"{where} {error}"]["reports"][-1] for where in ("forward", "step", "validation")
        }
        assert (saved["forward"][0], Path(saved["forward"][3]).name) == (2, "checkpoint_2")
        assert (saved["validation"][0], Path(saved["validation"][3]).name) == (4, "checkpoint_4")
        assert saved["step"][3] is None


def test_nothing_is_saved_of_collectives_that_were_aborted(queued: list[Runs]) -> None:
    assert [run["checkpoints"] for run in queued[0]["left"].values()] == [[]] * 9


@pytest.mark.parametrize("kind", fsdp_ranks.AGGREGATED)
def test_stop_in_the_middle_of_an_aggregation_loses_no_gradient(two: list[Runs], kind: str) -> None:
    for rank in two:
        whole, first, again = (rank["stopped"][kind][name] for name in ("whole", "first", "again"))
        assert len(first["losses"]) == 6
        assert first["losses"] + again["losses"] == whole["losses"]


def test_sharded_model_beside_a_plain_one(two: list[Runs]) -> None:
    for rank in two:
        assert close(rank["beside"]["Trial"], rank["beside"]["Plain"])


@pytest.mark.parametrize("size", [2, 4])
def test_models_sharded_by_the_users_code_train_and_a_rank_that_leaves_ends_all(
    two: list[Runs], four: list[Runs], size: int
) -> None:
    runs = [rank["by_hand"] for rank in (two if size == 2 else four)]
    for each in runs:
        assert close(each["whole"], each["plain"], 1e-6)
        assert each["resumed"]["losses"] == each["whole"]["losses"][6:]
        assert each["left"]["error"] is None
        assert len(each["after"]["losses"]) == 3
    assert runs[0]["left"]["reports"][-1][0] == 2


ROUNDED = {"bfloat16": 0.01, "float8": 0.1}
"""How far the losses of options that compute in another precision may be from the plain model's."""


@pytest.mark.parametrize("option", ["function", "names", "one unit", "checkpointing", "selective", "compile", *ROUNDED])
def test_options_change_no_result(two: list[Runs], option: str) -> None:
    for rank in two:
        plain, run = rank["options"]["plain"], rank["options"][option]
        assert close(run, plain, ROUNDED.get(option, 1e-5))
        assert (run["losses"] != plain["losses"]) is (option in ROUNDED)


def test_offloaded_weights_are_clipped_and_saved_whole(two: list[Runs]) -> None:
    for rank in two:
        mine = rank["offloaded"]["Trial"]
        assert close(mine, rank["offloaded"]["Plain"], 1e-12)
        assert mine["seen"] == [True] * (4 + 4 * fsdp_ranks.BLOCKS)
    mine, plain = (
        torch.load(f"{two[0]['offloaded'][kind]['checkpoints'][0]}/state-dict.pth", weights_only=True)
        for kind in ("Trial", "Plain")
    )
    torch.testing.assert_close(mine["models_state_dict"], plain["models_state_dict"])


def test_what_options_are_for(two: list[Runs]) -> None:
    calls = two[0]["options"]["calls"]
    # Forward passes of a block in 8 batches, and in 3 of validation; with checkpointing again in backward.
    assert calls["names"] == fsdp_ranks.BLOCKS * (8 + 3)
    assert calls["checkpointing"] == fsdp_ranks.BLOCKS * (8 + 8 + 3)
    assert two[0]["options"]["compiled"] == fsdp_ranks.BLOCKS


def test_buffers_of_the_chief_validate_on_all_ranks(two: list[Runs]) -> None:
    mine, plain = (two[0]["buffers"][kind] for kind in ("Trial", "Plain"))
    assert close(mine, plain)
    assert_same_metrics(mine, plain, 1e-5)


def test_evaluate_full_dataset_runs_on_all_ranks(two: list[Runs], tmp_path: Path) -> None:
    for rank in two:
        assert rank["full_dataset"]["Trial"]["error"] is None
    mine, plain = (two[0]["full_dataset"][kind]["reports"][-1][2] for kind in ("Trial", "Plain"))
    assert mine["batches"] == 5
    assert mine["validation_loss"] == pytest.approx(plain["validation_loss"])


def test_model_on_meta_begins_with_the_same_weights_on_any_number_of_ranks(
    two: list[Runs], four: list[Runs], tmp_path: Path
) -> None:
    class Begun(OfMeta):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.begun = weights(self)

    alone = run(Begun, tmp_path, max_length=Batch(1), look=lambda trial: trial.begun)["seen"]
    for rank in (*two, *four):
        assert rank["on_meta"]["seen"].keys() == alone.keys()
        assert all(torch.equal(value, alone[name]) for name, value in rank["on_meta"]["seen"].items())
    assert len({float(value.detach().sum()) for value in alone.values()}) == len(alone)


def test_all_ranks_begin_with_the_chiefs_weights(two: list[Runs]) -> None:
    drawn = two[0]["unseeded"]["seen"][0]
    assert not torch.equal(drawn, two[1]["unseeded"]["seen"][0])
    assert all(torch.equal(rank["unseeded"]["seen"][1], drawn) for rank in two)


def test_a_gradient_that_overflows_in_one_shard_skips_the_step_on_all(two: list[Runs], tmp_path: Path) -> None:
    def look(trial: Any) -> Any:
        return {"scales": trial.scales, "weights": weights(trial)}

    alone = run(variant(fsdp_ranks.Scaled, parallel=None), tmp_path, max_length=Batch(8), look=look)["seen"]
    assert alone["scales"] == [1024, 1024, 512, 512, 512, 1024, 1024, 1024]
    for rank in two:
        for name in ("Trial", "half", "tensor parallel", "tensor parallel, fused"):
            found = rank["scaled"][name]
            assert found["error"] is None
            assert found["seen"]["scales"] == alone["scales"]
            if name != "half":
                torch.testing.assert_close(found["seen"]["weights"], alone["weights"], rtol=1e-5, atol=1e-5)
        assert close(rank["scaled"]["half"], rank["scaled"]["Trial"], 0.01)
        resumed = rank["scaled"]["resumed"]
        assert resumed["losses"] == rank["scaled"]["Trial"]["losses"][4:]
        assert resumed["seen"]["scales"] == alone["scales"][4:]


def test_torchmetrics_tensorboard_and_profiler_show_what_they_show_with_ddp(two: list[Runs]) -> None:
    mine, plain = (two[0]["watched"][kind] for kind in ("Trial", "Plain"))
    assert mine["error"] is None
    assert_same_metrics(mine, plain, 1e-5)
    assert plain["reports"][-1][2].keys() >= {"error", "R2Score", "SpearmanCorrCoef"}
    for kind in ("Trial", "Plain"):
        directory = Path(two[0]["watched"][kind]["checkpoints"][0]).parent / "tensorboard"
        shown = read(directory)
        assert [(s.step, s.value) for s in shown.Scalars("own")] == [(batch, batch) for batch in range(8)]
        assert len(shown.Scalars("Determined/loss")) == 8
        errors = [s.value for s in shown.Scalars("Determined/val_error")]
        assert errors == pytest.approx([each[2]["error"] for each in plain["reports"] if each[2]])
        assert traced(directory) == [["batch 3", "batch 4"]] * 2, "a trace of each rank"


def saved(directory: Path) -> tuple[set[str], set[str]]:
    """The names in a checkpoint's state of the model, and in its shards."""
    state = torch.load(directory / "state-dict.pth", weights_only=True)
    shards = [shard_file.read(directory / sharded.file_of(rank)) for rank in (0, 1)]
    prefix = "models_state_dict.0."
    return set(state["models_state_dict"][0]), {
        name.removeprefix(prefix) for shard in shards for name in shard if name.startswith(prefix)
    }


TRAINED = {f"{layer}.{name}" for layer in ("0.first", "1") for name in ("weight", "bias")}


def test_frozen_weights_are_sharded_and_no_checkpoint_has_them(two: list[Runs], tmp_path: Path) -> None:
    for rank in two:
        runs = rank["finetuned"]
        assert close(runs["whole"], runs["plain"])
        assert runs["resumed"]["losses"] == runs["whole"]["losses"][3:]
        for name, weight in runs["whole"]["seen"].items():
            assert torch.equal(weight, runs["resumed"]["seen"][name]), name
        assert runs["not sharded"]["losses"] == runs["plain"]["losses"]
        assert runs["loaded"] == [1, 2], "once a process, not once a trial"
    [first, _] = two[0]["finetuned"]["whole"]["checkpoints"]
    assert saved(Path(first)) == (TRAINED, TRAINED)
    # On another number of ranks, and whole.
    fit: Any = {"max_length": Batch(6), "latest_checkpoint": first}
    for parallel in (fsdp_ranks.UNITS, None):
        alone = run(variant(fsdp_ranks.Finetuned, parallel=parallel), tmp_path / str(parallel is None), **fit)
        assert alone["error"] is None
        assert len(alone["losses"]) == 3
        assert alone["reports"][-1][2]["validation_loss"] == pytest.approx(
            two[0]["finetuned"]["whole"]["reports"][-1][2]["validation_loss"], rel=1e-4
        )
    trial: Any = pytorch.load_trial_from_checkpoint_path(first, fsdp_ranks.Finetuned)
    assert torch.equal(trial.model[0].last.weight, two[0]["finetuned"]["whole"]["seen"]["0.last.weight"])


def test_a_rank_has_only_its_shards_of_a_pretrained_model_in_memory(two: list[Runs]) -> None:
    for rank in two:
        assert rank["kept"]["shares"] == [pytest.approx(0.5, abs=0.05)] * 2


def test_other_frozen_weights_are_refused(two: list[Runs]) -> None:
    for rank in two:
        error = rank["finetuned"]["other"]["error"]
        assert re.search(r"model 0 .* other pretrained weights than the trial has loaded: '0\.", error)


def test_a_frozen_weight_of_which_one_rank_has_changed_its_shard_is_saved(two: list[Runs]) -> None:
    changed = "0.blocks.1.up.weight"
    [first, _] = two[0]["finetuned"]["merging"]["checkpoints"]
    assert saved(Path(first)) == (TRAINED | {changed}, TRAINED | {changed})
    weight = two[0]["finetuned"]["merging"]["seen"][changed]
    half = len(weight) // 2
    assert torch.equal(weight[half:], torch.full_like(weight[half:], 0.5))
    assert torch.equal(weight[:half], two[0]["finetuned"]["whole"]["seen"][changed][:half])


def test_selective_checkpointing_computes_no_matrix_product_again(tmp_path: Path) -> None:
    class Counted(fsdp_ranks.Trial):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            with FlopCounterMode(display=False) as self.flops, Operators() as self.operators:
                return super().train_batch(batch, epoch_idx, batch_idx)

    def look(trial: Any) -> tuple[int, int]:
        return trial.flops.get_total_flops(), trial.operators.tanh

    found = {}
    for option in (False, True, "selective"):
        parallel = pytorch.FullyShard(units="Block", activation_checkpointing=option)  # type: ignore[arg-type]
        kind = variant(Counted, parallel=parallel)
        found[option] = run(kind, tmp_path / str(option), max_length=Batch(1), look=look)
    (flops, tanh), (recomputed_flops, recomputed), selective = (found[option]["seen"] for option in found)
    assert recomputed_flops > 1.1 * flops
    assert (tanh, recomputed) == (fsdp_ranks.BLOCKS, 2 * fsdp_ranks.BLOCKS)
    assert selective == (flops, recomputed)
    assert found["selective"]["losses"] == found[False]["losses"]


def test_weights_in_float8_are_saved_in_their_own_precision_and_leave_nothing_in_the_process(tmp_path: Path) -> None:
    kind = variant(fsdp_ranks.Trial, parallel=pytorch.FullyShard(units="Block", float8=True))
    fit: dict[str, Any] = {"max_length": Batch(6), "checkpoint_period": Batch(3), "checkpoint_policy": "none"}

    def train(kind: Any = kind, name: str = "whole", **more: Any) -> Runs:
        return run(kind, tmp_path / name, look=weights, **fit, **more)

    whole, reasons = ProcessSnapshot().run(train)
    assert reasons == []
    [latest, last] = whole["checkpoints"]
    resumed = train(name="resumed", latest_checkpoint=latest)
    assert resumed["losses"] == whole["losses"][3:]
    assert train(Plain, "plain", latest_checkpoint=latest)["losses"][0] == pytest.approx(whole["losses"][3], rel=0.1)
    (tmp_path / "scratch").mkdir()
    [model] = whole_models(Path(last), tmp_path / "scratch")
    write_safetensors(model, tmp_path / "weights.safetensors")
    exported = load_file(tmp_path / "weights.safetensors")
    torch.testing.assert_close(exported, whole["seen"], rtol=0, atol=0)


def test_one_process_trains_a_sharded_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="dray")
    fit: Any = {"max_length": Batch(8)}
    plain = run(Plain, tmp_path / "plain", **fit)
    sharded = run(fsdp_ranks.Trial, tmp_path / "sharded", **fit)
    assert sharded["losses"] == plain["losses"]
    assert [record.message for record in caplog.records].count(
        "wrap_model: one slot has nothing to share the model with, and holds all of it"
    ) == 1
    assert run(variant(Full), tmp_path / "full", **fit)["error"] is None
