"""Every field of Determined's experiment file is used, ignored with a warning, or refused with the cure."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from dray.config.determined_fields import IGNORED_FIELDS, REMOVED_FIELDS
from dray.config.faults import SECTIONS
from dray.config.load import load_config, parse_config
from dray.config.schema import ExperimentConfig
from dray.errors import ConfigError
from dray.masking import MASK
from tests.config import configs

ROOT = Path(__file__).parents[2]
FIELDS = [
    line for line in Path(__file__).with_name("determined_fields.txt").read_text().splitlines() if line[:1] not in "#"
]
LEAST: dict[str, Any] = {
    "entrypoint": "model_def:Trial",
    "hyperparameters": {"global_batch_size": 64},
    "searcher": {"name": "single", "metric": "loss", "max_length": 100},
}


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_field(path: str, value: Any, **fields: Any) -> dict[str, Any]:
    """LEAST with further fields, and with that of this path."""
    return configs.with_field(path, value, LEAST | fields)


def read(config: ExperimentConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


# ------------------------------------------------------------------------------------------------------ the classes


def test_each_field_of_determined_is_used_ignored_or_refused(generate: ModuleType) -> None:
    classes = generate.determined_fields()
    leaves = {path for path, (state, _) in classes.items() if state == "used"}
    for path in FIELDS:
        parents = [path.rpartition(".")[0], path.partition(".")[0]]
        if path in SECTIONS and path != "resources.slots_per_trial":
            continue  # it is what its fields are
        if path.startswith("log_policies."):
            assert "log_policies" in leaves
            continue
        ways = [each for each in (path, *parents) if each in classes]
        assert ways, f"{path} is in no class"
    assert not IGNORED_FIELDS.keys() & REMOVED_FIELDS.keys(), "and none is in two"
    assert not leaves & {*IGNORED_FIELDS, *REMOVED_FIELDS}


def test_the_tables_have_only_fields_of_determined(generate: ModuleType) -> None:
    known = {*FIELDS, *(path for path in IGNORED_FIELDS if path.startswith("log_policies."))}
    assert set(generate.determined_fields()) <= known


def test_the_docs_have_the_table_of_the_code(generate: ModuleType) -> None:
    page = generate.DETERMINED_PAGE.read_text()
    assert page == generate.determined_page(), "run: python docs/generate.py"
    for path, (state, _) in generate.determined_fields().items():
        if not path.startswith("log_policies."):
            assert f"\n| `{path}` | {state} | " in page


# ---------------------------------------------------------------------------------------------------------- not used

VALUES: dict[str, Any] = {
    "bind_mounts": [{"host_path": "/data", "container_path": "/data", "read_only": True}],
    "environment.image": {"cuda": "a:1", "cpu": "b:2"},
    "environment.registry_auth": {"username": "me", "password": "c4n4ry"},
}


@pytest.mark.parametrize("path", [path for path in IGNORED_FIELDS if not path.startswith("log_policies.")])
def test_an_ignored_field_is_dropped_with_one_warning(path: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = load_config(with_field("reproducibility.experiment_seed", 7))
    raw = with_field(path, VALUES.get(path, "x"), reproducibility={"experiment_seed": 7})
    if path.startswith("checkpoint_storage."):
        raw["checkpoint_storage"] |= {"type": "shared_fs", "host_path": "/results"}
        plain = load_config({**raw, "checkpoint_storage": {"type": "shared_fs", "host_path": "/results"}})
    assert load_config(raw) == plain
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"\n  {path}: {IGNORED_FIELDS[path]}" in warning.getMessage()
    assert "c4n4ry" not in warning.getMessage()
    caplog.clear()
    load_config(load_config(raw).to_dict())
    assert len(caplog.records) == 1, "and an experiment's own copy has none of it"


def test_a_misspelt_field_of_a_log_policy_is_an_error() -> None:
    policies = [{"pattern": "a", "action": "cancel_retries"}, {"patern": "a", "action": "cancel_retries"}]
    with pytest.raises(ConfigError) as caught:
        load_config(with_field("log_policies", policies))
    assert caught.value.faults == (("log_policies[1].patern", "unknown field; did you mean pattern?"),)
    with pytest.raises(ConfigError, match=r"log_policies\[0\]: must have an action"):
        load_config(with_field("log_policies", [{"pattern": "a", "action": {"tpye": "cancel_retries"}}]))


def test_a_shared_file_system_has_no_path_in_containers(caplog: pytest.LogCaptureFixture) -> None:
    storage = {"type": "shared_fs", "host_path": "/mnt", "container_path": "/c", "storage_path": "cp"}
    config = load_config(with_field("checkpoint_storage", storage))
    assert str(config.checkpoint_storage.location) == "/mnt/cp"
    [warning] = caplog.messages
    assert "\n  checkpoint_storage.container_path: trials run in Ray workers, without a container; " in warning


def test_list_is_a_constant_and_spaces_in_it_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    size = {"type": "int", "minval": 1, "maxval": 4}
    layers = [8, size, {"kind": "conv", "size": size}, [[size]], {"type": "conv", "size": 3}]
    config = load_config(
        with_field("hyperparameters", {"net": {"layers": layers, "val": {"type": "const", "val": [size]}}})
    )
    assert config.space.sample(Random(1)) == {"net": {"layers": layers, "val": [size]}}
    [warning] = caplog.messages
    paths = [line.partition(":")[0].strip() for line in warning.splitlines()[1:]]
    assert paths == [f"hyperparameters.net.layers[{place}]" for place in ("1", "2", "3][0][0")]
    assert load_config(config.to_dict()) == config
    assert caplog.messages == [warning], "and not of an experiment's own copy"


def test_null_and_empty_fields_are_not_warned_of() -> None:
    raw = {"workspace": None, "resources": {"priority": None, "shm_size": 2}, "environment": {"ports": {}}, "pbs": {}}
    assert list(parse_config({**LEAST, **raw, "bind_mounts": []}).ignored) == ["resources.shm_size"]


@pytest.mark.parametrize("pattern", [r"gone[[:space:]]*", r"^[^[:alpha:]_]+$"])
def test_a_pattern_is_in_pythons_syntax(pattern: str) -> None:
    policies = [{"pattern": "out of memory", "action": "cancel_retries"}, {"pattern": pattern, "action": "signal"}]
    with pytest.raises(ConfigError) as caught:
        load_config(with_field("log_policies", policies))
    [(path, what)] = caught.value.faults
    assert path == "log_policies[1].pattern"
    assert f"must be in Python's syntax, which has no [:alpha:], got {pattern!r}; write A-Za-z" in what


def test_names_and_dates_are_text(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        """
entrypoint: python3 train.py
searcher: {name: single, metric: loss}
data: {1: a, since: 2026-11-22, deep: [{2: {true: 2026-11-22 10:00:00}}]}
hyperparameters: {day: 2026-11-22, weights: {0: 0.5}}
"""
    )
    config = load_config(file)
    assert config.data == {"1": "a", "since": "2026-11-22", "deep": [{"2": {"true": "2026-11-22 10:00:00"}}]}
    assert config.hyperparameters == {"day": "2026-11-22", "weights": {"0": 0.5}}


def test_masked_keys_are_refused() -> None:
    storage = {"type": "s3", "bucket": "b", "access_key": MASK, "secret_key": MASK}
    with pytest.raises(ConfigError, match=r"is masked, as .* shows it; write the real") as caught:
        load_config(with_field("checkpoint_storage", storage))
    assert [fault.path for fault in caught.value.faults] == [
        "checkpoint_storage.access_key",
        "checkpoint_storage.secret_key",
    ]


def test_the_output_of_det_experiment_config_is_read(caplog: pytest.LogCaptureFixture) -> None:
    file = Path(__file__).with_name("determined_config.yaml")
    config = load_config(file)
    assert str(config.checkpoint_storage.location) == "/mnt/nfs/determined"
    [warning] = caplog.messages  # and none of the defaults that Determined's master fills in
    paths = [line.partition(":")[0].strip() for line in warning.splitlines()[1:]]
    assert paths == [
        *("bind_mounts", "environment.image", "log_policies.signal", "preemption_timeout", "project"),
        *("resources.resource_pool", "workspace"),
    ]


def test_a_prefix_is_normalised_as_determined_does() -> None:
    def location(prefix: str) -> str:
        storage = {"type": "gcs", "bucket": "b", "prefix": prefix}
        return str(load_config(with_field("checkpoint_storage", storage)).checkpoint_storage.location)

    assert location("/pre/.//fix/") == location("pre/fix") == "gs://b/pre/fix"
    assert location("") == location("/") == "gs://b"
    for prefix in ("..", "../a", "a/..", "a/../b"):
        with pytest.raises(ConfigError, match=r"checkpoint_storage\.prefix: must not contain \.\., got "):
            location(prefix)


def test_hdfs_is_refused_with_what_to_use() -> None:
    storage = {"type": "hdfs", "hdfs_url": "http://a", "hdfs_path": "/b"}
    with pytest.raises(ConfigError) as caught:
        load_config(with_field("checkpoint_storage", storage))
    found = dict(caught.value.faults)
    assert "use directory, with HDFS mounted, or s3" in found.pop("checkpoint_storage.type")
    assert found == {
        path: REMOVED_FIELDS[path] for path in ("checkpoint_storage.hdfs_url", "checkpoint_storage.hdfs_path")
    }


def test_a_trial_number_of_determined_is_refused_with_the_cure() -> None:
    with pytest.raises(ConfigError, match=r"searcher\.source_trial_id: .* got 7: .* set source_checkpoint_uuid"):
        load_config(with_field("searcher.source_trial_id", 7))


def test_a_period_has_a_unit() -> None:
    what = r"min_checkpoint_period: must have a unit, got 3; write {batches: 100} or {epochs: 1}"
    with pytest.raises(ConfigError, match=re.escape(what)):
        load_config(with_field("min_checkpoint_period", 3))
    assert load_config(with_field("min_checkpoint_period", {"batches": 0})).min_checkpoint_period is None


def test_checkpoint_path_has_no_effect_beside_storage_path() -> None:
    storage = {"type": "shared_fs", "host_path": "/a", "storage_path": "b", "checkpoint_path": "/c"}
    assert str(load_config(with_field("checkpoint_storage", storage)).checkpoint_storage.location) == "/a/b"


@pytest.mark.parametrize("path", [path for path in REMOVED_FIELDS if path != "checkpoint_storage.user"])
def test_a_removed_field_is_refused_with_the_cure(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(with_field(path, "x"))
    assert (path, REMOVED_FIELDS[path]) in caught.value.faults


# -------------------------------------------------------------------------------------------------------------- used

_ASHA = {"name": "asha", "metric": "loss", "max_trials": 4, "max_length": 100, "num_rungs": 2}
_FS = {"type": "shared_fs", "host_path": "/mnt"}


#: Those that are read in other words.
IN_OTHER_WORDS: dict[str, tuple[Any, dict[str, Any], str, Any]] = {
    "resources.is_single_node": (True, {}, "resources.placement_strategy", "STRICT_PACK"),
    "resources.slots_per_trial": (0, {}, "resources.slot", "cpu"),
    "searcher.stop_once": (False, {"searcher": _ASHA}, "searcher.variant", "promotion"),
    "checkpoint_storage.checkpoint_path": ("r", {"checkpoint_storage": _FS}, "checkpoint_storage.storage_path", "r"),
}


@pytest.mark.parametrize("path", sorted(IN_OTHER_WORDS))
def test_older_fields_become_the_current_ones(path: str) -> None:
    value, beside, now, meant = IN_OTHER_WORDS[path]
    config = load_config(with_field(path, value, **beside))
    assert read(config, now) == meant
    assert load_config(config.to_dict()) == config


# ----------------------------------------------------------------------------------------------- the ways to say some


@pytest.mark.parametrize(
    ("written", "on_cpu", "on_cuda", "on_rocm"),
    [
        (["A=1", "B=x=y", "C="], {"A": "1", "B": "x=y", "C": ""}, ..., ...),
        ({"A": "1", "B": 2, "C": 0.5}, {"A": "1", "B": "2", "C": "0.5"}, ..., ...),
        ({"cpu": ["A=1"], "cuda": ["A=2", "B=3"]}, {"A": "1"}, {"A": "2", "B": "3"}, {}),
        ({"gpu": ["A=2"], "rocm": {"A": "3"}, "cpu": None}, {}, {"A": "2"}, {"A": "3"}),
        ({"ALL": "0", "cuda": ["A=2"]}, {"ALL": "0"}, {"ALL": "0", "A": "2"}, {"ALL": "0"}),
        ({"cpu": "a variable of this name"}, {"cpu": "a variable of this name"}, ..., ...),
        (["A=1", "B"], {"A": "1", "B": None}, ..., ...),
        ({"B": "1", "cpu": ["A", "B"], "cuda": ["A=2"]}, {"A": None, "B": None}, {"A": "2", "B": "1"}, {"B": "1"}),
    ],
)
def test_environment_variables(written: Any, on_cpu: Any, on_cuda: Any, on_rocm: Any) -> None:
    environment = load_config(with_field("environment.environment_variables", written)).environment
    assert environment.variables("cpu") == on_cpu
    assert environment.variables("cuda") == (on_cpu if on_cuda is ... else on_cuda)
    assert environment.variables("rocm") == (on_cpu if on_rocm is ... else on_rocm)
    again = load_config(with_field("environment.environment_variables", environment.environment_variables))
    assert again.environment == environment


@pytest.mark.parametrize(
    "written", [[""], ["A c4n4ry"], ["=c4n4ry"], "A=c4n4ry", {"A": ["c4n4ry"]}, {"A=c4n4ry": 1}, {1: "c4n4ry"}]
)
def test_invalid_variables_are_refused_without_their_values(written: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(with_field("environment.environment_variables", written))
    [fault] = caught.value.faults
    assert fault.path == "environment.environment_variables"
    assert "must" in fault.what
    assert "c4n4ry" not in fault.what.replace("'A=c4n4ry'", "")


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        ({"pattern": "a", "action": "cancel_retries"}, ["cancel_retries"]),
        ({"pattern": "a", "action": {"type": "cancel_retries"}}, ["cancel_retries"]),
        (
            {"pattern": "a", "actions": ["exclude_node", {"signal": "bad"}, "cancel_retries"]},
            ["exclude_node", "signal", "cancel_retries"],
        ),
        ({"pattern": "a", "policy": {"type": "on_failure_dont_retry"}}, ["cancel_retries"]),
        ({"pattern": "a", "signal": "bad"}, ["signal"]),
        ({"name": "OOM", "pattern": "a", "action": None}, ["signal"]),
        ({"name": "OOM", "pattern": None}, []),
        ({"name": "OOM"}, []),
    ],
)
def test_log_policies_of_every_version(policy: dict[str, Any], asked: list[str]) -> None:
    raw = with_field("log_policies", [policy])
    assert list(parse_config(raw).ignored) == [
        f"log_policies.{action}" for action in asked if action != "cancel_retries"
    ]
    kept = load_config(raw).log_policies
    assert [(each.pattern, each.action) for each in kept] == [("a", "cancel_retries")] * ("cancel_retries" in asked)


def test_time_in_batches_or_epochs_needs_no_metric() -> None:
    timed = {"name": "adaptive_asha", "metric": "loss", "max_trials": 4, "max_time": 100, "time_metric": "epochs"}
    config = load_config(with_field("searcher", {**timed, "max_time": 16}))
    assert (str(config.searcher.counted_length), config.searcher.counted_by) == ("16 epochs", None)
    config = load_config(
        with_field("searcher", {**timed, "time_metric": "seconds"}, min_validation_period={"epochs": 1})
    )
    assert (config.searcher.counted_length, config.searcher.counted_by) == (None, "seconds")
    both = {**timed, "time_metric": "seconds", "max_length": {"epochs": 16}}
    config = load_config(with_field("searcher", both, min_validation_period={"epochs": 1}))
    assert (str(config.searcher.counted_length), config.searcher.counted_by) == ("16 epochs", "seconds")
