"""An experiment that a server has not accepted, because it died or could not, leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dray.records.lookup import experiment_directories
from dray.serve.creations import Creations
from dray.serve.draft import Draft
from dray.serve.processes import Create, create
from tests.model_code import imports_undone
from tests.serve.test_api import CONFIG


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory."""
    (tmp_path / "model").mkdir()
    text = "from dray.pytorch import PyTorchTrial\n\n\nclass DigitsTrial(PyTorchTrial): ...\n"
    (tmp_path / "model" / "model_def.py").write_text(text)
    return tmp_path / "model"


@pytest.fixture
def made(results: Path, model: Path) -> Callable[[Path], Path]:
    """Creates an experiment as its process does, and returns its directory."""

    def make(link: Path) -> Path:
        with imports_undone():
            return create(Create(read=Draft(config=CONFIG).read(), code=model, link=link))[1].prepare().path

    return make


def listed(results: Path) -> list[Path]:
    return experiment_directories(results)


def test_what_a_killed_server_has_not_accepted_is_gone_with_the_next_one(
    results: Path, made: Callable[[Path], Path]
) -> None:
    directory = results / ".server" / "creations"
    Creations(directory)
    lost, accepted, has_run = (made(directory / name) for name in ("1", "2", "3"))
    (has_run / "journal.jsonl").touch()
    older = made(results / "link")  # of an experiment that was accepted: its link is not there
    (results / "link").unlink()
    assert set(listed(results)) == {lost, accepted, has_run, older}
    Creations(directory).discard_all(lambda name: name == accepted.name)
    assert set(listed(results)) == {accepted, has_run, older}
    assert not lost.exists()
    assert not list(directory.iterdir())


def test_one_in_another_directory_is_gone_with_its_name_in_the_results(
    results: Path, model: Path, tmp_path: Path
) -> None:
    elsewhere = CONFIG + f"checkpoint_storage: {{type: shared_fs, host_path: {tmp_path / 'elsewhere'}}}\n"
    creations = Creations(results / ".server" / "creations")
    with imports_undone(), pytest.raises(OSError), creations.new() as link:
        path = create(Create(read=Draft(config=elsewhere).read(), code=model, link=link))[1].prepare().path
        assert (path.parent, listed(results)) == ((tmp_path / "elsewhere").resolve(), [path])
        raise OSError("the queue's disk is full")
    assert listed(results) == []
    assert not list((tmp_path / "elsewhere").iterdir())
    assert [each.name for each in results.iterdir()] == [".server"]


def test_what_is_accepted_stays(results: Path, made: Callable[[Path], Path]) -> None:
    creations = Creations(results / ".server" / "creations")
    with creations.new() as link:
        path = made(link)
    creations.discard_all(lambda name: False)
    assert listed(results) == [path]


def test_a_creation_that_fails_before_its_directory_is_one_fault(results: Path) -> None:
    creations = Creations(results / ".server" / "creations")
    with pytest.raises(ValueError, match="faulty"), creations.new():
        raise ValueError("faulty")
    assert listed(results) == []


def test_the_code_that_an_earlier_experiment_was_imported_from_is_not_imported_again(
    results: Path, model: Path, tmp_path: Path
) -> None:
    module, imports = model / "model_def.py", tmp_path / "imports"
    module.write_text(f"{module.read_text()}\nwith open({str(imports)!r}, 'a') as file:\n    file.write('.')\n")

    def make(*imported: str) -> str:
        read, link = Draft(config=CONFIG).read(), results / f"link-{len(list(results.iterdir()))}"
        with imports_undone():
            return create(Create(read=read, code=model, link=link, imported=frozenset(imported)))[2]

    first = make("of another")
    assert (make(first), imports.read_text()) == (first, ".")
    module.write_text(f"{module.read_text()}\n")
    assert (make(first) == first, imports.read_text()) == (False, "..")
