"""bench/curves/public_tables.py and the problems that its tables become, on files in the public formats."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks import each other by their file names."""
    monkeypatch.syspath_prepend(str(BENCH / "curves"))
    monkeypatch.syspath_prepend(str(BENCH))


def final_loss(config: dict[str, Any]) -> float:
    """The best learning rate is 0.01, whatever else is chosen."""
    return 0.1 + 0.3 * abs(math.log10(config["learning_rate"]) + 2)


def lcbench_config(number: int) -> dict[str, Any]:
    return {
        "batch_size": 16 + 8 * (number % 60),
        "learning_rate": 10 ** (-4 + 3 * number / 119),
        "momentum": 0.1 + 0.8 * (number % 7) / 6,
        "weight_decay": 1e-5 + 0.09 * (number % 11) / 10,
        "num_layers": 1 + number % 5,
        "max_units": 64 + 100 * (number % 9),
        "max_dropout": (number % 13) / 13,
        "network": "shapedmlpnet",
    }


def lcbench_file(path: Path) -> Path:
    """Two data sets: in the second one, the last epoch is the worst, and epochs 0 and 51 are better than any."""
    runs: dict[str, Any] = {"rising": {}, "falling": {}}
    for number in range(120):
        config = lcbench_config(number)
        final = final_loss(config)
        epochs = list(range(52))
        for name, factor in (("falling", lambda t: 1 + 1 / t), ("rising", lambda t: 1 + t / 50)):
            losses = [1e-3, *(final * factor(t) for t in range(1, 51)), 1e-3]
            runs[name][str(number)] = {
                "config": config,
                "log": {"epoch": epochs, "Train/val_cross_entropy": losses, "Train/val_accuracy": [0.0] * 52},
                "results": {"final_val_cross_entropy": losses[-1]},
            }
    path.write_text(json.dumps(runs))
    return path


def converted(monkeypatch: pytest.MonkeyPatch, tables: Path, source: str, path: Path) -> None:
    import public_tables

    monkeypatch.setattr(sys, "argv", ["public_tables.py", source, str(path), "--into", str(tables)])
    public_tables.main()


@pytest.mark.usefixtures("bench")
def test_lcbench_s_curves_become_problems_with_their_best_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import recorded_problems

    tables = tmp_path / "tables"
    converted(monkeypatch, tables, "lcbench", lcbench_file(tmp_path / "data.json"))
    assert sorted(path.stem for path in tables.iterdir()) == ["falling", "rising"]
    recorded = recorded_problems.recording("falling", tables)
    assert recorded.losses.shape == (120, 1, 50)
    best = lcbench_config(79)  # nearest to a learning rate of 0.01
    problem = recorded_problems.RecordedProblem(recorded, num_rungs=4)
    assert problem.rungs == (1, 5, 16, 50)
    assert problem.regret(best) < 0.2 < 0.8 < problem.regret(lcbench_config(0))
    loss = problem.curve(best)
    assert loss(1) == pytest.approx(final_loss(best) * 2, rel=0.2)
    assert loss(50) == pytest.approx(final_loss(best) * 1.02, rel=0.2)
    # The measure is the lowest loss of a curve, here the first.
    rising = recorded_problems.recording("rising", tables)
    assert math.exp(rising.best) == pytest.approx(0.1 * 1.02, rel=0.2)


@pytest.mark.usefixtures("bench")
def test_a_useless_first_report_is_that_of_another_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import recorded_problems

    converted(monkeypatch, tmp_path / "tables", "lcbench", lcbench_file(tmp_path / "data.json"))
    recorded = recorded_problems.recording("falling", tmp_path / "tables")
    plain = recorded_problems.RecordedProblem(recorded, num_rungs=4)
    useless = recorded_problems.RecordedProblem(recorded, num_rungs=4, useless=True)
    configs = [lcbench_config(number) for number in range(0, 120, 3)]
    for config in configs:
        assert useless.curve(config)(5) == plain.curve(config)(5)
        assert useless.curve(config)(1) == useless.curve(config)(1)
    firsts = np.array([[each.curve(config)(1) for config in configs] for each in (plain, useless)])
    assert abs(np.corrcoef(firsts)[0, 1]) < 0.5
    # NumPy's exp of one number and of a row can differ in the last bit.
    of_others = np.exp(recorded.means[:, 0])
    assert all(np.isclose(of_others, first, rtol=1e-12).any() for first in firsts[1])


