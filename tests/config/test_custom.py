"""A user's own method and sampler, named by the config or given from Python: found, checked, replayed; without Ray."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dray
from dray.config.custom import Custom
from dray.config.load import load_config
from dray.config.search import build_method, build_sampler, build_search
from dray.errors import ConfigError
from dray.experiment.preview import preview_search
from dray.records.directory import ExperimentDirectory
from dray.records.result import Result
from searchers import ASHA, Exited, Journal, JournalError, RandomSearch, Reported, Started
from tests.model_code import imports_undone

EXAMPLES = Path(__file__).parents[2] / "examples"
SPACE = {"global_batch_size": 2, "lr": {"type": "double", "minval": 0, "maxval": 1}}
MODULE = """
from searchers import ASHA, MethodError, RandomSearch

class Halves(RandomSearch):
    "Trials of one length."

class Silent:
    rungs = (4,)
    def start(self): return []

class Backwards(RandomSearch):
    def __init__(self):
        super().__init__(max_trials=2)
        self.rungs = (4, 2)

class Torn(RandomSearch):
    def __init__(self):
        super().__init__(max_trials=2)
        self.rungs = (1.5, 4)

class Broken:
    def __init__(self):
        raise KeyError("lost")

class Sampler:
    "Trial n has a learning rate of n / 10."
    def __init__(self, space, *, seed, rungs, scale=10):
        self.made, self.scale = ([name for name, _ in space.root.domains], seed, rungs), scale
    def ask(self, trial): return {"global_batch_size": 2, "lr": trial / self.scale}
    def tell(self, event, hparams): pass

number = 3
"""


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with imports_undone():
        yield


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "my_search.py").write_text(MODULE)
    (tmp_path / "code" / "my_mistake.py").write_text("1 / 0")
    return tmp_path / "code"


class Trial:
    """Stands for a trial's class: nothing is trained here."""


def config(searcher: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hyperparameters": SPACE,
        "searcher": {"metric": "loss", "max_length": {"epochs": 4}, **searcher},
        "reproducibility": {"experiment_seed": 7},
    }


def experiment(searcher: Mapping[str, Any], **arguments: Any) -> dray.Experiment:
    return dray.Experiment(config(searcher), trial=Trial, **arguments)  # type: ignore[arg-type]


def drive(search: Any) -> None:
    """One worker; trial n's loss is n / 10, at 4 steps."""
    while search.done is None:
        view = next(view for view in search.trials.values() if not view.ended)
        if view.stop_requested or view.last_step == 4:
            search.on(Exited(trial=view.id, reason="stopped" if view.stop_requested else "completed"))
        elif view.state == "PENDING":
            search.on(Started(trial=view.id))
        else:
            search.on(Reported(trial=view.id, step=1 + (view.last_step or 0), value=view.id / 10))


def finished(path: Path, searcher: Mapping[str, Any], custom: Custom) -> Path:
    """The directory of a search that has ended, as a driver leaves it."""
    checked = load_config(config(searcher))
    directory = ExperimentDirectory.create(path, checked, custom.directory)
    with Journal(directory.journal) as journal:
        journal.append({"event": "opened", "version": "0", **custom.names(), "time": 0.0})
        search = build_search(checked, lambda record: journal.append({**record, "time": 0.0}), custom=custom)
        search.start()
        drive(search)
    return path


def resume(path: Path, **arguments: Any) -> dray.Experiment:
    return dray.Experiment.resume(path, trial=Trial, **arguments)  # type: ignore[arg-type]


def faults(error: ConfigError) -> list[tuple[str, str]]:
    return [(fault.path, fault.what) for fault in error.faults]


def halves(**options: Any) -> dict[str, Any]:
    return {"name": "my_search:Halves", "options": {"max_trials": 3, "max_length": 4, **options}}


HALVES, CUSTOM = halves(), {"name": "custom"}
MISSPELT = {"name": "my_search:Sampler", "options": {"scal": 1}}


def test_class_of_the_models_directory_is_made_with_its_options(code: Path) -> None:
    method = build_method(load_config(config(HALVES)), Custom(directory=code))
    assert (type(method).__name__, type(method).__module__, method.rungs) == ("Halves", "my_search", (4,))
    assert len(method.start()) == 3


