"""Every field of Determined's experiment file is used, or named as not used, or an error that says what to write."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import yaml

from dray.config.determined_fields import (
    DEFAULTS,
    DRAY_FIELDS,
    IGNORED_FIELDS,
    IGNORED_IN_SHARED_FS,
    OLDER_NAMES,
    REMOVED_FIELDS,
    actions,
    ignored_fields,
)
from dray.config.load import ConfigError, build_space, load_config
from dray.config.schema import ExperimentConfig
from dray.config.sections import SECTIONS
from dray.experiment.log_policies import forbidden
from dray.masking import MASK
from dray.script import Script

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
    config = {name: dict(value) if isinstance(value, dict) else value for name, value in (LEAST | fields).items()}
    place = config
    *sections, name = path.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    return config


def read(config: ExperimentConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    return found


# ------------------------------------------------------------------------------------------------------ the classes


def test_each_field_of_determineds_has_one_class(generate: ModuleType) -> None:
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
    tables = (IGNORED_FIELDS, REMOVED_FIELDS, OLDER_NAMES)
    assert sum(map(len, tables)) == len({*IGNORED_FIELDS, *REMOVED_FIELDS, *OLDER_NAMES}), "and none is in two"
    assert not leaves & {*IGNORED_FIELDS, *REMOVED_FIELDS}


def test_and_each_class_has_fields_of_determineds_alone(generate: ModuleType) -> None:
    known = {*FIELDS, *(path for path in IGNORED_FIELDS if path.startswith("log_policies."))}
    assert set(generate.determined_fields()) <= known
    in_schema = {
        f"{place}.{name}".removeprefix(".")
        for place, section in SECTIONS.items()
        for name in section.model_fields
        if "." not in place
    }
    assert in_schema >= DRAY_FIELDS
    assert not DRAY_FIELDS & set(FIELDS)


def test_the_table_of_the_docs_is_that_of_the_code(generate: ModuleType) -> None:
    page = generate.MIGRATION_PAGE.read_text()
    assert page == generate.migration_page(), "run: python docs/generate.py"
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
def test_unused_fields_are_reported_once_and_left_out(path: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = load_config(with_field("reproducibility.experiment_seed", 7))
    raw = with_field(path, VALUES.get(path, "x"), reproducibility={"experiment_seed": 7})
    if path.startswith("checkpoint_storage."):
        raw["checkpoint_storage"] |= {"type": "shared_fs", "host_path": "/results"}
        plain = load_config({**raw, "checkpoint_storage": {"type": "shared_fs", "host_path": "/results"}})
    assert load_config(raw) == plain
    [told] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"\n  {path}: {IGNORED_FIELDS[path]}" in told.getMessage()
    assert "c4n4ry" not in told.getMessage()
    caplog.clear()
    load_config(load_config(raw).to_dict())
    assert len(caplog.records) == 1, "and an experiment's own copy has none of it"


def test_a_misspelt_field_of_a_log_policy_is_an_error() -> None:
    policies = [{"pattern": "a", "action": "cancel_retries"}, {"patern": "a", "action": "cancel_retries"}]
    with pytest.raises(ConfigError) as caught:
        load_config(with_field("log_policies", policies))
    assert caught.value.faults == (("log_policies[1].patern", "unknown field; did you mean pattern?"),)
    with pytest.raises(ConfigError, match="number 0 must have an action"):
        load_config(with_field("log_policies", [{"pattern": "a", "action": {"tpye": "cancel_retries"}}]))


def test_fields_that_determined_fills_in_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    for path, value in DEFAULTS.items():
        raw = with_field(path, value)
        if path.startswith("checkpoint_storage."):
            raw["checkpoint_storage"] |= {"type": "shared_fs", "host_path": "/results"}
        load_config(raw)
    load_config(with_field("profiling", {"enabled": False, "begin_on_batch": 0, "sync_timings": True}))
    assert caplog.messages == []
    assert DEFAULTS.keys() <= IGNORED_FIELDS.keys()


def test_a_shared_file_system_has_no_path_in_containers(caplog: pytest.LogCaptureFixture) -> None:
    storage = {"type": "shared_fs", "host_path": "/mnt", "container_path": "/c", "storage_path": "cp"}
    config = load_config(with_field("checkpoint_storage", storage))
    assert str(config.checkpoint_storage.location) == "/mnt/cp"
    [told] = caplog.messages
    assert f"\n  checkpoint_storage.container_path: {IGNORED_IN_SHARED_FS['checkpoint_storage.container_path']}" in told


def test_a_list_is_one_constant_and_spaces_in_it_are_reported_as_not_searched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    size = {"type": "int", "minval": 1, "maxval": 4}
    layers = [8, size, {"kind": "conv", "size": size}, [[size]], {"type": "conv", "size": 3}]
    config = load_config(
        with_field("hyperparameters", {"net": {"layers": layers, "val": {"type": "const", "val": [size]}}})
    )
    assert build_space(config).sample(Random(1)) == {"net": {"layers": layers, "val": [size]}}
    [told] = caplog.messages
    paths = [line.partition(":")[0].strip() for line in told.splitlines()[1:]]
    assert paths == [f"hyperparameters.net.layers[{place}]" for place in ("1", "2", "3][0][0")]
    assert load_config(config.to_dict()) == config
    assert caplog.messages == [told], "and not of an experiment's own copy"


def test_null_and_empty_fields_are_not_reported() -> None:
    raw = {"workspace": None, "resources": {"priority": None, "weight": 2}, "environment": {"ports": {}}, "pbs": {}}
    assert [path for path, _ in ignored_fields({**raw, "bind_mounts": []})] == ["resources.weight"]


@pytest.mark.parametrize(
    ("fields", "batches", "told"),
    [
        ({}, 100, {"searcher.max_steps": "max_length: {batches: 400}"}),
        ({"batches_per_step": 16}, 16, {"searcher.max_steps": "max_length: {batches: 64}"}),
        (
            {"batches_per_step": 16, "min_checkpoint_period": 2, "min_validation_period": {"batches": 1}},
            16,
            {
                "searcher.max_steps": "max_length: {batches: 64}",
                "min_checkpoint_period": "min_checkpoint_period: {batches: 32}",
            },
        ),
    ],
)
def test_steps_are_converted_to_batches_and_reported(
    fields: dict[str, Any], batches: int, told: dict[str, str]
) -> None:
    searcher = {"name": "single", "metric": "loss", "max_steps": 4}
    with pytest.raises(ConfigError) as caught:
        load_config({**LEAST, "searcher": searcher, **fields})
    why = f"is in steps of {batches} batches, which Determined has removed, too; write "
    found = dict(caught.value.faults)
    assert {path: what for path, what in found.items() if path != "batches_per_step"} == {
        path: why + instead for path, instead in told.items()
    }
    assert ("batches_per_step" in found) == ("batches_per_step" in fields)


@pytest.mark.parametrize(
    ("written", "line", "other"),
    [
        (r"gone[[:space:]]*\z", "it is gone ", "gone on"),
        (r"^[^[:alpha:]_]+$", "12!", "a1"),
        (r"\\z[[:punct:]]", r"\z]", r"\zz"),
    ],
)
def test_patterns_in_gos_syntax_mean_the_same(written: str, line: str, other: str) -> None:
    [policy] = load_config(with_field("log_policies", [{"pattern": written, "action": "cancel_retries"}])).log_policies
    assert forbidden([policy], [line])
    assert not forbidden([policy], [other])
    assert load_config(with_field("log_policies", [policy.model_dump()])).log_policies == [policy]


def test_code_gets_names_and_dates_as_text_as_json_has_them(tmp_path: Path) -> None:
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


def test_keys_that_determined_has_masked_are_not_taken_for_true_ones() -> None:
    storage = {"type": "s3", "bucket": "b", "access_key": MASK, "secret_key": MASK}
    with pytest.raises(ConfigError, match=r"is masked, as .* shows it; write the true") as caught:
        load_config(with_field("checkpoint_storage", storage))
    assert [fault.path for fault in caught.value.faults] == [
        "checkpoint_storage.access_key",
        "checkpoint_storage.secret_key",
    ]


def test_what_det_experiment_config_writes_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    file = Path(__file__).with_name("determined_config.yaml")
    config = load_config(file)
    assert str(config.checkpoint_storage.location) == "/mnt/nfs/determined"
    [told] = caplog.messages
    paths = [line.partition(":")[0].strip() for line in told.splitlines()[1:]]
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


def test_hdfs_is_refused_with_what_to_use_instead() -> None:
    storage = {"type": "hdfs", "hdfs_url": "http://a", "hdfs_path": "/b"}
    with pytest.raises(ConfigError) as caught:
        load_config(with_field("checkpoint_storage", storage))
    assert dict(caught.value.faults) == {
        f"checkpoint_storage.{name}": REMOVED_FIELDS["checkpoint_storage.hdfs_url"] for name in storage
    }


def test_a_trial_number_of_determined_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"searcher\.source_trial_id: .* got 7: .* set source_checkpoint_uuid"):
        load_config(with_field("searcher.source_trial_id", 7))


def test_a_period_says_what_it_counts() -> None:
    what = r"min_checkpoint_period: must have a unit, got 3; write {batches: 3} or {epochs: 3}"
    with pytest.raises(ConfigError, match=re.escape(what)):
        load_config(with_field("min_checkpoint_period", 3))
    assert load_config(with_field("min_checkpoint_period", {"batches": 0})).min_checkpoint_period is None


def test_the_path_of_old_says_nothing_beside_the_new_one() -> None:
    storage = {"type": "shared_fs", "host_path": "/a", "storage_path": "b", "checkpoint_path": "/c"}
    assert str(load_config(with_field("checkpoint_storage", storage)).checkpoint_storage.location) == "/a/b"


def test_an_empty_path_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"host_path: must not be empty; for example host_path: /mnt/results"):
        load_config(with_field("checkpoint_storage", {"type": "shared_fs", "host_path": ""}))


@pytest.mark.parametrize("path", [path for path in REMOVED_FIELDS if path != "checkpoint_storage.user"])
def test_what_is_no_more_is_an_error_that_says_what_to_write(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(with_field(path, "x"))
    assert (path, REMOVED_FIELDS[path]) in caught.value.faults


def test_a_whole_file_of_determineds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "adaptive.yaml"
    file.write_text(
        """
