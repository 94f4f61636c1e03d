"""What a config may say, what it then means, and that all faults are reported at once, each with its path."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dray.config.length import Length
from dray.config.load import load_config
from dray.config.rules import beyond_sandbox
from dray.config.schema import ExperimentConfig, Isolation
from dray.config.search import build_method
from dray.config.searcher import ASHASearcher
from dray.errors import ConfigError
from dray.training.units import Batch, Epoch, Records
from tests.config.configs import ASHA_CONFIG, changed, faults


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


# ------------------------------------------------------------------------------------------------- what is accepted


def test_fields_have_determineds_defaults() -> None:
    config = load_config({"searcher": {"name": "single", "metric": "loss", "max_length": 100}})
    assert config.name == "experiment"
    assert config.searcher.smaller_is_better is True
    halving = load_config(changed(searcher__divisor=None)).searcher
    assert isinstance(halving, ASHASearcher)
    assert (halving.max_concurrent_trials, halving.divisor) == (16, 4)
    assert (config.resources.slots_per_trial, config.resources.slot, config.resources.cpus_per_slot) == (1, None, 1)
    assert (config.max_restarts, config.checkpoint_policy, config.checkpoint_storage.location) == (5, "best", None)
    assert (config.resources.reuse_workers, config.hang_timeout_s) == (True, 7200)
    assert config.min_validation_period is None
    assert config.min_checkpoint_period is None
    assert (config.hyperparameters, config.data, config.labels) == ({}, {}, [])


@pytest.mark.parametrize(
    ("written", "means", "unit"),
    [
        ({"batches": 500}, Length(unit="batches", value=500), Batch(500)),
        ({"epochs": 16}, Length(unit="epochs", value=16), Epoch(16)),
        ({"records": 64}, Length(unit="records", value=64), Records(64)),
        (500, Length(unit="batches", value=500), Batch(500)),
    ],
)
def test_length_is_batches_epochs_or_records(written: Any, means: Length, unit: Any) -> None:
    length = load_config(changed(searcher__max_length=written)).searcher.max_length
    assert length == means
    assert length.to_unit() == unit


def test_null_field_has_its_default() -> None:
    config = load_config(changed(resources=None, max_restarts=None, searcher__max_concurrent_trials=None))
    assert (config.resources.slots_per_trial, config.max_restarts) == (1, 5)
    assert config.searcher.max_concurrent_trials == 16


def test_null_stays_a_value_among_hyperparameters_and_data() -> None:
    config = load_config(changed(hyperparameters__scheduler=None, data={"cache": None}))
    assert config.to_dict()["hyperparameters"]["scheduler"] is None
    assert load_config(config.to_dict()) == config


@pytest.mark.parametrize("path", sorted(Path("examples/digits").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_was_written_is_enough_for_the_same_config(path: Path) -> None:
    config = load_config(path)
    written = config.written()
    assert load_config(yaml.safe_load(yaml.safe_dump(written))) == config
    assert "max_restarts" not in written


def test_missing_seed_is_drawn_and_recorded() -> None:
    first, second = (load_config(changed(reproducibility=...)) for _ in range(2))
    assert first.reproducibility.experiment_seed != second.reproducibility.experiment_seed
    assert load_config(first.to_dict()) == first


def test_missing_name_is_that_of_the_file_or_of_the_class(tmp_path: Path) -> None:
    unnamed = changed(name=...)
    assert load_config(unnamed).name == "DigitsTrial"
    assert load_config(write(tmp_path, yaml.safe_dump(unnamed))).name == "config"


def test_scientific_notation_without_a_point_is_a_number(tmp_path: Path) -> None:
    text = "searcher: {name: single, metric: loss, max_length: 1}\nhyperparameters: {lr: 1e-3, wd: -2E+4, tag: 1e-3x}"
    config = load_config(write(tmp_path, text))
    assert config.hyperparameters == {"lr": 1e-3, "wd": -2e4, "tag": "1e-3x"}


def test_numpy_scalars_and_tuples_from_a_driver_become_plain() -> None:
    numpy = pytest.importorskip("numpy")
    config = load_config(changed(searcher__max_trials=numpy.int64(8), hyperparameters__sizes=(numpy.float32(0.5), 2)))
    assert config.searcher.max_trials == 8
    assert config.hyperparameters["sizes"] == [0.5, 2]
    yaml.safe_dump(config.to_dict())


def test_storage_is_a_directory_or_a_path_below_a_shared_one(tmp_path: Path) -> None:
    def path(storage: dict[str, Any]) -> Path:
        loaded = load_config(changed(checkpoint_storage=storage))
        assert load_config(loaded.to_dict()) == loaded
        assert loaded.checkpoint_storage.location is not None
        return loaded.checkpoint_storage.location.path

    assert path({"type": "directory", "container_path": "/mnt/a"}) == Path("/mnt/a")
    assert path({"type": "directory", "storage_path": tmp_path}) == tmp_path
    assert path({"type": "directory", "storage_path": "~/a"}) == Path.home() / "a"
    assert path({"type": "shared_fs", "host_path": "/mnt/a"}) == Path("/mnt/a")
    assert path({"type": "shared_fs", "host_path": "/mnt/a", "storage_path": "b"}) == Path("/mnt/a/b")
    assert path("/mnt/a") == path("file:///mnt/a") == path(Path("/mnt/a")) == Path("/mnt/a")


@pytest.mark.parametrize(
    ("storage", "uri"),
    [
        ("s3://bucket/results/", "s3://bucket/results"),
        ("s3://bucket?region=eu-west-1", "s3://bucket?region=eu-west-1"),
        ({"type": "uri", "storage_path": "az://container/results"}, "az://container/results"),
        ({"type": "s3", "bucket": "bucket", "prefix": "/a/b/"}, "s3://bucket/a/b"),
        (
            {"type": "s3", "bucket": "b", "endpoint_url": "http://minio:9000"},
            "s3://b?endpoint_override=minio%3A9000&scheme=http",
        ),
        ({"type": "gcs", "bucket": "bucket", "prefix": "a"}, "gs://bucket/a"),
        ({"type": "azure", "container": "c", "connection_string": "..."}, "az://c"),
        ({"type": "azure", "container": "c", "account_url": "https://me.blob.net"}, "az://c?account_name=me"),
    ],
)
def test_storage_is_an_object_store(storage: Any, uri: str) -> None:
    config = load_config(changed(checkpoint_storage=storage))
    assert str(config.checkpoint_storage.location) == uri
    assert str(load_config(config.to_dict()).checkpoint_storage.location) == uri


def test_config_is_frozen_picklable_and_passes_through() -> None:
    config = load_config(ASHA_CONFIG)
    assert pickle.loads(pickle.dumps(config)) == config
    assert load_config(config) is config
    with pytest.raises(ValueError, match="frozen"):
        config.name = "other"  # type: ignore[misc]


def test_loading_does_not_change_the_callers_mapping() -> None:
    mine = changed(name=...)
    before = copy.deepcopy(mine)
    load_config(mine).hyperparameters["lr"]["minval"] = -9
    assert mine == before


@pytest.mark.parametrize(
    ("entrypoint", "name"),
    [
        ("python3 scripts/train.py --epochs 1", "train"),
        (["python3", "-m", "package.train"], "package.train"),
        ("python3 -m determined.launch.torch_distributed --trial model_def:MyTrial", "MyTrial"),
    ],
)
def test_entrypoint_may_be_a_program(entrypoint: Any, name: str) -> None:
    config = load_config(changed(entrypoint=entrypoint, name=...))
    assert config.to_dict()["entrypoint"] == entrypoint
    assert config.name == name
    assert load_config(config.to_dict()) == config


@pytest.mark.api("8.3b")
@pytest.mark.parametrize("searcher", [{"name": "single"}, {"name": "random", "max_trials": 3}])
def test_search_of_a_program_may_leave_the_length_to_fit(searcher: dict[str, Any]) -> None:
    searcher = {**searcher, "metric": "loss"}
    config = load_config({"entrypoint": "python3 train.py", "searcher": searcher})
    assert config.searcher.max_length is None
    assert build_method(config).rungs == ()
    with pytest.raises(ConfigError, match=r"searcher\.max_length: missing required field"):
        load_config({"entrypoint": "model_def:MyTrial", "searcher": searcher})


# -------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "path", "what"),
    [
        ({"searcher__max_trails": 3}, "searcher.max_trails", "unknown field; did you mean max_trials?"),
        ({"max_trials": 3}, "max_trials", "unknown field here; move it to searcher.max_trials"),
        ({"workspaces": "w"}, "workspaces", "unknown field; did you mean workspace?"),
        ({"shm_size": "4G"}, "shm_size", "unknown field here; move it to resources.shm_size"),
        ({"environment": {"imag": "a"}}, "environment.imag", "unknown field; did you mean image?"),
        ({"batches_per_step": 5}, "batches_per_step", "Determined removed steps; write scheduling_unit"),
        ({"searcher__budget": {"epochs": 9}}, "searcher.budget", "use max_trials of adaptive_asha or asha"),
        (
            {"searcher__population_size": 8},
            "searcher.population_size",
            "Determined's pbt had other fields; write population",
        ),
        ({"searcher__replace_function": {}}, "searcher.replace_function", "write quantile, its truncate_fraction"),
        ({"zzz": 1}, "zzz", "unknown field; known fields are budget, checkpoint_format"),
        ({"searcher": ...}, "searcher", "missing required field"),
        ({"searcher__metric": ...}, "searcher.metric", "missing required field"),
        ({"searcher__max_length": ...}, "searcher.max_length", "missing required field"),
        ({"searcher__divisor": 1}, "searcher.divisor", "must be > 1, got 1"),
        ({"searcher__divisor": float("nan")}, "searcher.divisor", "got nan"),
        ({"searcher__max_trials": "64"}, "searcher.max_trials", "must be an integer, got '64' (a string)"),
        ({"searcher__max_trials": True}, "searcher.max_trials", "must be an integer, got True (a boolean)"),
        ({"searcher__name": "asa"}, "searcher.name", "did you mean asha?"),
        ({"searcher__name": "single"}, "searcher.max_trials", "single has no such field; remove it"),
        ({"searcher__name": "random"}, "searcher.divisor", "use name: asha"),
        ({"searcher__max_length": {"epoch": 1}}, "searcher.max_length", "did you mean epochs?"),
        ({"searcher__max_length": {"epochs": 1, "batches": 2}}, "searcher.max_length", "exactly one of"),
        ({"searcher__max_length": {"epochs": 0}}, "searcher.max_length", "must be at least 1, got 0 epochs"),
        ({"searcher__max_length": {"epochs": 1.5}}, "searcher.max_length", "must be a whole number"),
        ({"resources": {"slots_per_trial": 4, "mesh": {"tp": 3}}}, "resources.mesh", "tp 3 does not divide the tr"),
        (
            {"resources": {"slots_per_trial": 4, "mesh": {"tp": 2, "dp_replicate": 4}}},
            "resources.mesh",
            "tp 2 * dp_replicate 4 does not divide the trial's 4 slot(s); change the number of slots, or the mesh",
        ),
        ({"resources": {"slots_per_trial": 4, "mesh": {"cp": 0}}}, "resources.mesh.cp", "must be >= 1, got 0"),
        ({"resources": {"slots_per_trial": 4, "mesh": {"c p": 2}}}, "resources.mesh", "must be an identifier"),
        ({"resources": {"slots_per_trial": 0.5, "mesh": {"tp": 2}}}, "resources.mesh", "can't be given with a range"),
        ({"resources": {"slots_per_trial": 0, "slot": "gpu"}}, "resources.slots_per_trial", "must be >= 1, got 0"),
        (
            {"optimizations": {"mixed_precision": "O3"}},
            "optimizations.mixed_precision",
            "must be one of O0, O1, O2, float16, bfloat16,",
        ),
        ({"log_policies": {}}, "log_policies", "must be a list, got {} (a mapping)"),
        ({"log_policies": [{"action": "cancel_retries"}]}, "log_policies[0]", "must have a pattern; for example"),
        ({"log_policies": [{"pattern": "(", "action": "signal"}]}, "log_policies[0].pattern", "must be a regular"),
        ({"log_policies": [{"pattern": "a", "action": "stop"}]}, "log_policies[0]", "action must be one of"),
        (
            {"profiling": {"begin_on_batch": 20, "end_after_batch": 19}},
            "profiling.end_after_batch",
            "must be 20 (begin_on_batch) to 1019, as traces are held in memory, got 19",
        ),
        ({"resources__slots_per_trial": 128}, "hyperparameters.global_batch_size", "slots_per_trial (128)"),
        ({"checkpoint_storage": {"type": "s3"}}, "checkpoint_storage.bucket", "missing required field; the bucket"),
        ({"checkpoint_storage": {"type": "directory"}}, "checkpoint_storage", "exactly one of container_path and"),
        ({"checkpoint_storage": {"type": "shared_fs"}}, "checkpoint_storage.host_path", "missing required field"),
        ({"checkpoint_storage": {"host_path": "/a"}}, "checkpoint_storage.host_path", "needs type: shared_fs"),
        ({"checkpoint_storage": "s3://b?zone=1"}, "checkpoint_storage", "an unknown option 'zone'; known are region"),
        ({"checkpoint_storage": {"save_trial_best": -1}}, "checkpoint_storage.save_trial_best", "must be >= 0"),
        (
            {"checkpoint_storage": {"type": "s3", "bucket": "b", "access_key": "A"}},
            "checkpoint_storage.secret_key",
            "missing required field",
        ),
        (
            {"checkpoint_storage": {"type": "gcs", "bucket": "b", "host_path": "/a"}},
            "checkpoint_storage.host_path",
            "gcs has no such field; remove it, or use type: shared_fs",
        ),
        ({"searcher__max_length": ..., "entrypoint": "python3 train.py"}, "searcher.max_length", "missing required fi"),
        ({"labels": ["a", 3]}, "labels[1]", "must be a string, got 3"),
        ({"resources__slot_type": ["a100"]}, "resources.slot_type[0]", "; did you mean A100?"),
        ({"resources__slot_type": ["L4", "K80"]}, "resources.slot_type[1]", "no trial can run on a GPU of type K80"),
    ],
)
def test_a_fault_has_its_path(change: dict[str, Any], path: str, what: str) -> None:
    found = faults(changed(**change))
    assert what in found[path]


def test_all_faults_are_reported_at_once() -> None:
    lr = {"type": "log", "base": 10, "minval": -4, "maxval": -5}
    broken = changed(searcher__divisor=1, searcher__metric=..., searcher__max_trails=3, searcher__num_rungs=...)
    broken = changed(broken, max_restarts="5", resources__slots_per_trial=128, hyperparameters__lr=lr)
    assert set(faults(broken)) == {
        *("searcher.divisor", "searcher.metric", "searcher.max_trails", "searcher.num_rungs", "max_restarts"),
        *("hyperparameters.global_batch_size", "hyperparameters.lr.minval"),
    }


@pytest.mark.parametrize(
    ("batch_size", "fits"),
    [
        (4, True),
        (3, False),
        ({"type": "const", "val": 3}, False),
        ({"type": "int", "minval": 3, "maxval": 64}, False),
        ({"type": "int", "minval": 4, "maxval": 64}, True),
        ({"type": "categorical", "vals": [64, 2]}, False),
        ({"type": "categorical", "vals": [64, "32"]}, False),
        ({"type": "log", "base": 2, "minval": 3, "maxval": 6}, False),
        ("64", False),
        (64.0, False),
    ],
)
def test_each_possible_batch_gives_every_slot_a_record(batch_size: Any, fits: bool) -> None:
    config = changed(hyperparameters__global_batch_size=batch_size, resources__slots_per_trial=4)
    if fits:
        load_config(config)
    else:
        assert set(faults(config)) == {"hyperparameters.global_batch_size"}


def elastic(**changes: Any) -> dict[str, Any]:
    """A config of one trial on 1 to 6 slots."""
    return {
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 2}},
        "hyperparameters": {"global_batch_size": 12},
        "resources": {"slots_per_trial": {"min": 1, "max": 6}},
        **changes,
    }


RANDOM = {"name": "random", "metric": "loss", "max_length": {"batches": 2}, "max_trials": 3}


def test_trial_has_as_many_slots_as_divide_its_batch() -> None:
    config = load_config(elastic())
    assert config.slots_per_trial == (1, 2, 3, 4, 6)
    assert load_config(config.to_dict()) == config
    assert config.to_dict()["resources"]["slots_per_trial"] == {"min": 1, "max": 6}
    few = load_config(elastic(resources={"slots_per_trial": {"min": 1, "max": 6}, "max_slots": 3}))
    assert few.slots_per_trial == (1, 2, 3)
    const = load_config(elastic(hyperparameters={"global_batch_size": {"type": "const", "val": 9}}))
    assert const.slots_per_trial == (1, 3)
    assert load_config(elastic(searcher={**RANDOM, "max_concurrent_trials": 1})).slots_per_trial == (1, 2, 3, 4, 6)
    assert load_config(elastic(resources={"slots_per_trial": 5})).slots_per_trial == (5,)


def slots(least: int, most: int, **resources: Any) -> dict[str, Any]:
    return {"resources": {"slots_per_trial": {"min": least, "max": most}, **resources}}


SLOTS, BATCH = "resources.slots_per_trial", "hyperparameters.global_batch_size"
CUSTOM = {"name": "a:B", "metric": "loss", "max_length": {"batches": 2}}
EVEN = {"type": "int", "minval": 8, "maxval": 16}


@pytest.mark.parametrize(
    ("change", "path", "what"),
    [
        ({"searcher": RANDOM}, SLOTS, "set searcher.max_concurrent_trials: 1, or give one"),
        ({"searcher": CUSTOM}, SLOTS, "use searcher.name: single, or give one number, such as 1"),
        (slots(4, 2), SLOTS, "got 4 and 2"),
        (slots(1, 6, placement_strategy="STRICT_PACK"), "resources.placement_strategy", "can't be STRICT_PACK with a"),
        ({"hyperparameters": {}}, BATCH, "required with a range of slots"),
        ({"hyperparameters": {"global_batch_size": EVEN}}, BATCH, "must be a constant with a range of slots"),
        (slots(5, 9, max_slots=5), BATCH, f"must be divisible by a number of slots from 5 to 5 ({SLOTS}), got 12"),
        (slots(3, 9, max_slots=2), "resources.max_slots", "must be at least slots_per_trial (3), or no trial can run"),
        (slots(7, 11), BATCH, f"must be divisible by a number of slots from 7 to 11 ({SLOTS}), got 12"),
    ],
)
def test_an_impossible_range_of_slots_is_refused(change: dict[str, Any], path: str, what: str) -> None:
    [(found, message)] = faults(elastic(**change)).items()
    assert found == path
    assert what in message


@pytest.mark.parametrize(
    ("written", "trials"),
    [("0.5", 2), ("0.25", 4), ("0.33", 3), ("0.3333", 3), ("0.3333333333333333", 3), ("0.125", 8), ("0.02", 50)],
)
def test_n_trials_share_a_slot(written: str, trials: int) -> None:
    config = changed(resources__slots_per_trial=float(written))
    loaded = load_config(config)
    assert loaded.resources.slots_per_trial == 1 / trials
    assert loaded.resources.trials_per_slot == trials
    assert loaded.resources.share == f"1/{trials} slot"
    assert loaded.slots_per_trial == (1,), "each is one process"
    assert load_config(yaml.safe_load(yaml.safe_dump(loaded.to_dict()))) == loaded


@pytest.mark.parametrize(
    ("slots", "what"),
    [
        (0.4, "0.25, ..., 0.02), got 0.4"),
        (1.5, "got 1.5"),
        ("1/4", "must be a number, got '1/4' (a string)"),
        (float("nan"), "must be a finite number, got nan"),
        (1.0, "must be an integer, got 1.0"),
    ],
)
def test_other_parts_of_slots_are_refused(slots: Any, what: str) -> None:
    [(path, message)] = faults(changed(resources__slots_per_trial=slots)).items()
    assert path == "resources.slots_per_trial"
    assert what in message


def test_an_elastic_trial_has_whole_slots() -> None:
    found = faults(elastic(resources={"slots_per_trial": {"min": 0.5, "max": 6}}))
    assert found == {"resources.slots_per_trial.min": "must be an integer, got 0.5; for example min: 1"}


@pytest.mark.parametrize(
    ("text", "path", "what"),
    [
        ("searcher:\n  name: asha\n  metric: a: b\n", "line 3, column 12", "not valid YAML"),
        ("searcher:\n  name: asha\nsearcher: {}\n", "line 3, column 1", "the field 'searcher' is given twice"),
        ("a: !!python/object/apply:os.system ['true']", "line 1, column 4", "not valid YAML"),
        ("- a\n", "config", "must be a mapping of fields to values"),
        ("", "config", "got an empty file"),
    ],
)
def test_invalid_yaml_is_reported_with_its_line(tmp_path: Path, text: str, path: str, what: str) -> None:
    assert what in faults(write(tmp_path, text))[path]


def test_an_unreadable_file_is_a_fault(tmp_path: Path) -> None:
    assert "no such file" in faults(tmp_path / "none.yaml")["config"]
    assert "is a directory" in faults(tmp_path)["config"]
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    assert "UTF-8" in faults(tmp_path / "latin.yaml")["config"]


def test_message_names_the_file_and_has_a_line_for_each_fault(tmp_path: Path) -> None:
    file = write(tmp_path, yaml.safe_dump(changed(searcher__divisor=1, searcher__max_trails=3)))
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    header, *lines = str(caught.value).splitlines()
    assert header == f"{file} has 2 errors:"
    assert lines == [
        "  searcher.divisor: must be > 1, got 1; for example divisor: 4",
        "  searcher.max_trails: unknown field; did you mean max_trials?",
    ]


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
_FIELD = st.sampled_from([*ExperimentConfig.model_fields, "searcher__name", "searcher__max_length", "resources__slot"])


@given(field=_FIELD, value=_ANYTHING)
def test_no_value_of_any_field_raises_anything_but_config_error(field: str, value: Any) -> None:
    config = changed(**{field: value})
    try:
        loaded = load_config(config)
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - either outcome is right, no third one is
    else:
        assert load_config(loaded.to_dict()) == loaded
        assert build_method(loaded).start()


def test_faults_of_credentials_do_not_show_them() -> None:
    storage = {"type": "s3", "bucket": 1, "access_key": 12345, "secret_key": ["S3C"]}
    told = str(faults(changed(checkpoint_storage=storage)))
    assert "12345" not in told
    assert "S3C" not in told


SEARCHER = {"name": "random", "metric": "loss", "max_length": {"batches": 1}, "max_trials": 1}


def config(**fields: Any) -> ExperimentConfig:
    return load_config({"entrypoint": "model_def:Trial", "searcher": SEARCHER, "isolation": "sandbox", **fields})


@pytest.mark.parametrize("given", ["sandbox", {"name": "sandbox"}, {"name": "sandbox", "read": ["/data/../data/a"]}])
def test_a_name_alone_is_short_for_the_section(given: Any) -> None:
    found = config(isolation=given)
    assert found.isolation.is_sandbox
    assert found.isolation.read == (["/data/a"] if "read" in given else [])
    assert load_config(found.to_dict()).isolation == found.isolation
    assert config(isolation=None).isolation == Isolation()
    assert not Isolation().is_sandbox


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"resources": {"slots_per_trial": 2}}, "isolation: sandbox needs resources.slots_per_trial: 1, got 2"),
        ({"resources": {"slots_per_trial": 0.5}}, "isolation: sandbox needs resources.slots_per_trial: 1, got 0.5"),
        ({"searcher": {**SEARCHER, "name": "my:Method"}}, "searcher.name: can't be my:Method with isolation: sandbox"),
        ({"searcher": {**SEARCHER, "sampler": "my:Own"}}, "searcher.sampler.name: can't be my:Own with isolation"),
        ({"notify": {"command": "id"}}, "notify.command: can't be given with isolation: sandbox"),
        ({"isolation": {"read": ["/data"]}}, "isolation.read: has no effect without name: sandbox"),
        ({"isolation": {"name": "sandbox", "read": ["data"]}}, "must be an absolute path"),
        ({"isolation": {"name": "sandbox", "read": ["/data/.."]}}, "can't be /, of which each sandbox has its own"),
        ({"isolation": "jail"}, "isolation.name: must be one of none, sandbox, got 'jail'"),
    ],
)
def test_what_a_sandbox_cant_have_is_reported(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**fields)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"isolation": "none"}, ["isolation"]),
        ({"isolation": {"name": "sandbox", "read": ["/root"]}}, ["isolation.read"]),
        ({"searcher": {**SEARCHER, "source_checkpoint_uuid": "/root/.ssh"}}, ["searcher.source_checkpoint_uuid"]),
        ({"checkpoint_storage": {"type": "directory", "container_path": "/etc"}}, ["checkpoint_storage"]),
        ({"notify": {"url": "http://10.0.0.1/"}, "loggers": ["mlflow"]}, ["notify.url", "loggers.mlflow"]),
    ],
)
def test_what_a_config_reaches_beyond_its_sandboxes_is_found(fields: dict[str, Any], names: list[str]) -> None:
    assert [fault.path for fault in beyond_sandbox(config(**fields))] == names
