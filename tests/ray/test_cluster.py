"""A Ray cluster of two nodes with a CPU each, that was there before: several experiments, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import dray
from dray.errors import ConfigError
from tests.forks.process import forked_workers
from tests.ray.harness import DIGITS, TRIALS, attempts, ends, journal, lines, recorded, run_here, wait_for, write_config

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    assert not ray.is_initialized(), "another test left its connection to Ray"
    node = {"num_cpus": 1, "include_dashboard": False, **forked_workers()}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def free_cpus() -> float:
    return ray.available_resources().get("CPU", 0)


def named_actors() -> set[str]:
    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


# ---------------------------------------------------------------------------------------------------- a worker on each
@pytest.fixture(scope="module")
def two_nodes(address: str, digits_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    """The trial of distributed.yaml, whose two workers can't be on one node; its code is gone from where it was."""
    directory = tmp_path_factory.mktemp("two-nodes")
    config = digits(directory / "record", slots=2)
    experiment = dray.Experiment(config, model_dir=digits_dir, path=directory / "experiment", address=address)
    return experiment.run()


def digits(record: Path, *, slots: int, **fields: Any) -> dict[str, Any]:
    """Two epochs of distributed.yaml with the trial that notes where it runs, also saving after 20 batches."""
    import yaml

    config: dict[str, Any] = yaml.safe_load((DIGITS / "distributed.yaml").read_text())
    config["entrypoint"] = "recorded_digits:RecordedDigits"
    config["hyperparameters"] |= {"record": str(record), "pause_s": 0.0}
    config["resources"] = {"slots_per_trial": slots, "slot": "cpu"}
    return {
        **config,
        "searcher": {**config["searcher"], "max_length": {"epochs": 2}},
        "min_checkpoint_period": {"batches": 20},
        "checkpoint_storage": {"save_trial_latest": 99},  # the one after 20 batches is looked at
        **fields,
    }


def test_a_worker_runs_on_each_node_and_they_are_one_gloo_group(two_nodes: dray.Result) -> None:
    first, second = made(two_nodes)
    assert {first["made"], second["made"]} == {0, 1}
    assert first["pid"] != second["pid"]
    assert first["node"] != second["node"]
    assert (first["backend"], first["size"]) == (second["backend"], second["size"]) == ("gloo", 2)


def made(result: dray.Result) -> list[dict[str, Any]]:
    return [line for line in lines(result.path.parent / "record") if "made" in line]


def test_model_code_arrives_by_itself(two_nodes: dray.Result) -> None:
    # Ray unpacks it on each node; these two share a machine, so that they share the place too.
    for line in made(two_nodes):
        file = Path(line["file"])
        assert file.parents[1].name.startswith("dray-code-")
        assert not file.is_relative_to(two_nodes.path)


def test_weights_of_two_workers_are_those_of_one_process(
    two_nodes: dray.Result, digits_dir: Path, tmp_path: Path
) -> None:
    from dray.config.load import load_config
    from dray.experiment.local import run_local

    config = load_config({**digits(tmp_path / "record", slots=1), "entrypoint": "model_def:DigitsTrial"})
    alone = weights(run_local(config, digits_dir, path=tmp_path / "alone") / "checkpoint_20")
    lent = weights(two_nodes.path / "trial_0" / "checkpoint_20")
    assert lent.keys() == alone.keys()
    for name, expected in alone.items():
        # Gradients are summed in another order; Adam divides by their size, which brings it to the front.
        torch.testing.assert_close(lent[name], expected, rtol=1e-4, atol=1e-5)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = torch.load(checkpoint / "state-dict.pth", weights_only=True)
    return dict(state["models_state_dict"][0])


# ----------------------------------------------------------------------------------------------------- trials that fail
@pytest.fixture(scope="module")
def faulty(address: str, tmp_path_factory: pytest.TempPathFactory) -> dray.Result:
    """The second of five trials always raises, and the third has invalid hyperparameters."""
    directory = tmp_path_factory.mktemp("faulty")
    config = recorded(
        directory / "record",
        trials=5,
        batches=10,
        entrypoint="recorded:Faulty",
        max_restarts=2,
        resources={"slot": "cpu", "max_slots": 2},
    )
    return dray.Experiment(config, model_dir=TRIALS, path=directory / "experiment", address=address).run()


def test_cluster_is_left_as_it_was_found(faulty: dray.Result) -> None:
    assert ray.is_initialized()
    wait_for(lambda: free_cpus() == 2, "the groups' end")
    wait_for(lambda: named_actors() <= {"AutoscalingCoordinator"}, "the end of all actors but Ray's own")


def test_trial_that_always_raises_in_the_same_place_has_one_more_try_and_is_errored(faulty: dray.Result) -> None:
    trial = faulty.trials.set_index("trial_id").loc[1]
    assert (trial["state"], trial["restarts"]) == ("ERRORED", 1)
    assert [attempt.batches for attempt in attempts(faulty.path.parent / "record")[1]] == [tuple(range(5))] * 2
    errors = [record for record in journal(faulty.path) if "error" in record]
    assert [record["event"] for record in errors] == ["restarted", "gave_up"]
    assert all(record["error"].strip().endswith("ArithmeticError: it always ends so") for record in errors)
    assert errors[1]["why"].startswith("the same error twice, after 5 batches: ArithmeticError at recorded.py:")


def test_trial_with_invalid_hyperparameters_is_replaced_and_not_restarted(faulty: dray.Result) -> None:
    states = faulty.trials.set_index("trial_id")["state"]
    assert states[2] == "INVALID_HP"
    assert len(states) == 6, "one more"
    assert len(attempts(faulty.path.parent / "record")[2]) == 1


def test_search_goes_on_past_trials_that_fail(faulty: dray.Result) -> None:
    states = faulty.trials.set_index("trial_id")["state"]
    assert states[[0, 3, 4, 5]].tolist() == ["COMPLETED"] * 4
    assert ends(faulty.path) == dict.fromkeys(range(6), 1)
    assert faulty.best_trial.trial_id in (0, 3, 4, 5)


# ------------------------------------------------------------------------------------- mistakes that only Ray can show
def test_more_slots_than_the_cluster_has_are_told_at_once(address: str, tmp_path: Path) -> None:
    config = recorded(tmp_path / "record", trials=2, batches=10, resources={"slots_per_trial": 3, "slot": "cpu"})
    with pytest.raises(ConfigError) as told:
        dray.Experiment(config, model_dir=TRIALS, path=tmp_path / "experiment", address=address).run()
    [fault] = told.value.faults
    assert fault.path == "resources.slots_per_trial"
    assert "3 slots requested" in fault.what
    assert "2 cpu slots" in fault.what


@pytest.mark.api("8.16")
def test_metric_that_the_trial_does_not_return_is_told_by_the_command(address: str, tmp_path: Path) -> None:
    config = recorded(tmp_path / "record", trials=4, batches=10, resources={"slot": "cpu", "max_slots": 1})
    config["searcher"]["metric"] = "accuracy"
    path = tmp_path / "experiment"
    said = run_here("create", write_config(tmp_path, config), TRIALS, "--path", path)
    assert said.code == 1, "2 is for what is found before anything trains"
    output = said.out + said.err
    assert "searcher.metric: " in output
    assert "'accuracy'" in output
    assert "error" in output
    assert "Traceback" not in output
    # No trial was restarted over it, and none but those that were running had to find out.
    assert not [record for record in journal(path) if record["event"] == "restarted"]
    wait_for(lambda: free_cpus() == 2, "the groups' end")