name: mnist_adaptive
workspace: vision
project: digits
labels: [mnist]
data: {url: https://example.com/mnist.tar.gz}
hyperparameters:
  global_batch_size: {type: const, val: 64}
  learning_rate: {type: log, base: 10.0, minval: -4.0, maxval: -1.0, count: 3}
  net:
    dropout: {type: double, minval: 0.2, maxval: 0.8}
    act: {type: categorical, vals: [relu, gelu]}
searcher:
  name: adaptive_asha
  metric: validation_loss
  smaller_is_better: true
  max_trials: 16
  max_length: {batches: 937}
  mode: aggressive
  stop_once: true
records_per_epoch: 60000
scheduling_unit: 50
min_validation_period: {batches: 100}
min_checkpoint_period: {batches: 200}
perform_initial_validation: true
environment:
  image: {cpu: determinedai/environments:py-3.9, cuda: determinedai/environments:cuda-11.3}
  environment_variables: [NCCL_DEBUG=INFO, "GREETING=a=b c"]
resources: {slots_per_trial: 2, max_slots: 8, shm_size: 4G, resource_pool: compute, is_single_node: true}
optimizations: {aggregation_frequency: 2, mixed_precision: O1, average_training_metrics: true}
log_policies:
  - {name: ECC, pattern: ".*uncorrectable ECC error.*", action: exclude_node}
  - {pattern: ".*CUDA out of memory.*", action: {type: cancel_retries}}
profiling: {enabled: true, begin_on_batch: 0, end_after_batch: 50}
checkpoint_storage: {type: shared_fs, host_path: /mnt/nfs, storage_path: determined, save_trial_latest: 2}
entrypoint: python3 -m determined.launch.torch_distributed --trial model_def:MNistTrial
max_restarts: 2
reproducibility: {experiment_seed: 999}
"""
    )
    config = load_config(file)
    assert str(config.min_checkpoint_period) == "200 batches"
    assert config.resources.placement_strategy == "STRICT_PACK"
    assert (config.resources.slots_per_trial, config.resources.max_slots) == (2, 8)
    assert config.environment.variables("cpu") == {"NCCL_DEBUG": "INFO", "GREETING": "a=b c"}
    assert [policy.pattern for policy in config.log_policies] == [".*CUDA out of memory.*"]
    [told] = caplog.messages
    assert told.startswith(f"{file} has fields of Determined that are ignored here:\n  workspace: ")
    assert [line.partition(":")[0].strip() for line in told.splitlines()[1:]] == [
        "workspace",
        "project",
        "environment.image",
        "resources.shm_size",
        "resources.resource_pool",
        "log_policies.exclude_node",
        "profiling",
    ]
    assert load_config(yaml.safe_load(yaml.safe_dump(config.to_dict()))).searcher == config.searcher


# -------------------------------------------------------------------------------------------------------------- used

#: Of each field that is used: a value other than the default, what beside it the config needs, and what then is read.
USED: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "description": ("a sweep", {}, "a sweep"),
    "name": ("digits", {}, "digits"),
    "labels": ({"a": True, "b": True}, {}, ["a", "b"]),
    "data": ({"path": "/d"}, {}, {"path": "/d"}),
    "entrypoint": ("python3 train.py", {}, Script(command="python3 train.py", file="train.py")),
    "hyperparameters": ({"lr": 1}, {}, {"lr": 1}),
    "environment.environment_variables": (["A=1"], {}, {"A": "1"}),
    "scheduling_unit": (5, {}, 5),
    "records_per_epoch": (500, {}, 500),
    "perform_initial_validation": (True, {}, True),
    "checkpoint_policy": ("all", {}, "all"),
    "max_restarts": (0, {}, 0),
    "reproducibility.experiment_seed": (7, {}, 7),
    "optimizations.aggregation_frequency": (2, {}, 2),
    "optimizations.average_aggregated_gradients": (False, {}, False),
    "optimizations.gradient_compression": (True, {}, True),
    "optimizations.mixed_precision": ("O2", {}, "O2"),
    "resources.max_slots": (8, {}, 8),
    "resources.slots_per_trial": (2, {}, 2),
    "searcher.metric": ("accuracy", {}, "accuracy"),
    "searcher.smaller_is_better": (False, {}, False),
    "searcher.source_checkpoint_uuid": ("/mnt/1", {}, "/mnt/1"),
    "searcher.source_trial_id": ("/mnt/2", {}, "/mnt/2"),
}
_SEARCH = {"name": "adaptive_asha", "metric": "loss", "max_trials": 4, "max_length": 100}
_ASHA = {**_SEARCH, "name": "asha", "num_rungs": 2}
for _name, _value in (
    ("bracket_rungs", [2, 1]),
    ("divisor", 3),
    ("max_concurrent_trials", 2),
    ("max_rungs", 3),
    ("max_trials", 9),
    ("mode", "aggressive"),
):
    USED[f"searcher.{_name}"] = (_value, {"searcher": _SEARCH}, _value)
USED["searcher.name"] = ("adaptive_asha", {"searcher": {**_SEARCH, "name": "random"}}, "adaptive_asha")
USED["searcher.num_rungs"] = (3, {"searcher": _ASHA}, 3)
_TIME = {"name": "adaptive_asha", "metric": "loss", "max_trials": 4, "max_time": 100, "time_metric": "epochs"}
USED["searcher.max_time"] = (50, {"searcher": _TIME}, 50)
USED["searcher.time_metric"] = ("batches", {"searcher": _TIME}, "batches")
_S3 = {"type": "s3", "bucket": "b", "access_key": "AKIA", "secret_key": "hush"}
_AZURE = {"type": "azure", "container": "c", "account_url": "https://me.blob.core.windows.net"}
_FS = {"type": "shared_fs", "host_path": "/mnt"}
for _name, _value, _storage in (
    ("type", "gcs", {"type": "s3", "bucket": "b"}),
    ("bucket", "results", _S3),
    ("prefix", "p", _S3),
    ("endpoint_url", "http://minio:9000", _S3),
    ("account_url", "https://you.blob.core.windows.net", _AZURE),
    ("container", "results", _AZURE),
    ("container_path", "/mnt/r", {"type": "directory", "container_path": "/mnt"}),
    ("host_path", "/mnt/r", _FS),
    ("storage_path", "r", _FS),
    ("save_experiment_best", 3, _FS),
    ("save_trial_best", 3, _FS),
    ("save_trial_latest", 3, _FS),
):
    USED[f"checkpoint_storage.{_name}"] = (_value, {"checkpoint_storage": _storage}, _value)
for _name, _storage in (
    ("access_key", _S3),
    ("secret_key", _S3),
    ("credential", _AZURE),
    ("connection_string", _AZURE),
):
    USED[f"checkpoint_storage.{_name}"] = ("key", {"checkpoint_storage": _storage}, ...)
#: Those that are read in other words.
IN_OTHER_WORDS: dict[str, tuple[Any, dict[str, Any], str, Any]] = {
    "resources.is_single_node": (True, {}, "resources.placement_strategy", "STRICT_PACK"),
    "resources.slots_per_trial": (0, {}, "resources.slot", "cpu"),
    "searcher.stop_once": (False, {"searcher": _ASHA}, "searcher.variant", "promotion"),
    "checkpoint_storage.checkpoint_path": ("r", {"checkpoint_storage": _FS}, "checkpoint_storage.storage_path", "r"),
}
_LENGTHS = {"searcher.max_length", "min_validation_period", "min_checkpoint_period"}


def test_the_values_below_are_of_all_that_is_used(generate: ModuleType) -> None:
    used = {path for path, (state, _) in generate.determined_fields().items() if state == "used"}
    assert used == {*USED, *IN_OTHER_WORDS, *_LENGTHS, "log_policies"}


@pytest.mark.parametrize("path", sorted(USED))
def test_what_is_used_is_taken_and_kept(path: str, caplog: pytest.LogCaptureFixture) -> None:
    value, beside, meant = USED[path]
    config = load_config(with_field(path, value, **beside))
    found = read(config, path)
    assert found == meant if meant is not ... else found.get_secret_value() == value
    assert found != read(load_config(with_field("max_restarts", 5, **beside)), path), "it changes something"
    assert caplog.messages == []


@pytest.mark.parametrize("path", sorted(IN_OTHER_WORDS))
def test_older_words_mean_those_of_today(path: str) -> None:
    value, beside, now, meant = IN_OTHER_WORDS[path]
    config = load_config(with_field(path, value, **beside))
    assert read(config, now) == meant
    assert load_config(config.to_dict()) == config


@pytest.mark.parametrize("path", sorted(_LENGTHS))
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"batches": 100}, "100 batches"),
        ({"epochs": 2}, "2 epochs"),
        ({"records": 9}, "9 records"),
    ],
)
def test_lengths_are_taken_in_every_unit(path: str, written: Any, meant: str) -> None:
    assert str(read(load_config(with_field(path, written)), path)) == meant


def test_a_number_alone_counts_batches_as_max_length() -> None:
    assert str(load_config(with_field("searcher.max_length", 100)).searcher.max_length) == "100 batches"


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
    "written",
    [
        [""],
        ["A c4n4ry"],
        ["A: c4n4ry"],
        ["=c4n4ry"],
        [["A", "c4n4ry"]],
        "A=c4n4ry",
        {"A": ["c4n4ry"]},
        {"A": True},
        {"A=c4n4ry": 1},
        {1: "c4n4ry"},
    ],
)
def test_an_invalid_environment_is_reported_without_its_values(written: Any) -> None:
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
        ({"pattern": "a", "action": {"signal": "bad"}}, ["signal"]),
        (
            {"pattern": "a", "actions": ["exclude_node", {"signal": "bad"}, "cancel_retries"]},
            ["exclude_node", "signal", "cancel_retries"],
        ),
        ({"pattern": "a", "policy": {"type": "on_failure_dont_retry"}}, ["cancel_retries"]),
        ({"pattern": "a", "policy": {"type": "send_webhook", "webhook_name": "w"}}, ["send_webhook"]),
        ({"pattern": "a", "signal": "bad"}, ["signal"]),
        ({"name": "OOM", "pattern": "a", "action": None}, ["signal"]),
        ({"name": "OOM", "pattern": None}, []),
        ({"name": "OOM"}, []),
    ],
)
def test_log_policies_of_every_version(policy: dict[str, Any], asked: list[str]) -> None:
    assert actions(policy) == asked
    raw = with_field("log_policies", [policy])
    assert [path for path, _ in ignored_fields(raw)] == [
        f"log_policies.{action}" for action in asked if action != "cancel_retries"
    ]
    kept = load_config(raw).log_policies
    assert [(each.pattern, each.action) for each in kept] == [("a", "cancel_retries")] * ("cancel_retries" in asked)


def test_time_in_batches_or_epochs_is_a_length_that_needs_no_metric() -> None:
    config = load_config(with_field("searcher", {**_TIME, "max_time": 16}))
    assert (str(config.searcher.counted_length), config.searcher.counted_by) == ("16 epochs", None)
    config = load_config(
        with_field("searcher", {**_TIME, "time_metric": "seconds"}, min_validation_period={"epochs": 1})
    )
    assert (config.searcher.counted_length, config.searcher.counted_by) == (None, "seconds")
