"""Whatever could run code that stands in a file, or in a message, is named here, with the reason why it may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.config.yaml_file import read_mapping
from dray.errors import ConfigError
from tests.sources import nodes

MODULES = (
    "pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch",
    "np",
    "numpy",
    "yaml",
    "pd",
    "pandas",
)
READ = ("load", "loads", "load_all", "unsafe_load", "full_load", "open", "read_pickle", "Unpickler")
BY_ITSELF = {"eval", "exec", "Unpickler"}

ALLOWED = {
    # Read as data; what is no number, text, list or mapping is refused.
    ("dray/config/yaml_file.py", "yaml.load"): "a subclass of SafeLoader, tested below",
    (
        "dray/training/checkpoint/plain_state.py",
        "torch.load",
    ): "weights_only, unless the caller of the API says otherwise",
    (
        "dray/training/checkpoint/determined.py",
        "pickle.Unpickler",
    ): "of Determined's checkpoints, refuses whatever names a function",
    ("dray/training/pretrained.py", "torch.load"): "weights_only, of a file that a rank of the trial has just written",
    ("dray/exact/parting.py", "torch.load"): "weights_only, of a file that a trial has just written on this machine",
    # Never in a file.
    ("dray/training/checkpoint/snapshot.py", "pickle.Unpickler"): "copies a state in memory",
    ("dray/code/factory.py", "pickle.loads"): "the class of a driver's script, from the driver, by way of Ray",
    ("searchers/ray_tune.py", "pickle.loads"): "the function that fetches results, from the driver, by way of Tune",
    ("dray/worker/lease_loop.py", "pickle.loads"): "what trials run with, from their driver, which has proved the key",
    ("dray/worker/sandbox_child.py", "pickle.load"): "what a trial in a sandbox runs with, from its worker",
    ("dray/training/parallel/transport.py", "pickle.loads"): "what the ranks of a trial tell one another",
    # The user's own code.
    ("dray/script.py", "exec"): "runs the program that is the config's entrypoint",
}


def uses(file: list[ast.AST]) -> Iterator[str]:
    """What a file names that could run code."""
    for node in file:
        if isinstance(node, ast.Attribute) and node.attr in READ:
            owner = ast.unparse(node.value)
            if owner.rpartition(".")[2] in MODULES:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in BY_ITSELF:
            yield node.id
        elif isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] in MODULES:
            yield from (f"{node.module}.{each.name}" for each in node.names if each.name in READ)


def test_all_of_it_is_known() -> None:
    assert {(name, use) for name, file in nodes().items() for use in uses(file)} == set(ALLOWED)


def test_yaml_is_read_as_data(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    text = f"name: !!python/object/apply:pathlib.Path.touch [{ran}]\n"
    file = tmp_path / "config.yaml"
    file.write_text(f"{text}made: !!python/object/apply:os.mkdir [{ran}]\n")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        read_mapping(file)
    assert not ran.exists()
