"""A config that is broken on purpose, or by a program, ends in one short error, in little time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dray.config.faults import SECTIONS
from dray.config.load import load_config
from dray.config.schema import MAX_NAME
from dray.config.yaml_file import MAX_DEPTH
from dray.errors import ConfigError
from dray.records.directory import ExperimentDirectory, new_path

BASE = "entrypoint: m:T\nsearcher: {name: single, metric: loss, max_length: {epochs: 1}}\n"
MEMORY = 500 * 2**20


def laughs(first: str, each: str) -> str:
    lines = [f"  a0: &a0 {first}"]
    lines += [f"  a{n}: &a{n} {each % ', '.join([f'*a{n - 1}'] * 10)}" for n in range(1, 10)]
    return BASE + "data:\n" + "\n".join(lines)


def many(count: int) -> str:
    return "{" + ", ".join(f"key_{n}: 1" for n in range(count)) + "}"


HOSTILE = {
    "billion laughs": (laughs("[lol, lol]", "[%s]"), "data: has more than 100,000 values"),
    "billion merges": (
        laughs("{x: 1}", "{<<: [%s]}"),
        "line 10, column 7: not valid YAML: has more than 100,000 values",
    ),
    "anchor in itself": (BASE + "data: &d {x: *d}\n", "data: is nested more than 100 levels deep, or contains itself"),
    "deep lists": (
        BASE + "data: " + "[" * 5000 + "]" * 5000,
        "line 3, column 107: not valid YAML: is nested more",
    ),
    "deep blocks": (
        BASE + "data:\n" + "\n".join(f"{' ' * n}- a:" for n in range(2, 900, 2)),
        "more than 100 levels deep",
    ),
    "deep keys": (BASE + "? " * 3000 + "x\n", "is nested more than 100 levels deep"),
    "many values": (BASE + "data: [" + "1," * 400_000 + "]\n", "has more than 100,000 values"),
    "a grid of 10**12 points": (
        BASE.replace("single", "grid")
        + "hyperparameters:\n"
        + "".join(f"  {x}: {{type: int, minval: 0, maxval: 1000000, count: 1000000}}\n" for x in "ab"),
        "hyperparameters: the grid has 1,000,000,000,000 points, and may have 10,000; use fewer values",
    ),
    "a fine grid": (
        BASE.replace("single", "grid") + "hyperparameters: {x: {type: double, minval: 0, maxval: 1, step: 1.0e-300}}\n",
        "hyperparameters: the grid has more than 10**18 points",
    ),
    "long name": (f"{BASE}name: {'n' * 100_000}\n", "name: must have at most 200 characters, got 100000"),
    "longer value": (
        f"{BASE}description: {'k' * 100_001}\n",
        "must be text of at most 100,000 characters, got 100,001",
    ),
    "unknown keys": (BASE + "".join(f"key_{n}: 1\n" for n in range(5_000)), "... and 4,980 more"),
    "unknown keys of a space": (
        f"{BASE}hyperparameters: {{x: {{type: int, {many(500)[1:]}}}\n",
        "has 502 errors:\n  hyperparameters.x.key_0: is not a field of type int\n",
    ),
    "long number": (f"{BASE}max_restarts: 1{'0' * 10_000}\n", "000 is not a valid int"),
    "hours": (f"{BASE}max_restarts: 1{':00' * 20_000}\n", "is not a valid int"),
    "no character": (f'{BASE}description: "\\UFFFFFFFF"\n', "not valid YAML"),
    "no bool": (f"{BASE}data: {{x: !!bool 5}}\n", "not valid YAML: '5' is not a valid bool"),
    "half a character": (
        f'{BASE}name: "a\\ud800b"\n',
        "line 3, column 11: not valid YAML while parsing a quoted scalar: found invalid Unicode character",
    ),
    "NUL": (f'{BASE}checkpoint_storage: "a\\0b"\n', r"must be text without the character NUL, got 'a\x00b'"),
    "two lines": (f'{BASE}name: "a\\nb"\n', r"name: must be one line of printable characters, got 'a\nb'"),
    "a key twice": (f"{BASE}name: a\nname: b\n", "line 4, column 1: not valid YAML: the field 'name' is given twice"),
}

LOADED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 * 2**30, 2 * 2**30))
from dray.config.load import load_config
from dray.errors import ConfigError
errors = {}
for path in sys.argv[1:]:
    try:
        load_config(path)
        errors[path] = "none"
    except ConfigError as error:
        errors[path] = str(error)
    except BaseException as error:
        errors[path] = repr(error)[:200]
# Not ru_maxrss, which begins with that of the process that this one was forked from.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")]
print(json.dumps([errors, int(peak) * 1024]))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, str], int]:
    """The error of each hostile file, and the memory that reading all of them took."""
    directory = tmp_path_factory.mktemp("hostile")
    paths = {name: directory / f"{number}.yaml" for number, name in enumerate(HOSTILE)}
    for name, path in paths.items():
        path.write_text(HOSTILE[name][0])
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *map(str, paths.values())],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    errors, memory = json.loads(done.stdout)
    return {name: errors[str(path)] for name, path in paths.items()}, memory


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_in_one_short_error(name: str, loaded: tuple[Mapping[str, str], int]) -> None:
    error = loaded[0][name]
    assert HOSTILE[name][1] in error
    assert len(error) < 3000
    assert len(error.splitlines()) <= 22


@pytest.mark.slow
def test_hostile_files_take_little_memory(loaded: tuple[Mapping[str, str], int]) -> None:
    assert loaded[1] < MEMORY


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    lines = "data:\n  defaults: &d {a: 1, b: [1, 2]}\n  one: {<<: *d, c: 1}\n  two: {<<: *d, b: *e}\n"
    (tmp_path / "a.yaml").write_text(BASE + lines.replace("b: [1", "b: &e [1"))
    data = load_config(tmp_path / "a.yaml").data
    assert data["one"] == {"a": 1, "b": [1, 2], "c": 1}
    assert data["two"] == {"a": 1, "b": [1, 2]}


def test_a_file_that_is_no_config_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "weights.yaml").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ConfigError, match=r"1,073,741,824 bytes, too many for a config; at most 1,048,576 are read"):
        load_config(tmp_path / "weights.yaml")


# ----------------------------------------------------------------------------------------------------- from Python


def config(**fields: Any) -> dict[str, Any]:
    searcher = {"name": "adaptive_asha", "metric": "loss", "max_trials": 4, "max_length": {"epochs": 1}}
    return {"entrypoint": "m:T", "searcher": searcher, **fields}


def itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["x"] = [value]
    return value


def nested(depth: int) -> Any:
    return 1 if depth == 0 else {"x": nested(depth - 1)}


@pytest.mark.parametrize("section", ["data", "hyperparameters", "searcher", "name"])
def test_a_mapping_that_contains_itself_is_refused(section: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"error:\n  \S+: is nested more than {MAX_DEPTH} levels deep, or contains i"
    ):
        load_config(config(**{section: itself()}))


def test_deep_nesting_up_to_the_limit_is_taken() -> None:
    assert load_config(config(data=nested(MAX_DEPTH - 1))).data == nested(MAX_DEPTH - 1)
    with pytest.raises(ConfigError, match="is nested more than"):
        load_config(config(data=nested(MAX_DEPTH + 1)))


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"name: must be text, got 'a\\ud800b', which is not valid Unicode"):
        load_config(config(name="a\ud800b"))


@pytest.mark.parametrize(
    "value",
    [-(10**30), 16**5000, "k" * 200_000, {16**5000: 1}],
    ids=["small", "without digits", "text", "number as a key"],
)
def test_every_field_refuses_what_is_too_large_in_a_short_error(value: object) -> None:
    for place, section in SECTIONS.items():
        for field in section.model_fields:
            given: dict[str, Any] = config()
            inner = given
            for name in filter(None, place.split(".")):
                inner = inner.setdefault(name, {})
            inner[field] = value
            if isinstance(value, dict) and field in (
                "labels",
                "data",
                "hyperparameters",
                "options",
                "environment_variables",
            ):
                continue  # free mappings may have long names
            with pytest.raises(ConfigError) as error:
                load_config(given)
            assert len(str(error.value)) < 3000, (place, field)


# ----------------------------------------------------------------------------------------------------- directories


def test_the_longest_name_makes_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    long = load_config(config(name="\N{CJK UNIFIED IDEOGRAPH-8A13}" * MAX_NAME))
    ExperimentDirectory.create(new_path(long), long, None)
    assert len(list(tmp_path.iterdir())) == 1
