"""``dray migrate check``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cli.said import Said

Dray = Callable[..., Said]

CONFIG = """\
entrypoint: model_def:Digits
searcher: {name: single, metric: loss, max_length: {batches: 1}}
hyperparameters: {global_batch_size: 1}
"""
MODEL = """\
from determined import pytorch
class Digits(pytorch.PyTorchTrial):
    pass
"""


def model(directory: Path, code: str = MODEL) -> Path:
    directory.mkdir()
    (directory / "const.yaml").write_text(CONFIG)
    (directory / "model_def.py").write_text(code)
    return directory


def test_what_runs_as_it_is_ends_with_0(home: Path, dray: Dray) -> None:
    said = dray("migrate", "check", model(Path("digits")))
    assert said.code == 0
    assert said.out.splitlines() == [
        "const.yaml: runs: dray experiment create const.yaml .",
        "model_def.py: runs: 2 supported uses of Determined's API",
        "0 to change, 0 to look at, 0 ignored: runs unchanged",
    ]


def test_what_must_be_changed_ends_with_1(home: Path, dray: Dray) -> None:
    said = dray("migrate", "check", model(Path("digits"), MODEL + "from determined import keras\nkeras.init()\n"))
    assert said.code == 1
    blocked, change, *_, summary = said.out.splitlines()
    assert blocked == "const.yaml: blocked: change model_def.py first; then: dray experiment create const.yaml ."
    assert change.startswith("model_def.py:5: change: determined.keras.init: dray has no Keras")
    assert summary == "1 to change, 0 to look at, 0 ignored; the rest runs unchanged"


def test_what_many_lines_need_is_said_once(home: Path, dray: Dray) -> None:
    code = (
        "from determined.pytorch import deepspeed\n"
        + "deepspeed.init()\ndeepspeed.Trainer()\n" * 23
        + "class Digits: ...\n"
    )
    said = dray("migrate", "check", model(Path("digits"), code))
    [once] = [line for line in said.out.splitlines() if "DeepSpeed" in line]
    assert once.startswith("model_def.py:2: change: determined.pytorch.deepspeed.init: dray has no DeepSpeed: write a ")
    assert once.endswith("; also model_def.py:3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 33 more")
    assert said.out.splitlines()[-1].startswith("46 to change")
    listed = json.loads(dray("migrate", "check", "digits", "--json").out)
    changes = [each for each in listed["findings"] if each["line"]]
    assert [each["line"] for each in changes] == list(range(2, 48))


def test_for_a_program_it_is_json(home: Path, dray: Dray) -> None:
    found = dray("migrate", "check", model(Path("digits")), "--json").value
    assert found == {
        "directory": "digits",
        "runs": True,
        "experiments": ["const.yaml"],
        "findings": [
            {"file": "const.yaml", "line": 0, "verdict": "runs", "what": "dray experiment create const.yaml ."},
            {
                "file": "model_def.py",
                "line": 0,
                "verdict": "runs",
                "what": "2 supported uses of Determined's API",
            },
        ],
    }


def test_bad_uses_are_one_line(home: Path, dray: Dray) -> None:
    assert "DIR must be a directory with a model's code" in dray("migrate", "check", "nowhere").is_one_line()
    assert "DIR must be a directory" in dray("migrate", "check", model(Path("digits")) / "const.yaml").is_one_line()
    Path("empty").mkdir()
    assert "nothing in empty uses Determined" in dray("migrate", "check", "empty").is_one_line()


def test_it_imports_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from dray.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "finally:\n"
        "    print([name for name in ('torch', 'ray', 'determined', 'model_def') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "migrate", "check", str(model(tmp_path / "digits"))],
        capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