@pytest.mark.usefixtures("bench")
def test_yahpo_s_surrogate_is_asked_for_all_epochs_of_each_data_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import public_tables

    class Session:
        """An onnxruntime session of a surrogate: the cross entropy is the code of the data set plus 1 / epoch."""

        def __init__(self, path: str) -> None:
            assert path == str(tmp_path / "lcbench" / "model.onnx")

        def get_inputs(self) -> Sequence[SimpleNamespace]:
            return [SimpleNamespace(name="categories"), SimpleNamespace(name="numbers")]

        def get_outputs(self) -> Sequence[SimpleNamespace]:
            return [SimpleNamespace(name="targets")]

        def run(self, names: Sequence[str], inputs: dict[str, Any]) -> list[Any]:
            codes, numbers = inputs["categories"], inputs["numbers"]
            assert names == ["targets"]
            assert (codes.dtype, numbers.dtype) == (np.int32, np.float32)
            assert ((numbers[:, 2] >= 1e-4) & (numbers[:, 2] <= 0.11)).all()  # the learning rate
            targets = np.zeros((len(numbers), 6), dtype=np.float32)
            targets[:, 2] = codes[:, 0] + 1 / numbers[:, 0]
            return [targets]

    onnxruntime = ModuleType("onnxruntime")
    onnxruntime.InferenceSession = Session  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", onnxruntime)
    monkeypatch.setattr(public_tables, "NUM_POINTS", 3)
    (tmp_path / "lcbench").mkdir()
    (tmp_path / "lcbench" / "encoding.json").write_text(
        json.dumps({"OpenML_task_id": {"#na#": 0, "3945": 1, "7593": 2}})
    )
    tasks = dict(public_tables.yahpo(tmp_path))
    assert list(tasks) == ["3945", "7593"]
    assert [losses[:2] + losses[-1:] for _, losses in tasks["7593"]] == [pytest.approx([3, 2.5, 2.02])] * 3


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("opened", [open, gzip.open])
def test_pd1_s_diverged_trials_have_shorter_curves(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import recorded_problems

    path = tmp_path / ("results.jsonl.gz" if opened is gzip.open else "results.jsonl")
    with opened(path, "wt") as file:
        for number in range(40):
            losses = [2.0, None] if number == 0 else [2 - number / 40 - t / 100 for t in range(30)]
            run = {
                "study_group": "mnist,simple_cnn",
                "status": "diverged" if number == 0 else "done",
                "hps.lr_hparams.initial_value": 10 ** (-5 + 6 * number / 40),
                "hps.lr_hparams.power": 1.0,
                "hps.lr_hparams.decay_steps_factor": 0.5,
                "hps.opt_hparams.momentum": 0.9,
                "valid/ce_loss": losses,
            }
            file.write(json.dumps(run) + "\n")
    converted(monkeypatch, tmp_path / opened.__module__, "pd1", path)
    recorded = recorded_problems.recording("mnist,simple_cnn", tmp_path / opened.__module__)
    assert recorded.losses.shape == (40, 1, 30)
    assert np.isnan(recorded.losses[0, 0, 1:]).all()
    assert recorded.configs[5]["one_minus_momentum"] == pytest.approx(0.1)
    worst = recorded_problems.RecordedProblem(recorded).curve(recorded.configs[0])(30)
    assert worst == pytest.approx(np.nanquantile(recorded.losses, 0.95), rel=0.1)
