"""docs/batch-size.md: its program prints the measured sizes; `dray probe --json` has the fields of docs/json.md."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dray.experiment import probe
from tests.cli.conftest import dray, home, simulated_once  # noqa: F401 - fixtures
from tests.cli.said import Said
from tests.docs.pages import JSON, ROOT, blocks
from tests.docs.test_cli_page import fields
from tests.model_code import imports_undone


@pytest.fixture(autouse=True)
def project(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # noqa: F811
    """The digits example, on slots with memory for 200 records, which train ten batches per second."""
    code = tmp_path / "digits"
    shutil.copytree(ROOT / "examples" / "digits", code)
    monkeypatch.chdir(code)

    def train(job: Mapping[str, Any], slots: int, environment: Mapping[str, str | None]) -> dict[str, Any]:
        batch = job["hparams"]["global_batch_size"]
        if batch > 200 * slots:
            return {"kind": "oom", "error": "CUDA out of memory"}
        return {"kind": "trained", "records_per_second": 10.0 * batch, "has_all_data": False}

    monkeypatch.setattr(probe, "train_group", train)
    level = logging.root.level
    with imports_undone():
        yield code
    logging.root.setLevel(level)


def test_program(capsys: pytest.CaptureFixture[str]) -> None:
    [block] = blocks("python", page="batch-size.md")
    exec(block.text, {})
    *sizes, largest, suggestion = capsys.readouterr().out.splitlines()
    assert sizes[:3] == ["64 64 640.0", "128 128 1280.0", "192 192 1920.0"]
    assert {line.split()[-1] for line in sizes[3:]} == {"None"}
    assert (largest, suggestion) == ("192", "64 1")


def test_the_largest_batch_needs_the_most_aggregation_in_the_config(dray: Callable[..., Said]) -> None:  # noqa: F811
    changes = ("--config", "optimizations.aggregation_frequency=8", "--config", "resources.slots_per_trial=2")
    said = dray("probe", "asha.yaml", *changes)
    assert re.search(r"^largest that fits: 192 per slot$", said.out, flags=re.MULTILINE)
    # 2 slots with 128 records each, twice: the 512 records of the config. 192 does not divide them.
    assert "global_batch_size=256 --config optimizations.aggregation_frequency=2" in said.out


def test_fields_of_json_are_on_the_page(dray: Callable[..., Said]) -> None:  # noqa: F811
    assert fields(dray("probe", "asha.yaml", "--json").value) == JSON["probe"]