def test_sampler_gets_the_space_the_seed_the_rungs_and_options(code: Path) -> None:
    chosen = {"name": "my_search:Sampler", "options": {"scale": 100}}
    loaded = load_config(config({**HALVES, "sampler": chosen, "points": [{"lr": 0.5}]}))
    search = build_search(loaded, lambda record: None, custom=Custom(directory=code))
    search.start()
    assert [search.params(trial)["lr"] for trial in range(3)] == [0.5, 0.01, 0.02]
    sampler: Any = build_sampler(load_config(config({**HALVES, "sampler": chosen})), custom=Custom(directory=code))
    assert sampler.made == (["global_batch_size", "lr"], 7, (4,))


def test_options_survive_the_experiments_file(tmp_path: Path, code: Path) -> None:
    searcher = {"name": "my_search:Halves", "options": {"max_trials": 3, "max_length": None}}
    path = finished(tmp_path / "experiment", searcher, Custom(directory=code))
    assert ExperimentDirectory.open(path).config() == load_config(config(searcher))


@pytest.mark.parametrize(
    ("searcher", "path", "what"),
    [
        ({"name": "my_serch:Halves"}, "searcher.name", "no module my_serch in {code}; did you mean my_search?"),
        ({"name": "my_search:Halfs"}, "searcher.name", "my_search has no class Halfs; did you mean Halves?"),
        ({"name": "my_search:number"}, "searcher.name", "has no class number; its classes are Halves, Silent, Backw"),
        ({"name": "my_mistake:M"}, "searcher.name", "raised ZeroDivisionError; fix it there:\n"),
        ({"name": "my_search:Silent"}, "searcher.name", "not a method: it has no extend, on, progress; see"),
        ({"name": "my_search:Backwards"}, "searcher.name", "rungs must be ascending lengths > 0, got (4, 2)"),
        ({"name": "my_search:Torn"}, "searcher.name", "rungs must be integers, in the unit of max_length"),
        ({"name": "my_search:Broken"}, "searcher.options", "my_search:Broken does not accept {{}}: KeyError: 'lost'"),
        ({"name": "my_search:Halves"}, "searcher.options", "missing 1 required keyword-only argument: 'max_trials'"),
        (halves(max_trials=0), "searcher.options.max_trials", "must be an integer >= 1, got 0"),
        (halves(max_length=8), "searcher.max_length", "must be the last of the method's rungs (8,), got 4"),
        (halves(max_trials=Trial()), "searcher.options", "must be numbers, strings, lists and"),
        ({**HALVES, "sampler": MISSPELT}, "searcher.sampler.options", "does not accept {{'scal': 1}}: TypeError: "),
        ({"name": "custom"}, "searcher.name", "needs a method from Python: dray.Experiment(config, method"),
    ],
)
def test_a_fault_has_its_path(code: Path, searcher: dict[str, Any], path: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment(searcher, model_dir=code)
    [(found, message)] = faults(caught.value)
    assert found == path
    assert what.format(code=code) in message


def test_a_class_without_a_model_directory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"searcher\.name: my_search:Halves .* but there is none; give mo"):
        build_method(load_config(config(HALVES)))


