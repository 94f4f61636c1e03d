"""``dray migrate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.said import Said

Dray = Callable[..., Said]

CONFIG = """\
entrypoint: model_def:Digits
workspace: vision
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


def test_ignored_fields_do_not_fail_it(home: Path, dray: Dray) -> None:
    said = dray("migrate", model(Path("digits")))
    assert said.code == 0
    ignored, summary = said.out.splitlines()
    assert ignored.startswith("const.yaml:2: ignored: workspace: for Determined's web UI")
    assert summary == "checked 1 Python file and 1 experiment config: 0 to change, 1 ignored"


def test_an_unsupported_name_fails_it(home: Path, dray: Dray) -> None:
    said = dray("migrate", model(Path("digits"), MODEL + "from determined import keras\nkeras.init()\n"))
    assert said.code == 1
    _, change, summary = said.out.splitlines()
    assert change.startswith("model_def.py:5: change: determined.keras.init: dray has no Keras")
    assert summary == "checked 1 Python file and 1 experiment config: 1 to change, 1 ignored"


def test_json_has_every_finding(home: Path, dray: Dray) -> None:
    found = dray("migrate", model(Path("digits")), "--json").value
    [finding] = found.pop("findings")
    assert found == {"directory": "digits", "runs": True, "experiments": ["const.yaml"]}
    assert (finding["file"], finding["line"], finding["verdict"]) == ("const.yaml", 2, "ignored")


def test_bad_uses_are_one_line(home: Path, dray: Dray) -> None:
    assert "DIR must be a directory with a model's code" in dray("migrate", "nowhere").is_one_line()
    assert "DIR must be a directory" in dray("migrate", model(Path("digits")) / "const.yaml").is_one_line()
