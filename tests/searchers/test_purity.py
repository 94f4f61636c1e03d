"""`searchers` is pure: it imports neither torch, ray, optuna, dray nor numpy, and is imported quickly."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import searchers

PACKAGE = Path(searchers.__file__).parent
NUMERICAL = {
    "acquisition.py",
    "beliefs.py",
    "like.py",
    "memory_model.py",
    "multi_fidelity.py",
    "outlook.py",
    "pb2.py",
    "rung_process.py",
    "rung_results.py",
    "unit_cube.py",
    "untried.py",
}
ADAPTERS = {"ray_tune.py", "tune.py", "optuna_sampler.py", "optuna_space.py", "optuna_trials.py"}


def test_all_modules_but_adapters_and_the_model_import_only_the_standard_library() -> None:
    others = ADAPTERS | NUMERICAL | {"__init__.py"}
    modules = sorted(path.stem for path in PACKAGE.glob("*.py") if path.name not in others)
    assert "asha" in modules
    code = f"""
import sys
before = set(sys.modules)
import searchers
for module in {modules}:
    __import__("searchers." + module)
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(name for name in loaded if name not in sys.stdlib_module_names))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent, timeout=30
    )
    assert done.stdout.split() == ["searchers"]


def test_no_private_name_of_optuna_is_used() -> None:
    for path in PACKAGE.glob("optuna_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optuna"):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]  # type: ignore[union-attr]
            elif isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id == "self"
                names = [] if own else [node.attr]
            else:
                continue
            assert not [name for name in names if name.startswith("_")], f"{path.name}:{node.lineno}"


def test_every_public_name_exists() -> None:
    assert [name for name in searchers.__all__ if not hasattr(searchers, name)] == []