@pytest.mark.parametrize(
    ("searcher", "given", "path"),
    [
        ({"name": "single"}, {"method": RandomSearch(max_trials=2)}, "searcher.name"),
        ({"name": "single"}, {"method": RandomSearch(max_trials=2, max_length=4)}, "searcher.name"),
        (CUSTOM, {"method": RandomSearch(max_trials=2, max_length=8)}, "searcher.max_length"),
        ({"name": "custom"}, {"method": 3}, "method"),
        (CUSTOM | {"sampler": "tpe"}, {"method": RandomSearch(max_trials=2), "sampler": 3}, "searcher.sampler"),
        ({"name": "random", "max_trials": 2}, {"sampler": 3}, "sampler"),
    ],
    ids=["no length", "another name", "another length", "no method", "two samplers", "no sampler"],
)
def test_given_objects_must_fit_the_config(
    tmp_path: Path, searcher: dict[str, Any], given: dict[str, Any], path: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment(searcher, model_dir=tmp_path, **given)
    assert [found for found, _ in faults(caught.value)] == [path]


def test_search_of_a_named_class_is_rebuilt_from_its_directory(tmp_path: Path, code: Path) -> None:
    path = finished(tmp_path / "experiment", HALVES, Custom(directory=code))
    (code / "my_search.py").unlink()  # the experiment has a copy
    assert resume(path).run().trials["state"].tolist() == ["COMPLETED"] * 3
    assert Result(path).trials["metric"].isna().all()  # no metrics were stored here
    # What the search says to an extension is the method's to say.
    with pytest.raises(
        ConfigError, match=r"The extension has 1 error:\n  searcher\.max_trials: must be an integer >= 3"
    ):
        resume(path, max_trials=2).run()
    with pytest.raises(ConfigError, match=r"searcher\.name: must be custom if the method is given from Python"):
        resume(path, method=RandomSearch(max_trials=3, max_length=4)).run()


def given_asha(max_trials: int = 4) -> ASHA:
    return ASHA(max_trials=max_trials, max_length=4, num_rungs=2, divisor=2)


class Tenths:
    """Trial n has a learning rate of n / 10."""

    def ask(self, trial: int) -> dict[str, object]:
        return {"global_batch_size": 2, "lr": trial / 10}

    def tell(self, event: object, hparams: Mapping[str, object]) -> None:
        """Nothing is learned."""


def test_objects_from_python_must_be_given_again(tmp_path: Path) -> None:
    def small(point: Mapping[str, object]) -> bool:
        return True

    custom = Custom(method=given_asha(), sampler=Tenths(), constraint=small)
    path = finished(tmp_path / "experiment", {"name": "custom"}, custom)
    with pytest.raises(ConfigError) as caught:
        resume(path).run()
    assert [found for found, _ in faults(caught.value)] == ["constraint", "method", "sampler"]
    assert faults(caught.value)[1][1] == (
        "the experiment was created with ASHA, which can't be stored in its directory; pass it again, from Python: "
        "dray.Experiment.resume(path, method=...)"
    )
    # What it came to can be read without any of them.
    states = ["COMPLETED", "PRUNED", "PRUNED", "PRUNED"]
    assert Result(path).trials["state"].tolist() == states
    assert Result(path).trials["hparams.lr"].tolist() == [0, 0.1, 0.2, 0.3]
    again = resume(path, method=given_asha(), sampler=Tenths(), constraint=small)
    assert again.run().trials["state"].tolist() == states
    assert again.run().trials["state"].tolist() == states  # each run has a copy of the method, at its start
    with pytest.raises(JournalError, match="the recorded actions are"):
        resume(path, method=given_asha(max_trials=3), sampler=Tenths(), constraint=small).run()


@pytest.mark.long
@pytest.mark.slow
def test_preview_of_a_method_of_ones_own_is_a_simulation(code: Path) -> None:
    """Each of the 24 trials has a random value and continues with even odds; of the first four, two always do."""
    file = io.StringIO()
    loaded = load_config(EXAMPLES / "own_method" / "digits.yaml")
    preview_search(loaded, model_dir=EXAMPLES).show(Console(file=file, width=120))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in file.getvalue().splitlines() if "│" in line]
    lengths, come, last = ([float(row[column]) for row in rows] for column in (2, 3, 4))
    assert lengths == [1, 4, 16]
    assert come[0] == pytest.approx(sum(last), abs=0.2) == 24
    assert 24 > come[1] > come[2] > 2
    assert (come[1], come[2]) == pytest.approx((24 - last[0], last[2]), abs=0.2)
    assert "custom method, simulated with random metric values" in file.getvalue()


def test_preview_refuses_a_method_that_breaks_the_rules(code: Path) -> None:
    text = "class Idle:\n    rungs = (4,)\n    def start(self): return []\n"
    for name in ("on", "progress", "extend", "dump", "load"):
        text += f"    def {name}(self, *event): return []\n"
    (code / "my_search.py").write_text(text)
    with pytest.raises(ConfigError, match=r"searcher\.name: all 16 workers are idle.*check_method"):
        preview_search(load_config(config({"name": "my_search:Idle"})), model_dir=code)
