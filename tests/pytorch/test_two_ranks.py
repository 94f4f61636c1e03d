"""Two real processes in a gloo group: the same weights as one, the same end on both. All scenarios share one pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dray import pytorch
from dray.pytorch import Batch
from tests.pytorch import two_ranks
from tests.pytorch.fakes import FakeHost
from tests.pytorch.processes import results_of_two
from tests.pytorch.two_ranks import Regression, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, backend: str) -> Path:
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def ranks(backend: str, directory: Path) -> list[dict[str, Any]]:
    return results_of_two(two_ranks.__file__, directory, backend)


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name])


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.api("2.16")
def test_two_processes_train_what_one_trains(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = run(Regression, FakeHost(tmp_path), max_length=Batch(7), reporting_period=Batch(3))
    assert alone["epochs"] == ranks[0]["training"]["epochs"] == pytest.approx(7 / 3)
    for rank in ranks:
        assert_close(rank["training"]["weights"], alone["weights"])
    assert_equal(ranks[0]["training"]["weights"], ranks[1]["training"]["weights"])


def test_compressed_gradients_travel_in_float16(ranks: list[dict[str, Any]]) -> None:
    assert_equal(ranks[0]["compressed"]["weights"], ranks[1]["compressed"]["weights"])
    assert [rank["compressed"]["trial"] for rank in ranks] == [{"torch.float16, own group"}] * 2


def test_a_rank_that_leaves_keeps_none_waiting_for_its_compressed_gradients(ranks: list[dict[str, Any]]) -> None:
    assert [rank["compressed_and_left"]["error"] for rank in ranks] == ["InvalidHP: too wide"] * 2
    whole, compressed = ranks[0]["training"]["weights"], ranks[0]["compressed"]["weights"]
    for name in whole:
        torch.testing.assert_close(compressed[name], whole[name], rtol=1e-2, atol=1e-3)
    assert any(not torch.equal(compressed[name], whole[name]) for name in whole), "some of each is lost"


def test_the_chief_alone_speaks_to_the_host(ranks: list[dict[str, Any]]) -> None:
    assert [batches for batches, *_ in ranks[0]["training"]["reports"]] == [2, 3, 4, 6, 7]
    assert ranks[1]["training"]["reports"] == []


@pytest.mark.api("6.1", "6.6")
def test_metrics_are_those_of_one_process(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = run(
        Regression, FakeHost(tmp_path), max_length=Batch(7), checkpoint_period=Batch(2), reporting_period=Batch(3)
    )
    for (_, training, validation, _), (_, expected, expected_validation, _) in zip(
        ranks[0]["training"]["reports"], alone["reports"], strict=True
    ):
        assert training["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert (validation is None) == (expected_validation is None)


@pytest.mark.api("2.20")
def test_gradient_aggregation_gives_the_same_over_two(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = run(Regression, FakeHost(tmp_path), max_length=Batch(6), aggregation_frequency=3)
    assert_close(ranks[0]["aggregation"]["weights"], alone["weights"])


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


def test_a_failure_behind_the_chiefs_back_ends_both(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["failure_behind"]["error"] == "LookupError: the store is gone"
    assert ranks[1]["failure_behind"]["error"].startswith("PeerFailed: rank 0 failed while ")


def test_a_hook_of_any_rank_makes_all_wait_for_checkpoints(ranks: list[dict[str, Any]]) -> None:
    reported = [checkpoint for *_, checkpoint in ranks[0]["hook_on_one_rank"]["reports"]]
    assert None not in reported
    assert ranks[1]["hook_on_one_rank"]["trial"] == reported


def test_a_validation_that_enables_gradients_ends_on_ranks_with_different_numbers_of_batches(
    ranks: list[dict[str, Any]],
) -> None:
    for kind in ("Batches", "Full"):
        assert [rank["gradients_in_validation"][kind]["error"] for rank in ranks] == [None, None]
        one, other = (rank["gradients_in_validation"][kind]["weights"] for rank in ranks)
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
    ranks: list[dict[str, Any]], kind: str, parameter: str, cause: str
) -> None:
    one, other = (rank["unaveraged"][kind] for rank in ranks)
    assert one["error"] == other["error"]
    assert one["error"].startswith("RuntimeError: the slots train different models: ")
    assert parameter in one["error"]
    assert cause in one["error"]
    assert one["reports"] == []


def test_parameters_that_are_frozen_after_wrapping_can_be_unfrozen(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["unaveraged"]["FrozenAfterWrapping"] for rank in ranks)
    assert one["error"] is None
    assert_equal(one["weights"], other["weights"])


def test_a_copy_of_a_wrapped_model_is_what_it_is_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["copies"]["error"] is None
        own, target, average, is_same = rank["copies"]["trial"]
        assert own == target == list(two_ranks.Forces().state_dict())
        assert average == ["n_averaged", *(f"module.{name}" for name in own)]
        assert is_same
