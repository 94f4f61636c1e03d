"""Experiments have numbers that count up, stay, and are never given twice."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dray.errors import NoExperiment
from dray.records import numbering
from dray.records.directory import link_into_results
from dray.records.listing import list_experiments
from dray.records.lookup import locate
from dray.records.numbering import number_of, take_number


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAY_HOME", str(tmp_path / "results"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "results"


def experiment(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "experiment.yaml").touch()
    return path


def test_numbers_count_up_and_find_the_experiment(home: Path) -> None:
    one, two = experiment(home / "one"), experiment(home / "two")
    assert number_of(two) is None
    assert [take_number(two), take_number(one), take_number(two)] == [1, 2, 1]
    assert (number_of(one), number_of(two)) == (2, 1)
    assert (locate("1"), locate(2)) == (str(two), str(one))
    assert {each.name: each.number for each in list_experiments()} == {"one": 2, "two": 1}


def test_the_number_of_a_deleted_experiment_is_never_used_again(home: Path) -> None:
    for name in ("one", "two-1", "three"):
        take_number(experiment(home / name))
    shutil.rmtree(home / "three")
    assert take_number(experiment(home / "four")) == 4
    with pytest.raises(NoExperiment, match=rf"experiment 3, three, is no longer in {home}"):
        locate("3")
    assert locate("2") == str(home / "two-1")
    shutil.rmtree(home / "one")
    with pytest.raises(NoExperiment, match="experiment 1, one, is no longer"):
        locate("1")  # and not two-1


def test_a_number_that_another_driver_has_just_taken_is_skipped(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_number(experiment(home / "one")) == 1
    with monkeypatch.context() as patch:
        patch.setattr(numbering, "paths_by_number", dict)  # as it was before
        assert take_number(experiment(home / "two")) == 2


def test_an_experiment_elsewhere_has_a_number_by_its_link(home: Path, tmp_path: Path) -> None:
    shared = experiment(tmp_path / "shared" / "one")
    assert take_number(shared) is None
    link_into_results(shared)
    assert take_number(shared) == number_of(shared) == 1
    assert locate("1") == str(shared)
    assert [each.number for each in list_experiments(str(tmp_path / "shared"))] == [1]


def test_numbers_move_with_the_results_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_number(experiment(home / "one"))
    moved = home.rename(home.with_name("moved"))
    monkeypatch.setenv("DRAY_HOME", str(moved))
    assert locate("1") == str(moved / "one")


def test_a_link_that_cannot_be_made_is_no_error(home: Path) -> None:
    one = experiment(home / "one")
    (home / numbering.LINKS).touch()
    assert take_number(one) is None
    assert locate("one") == str(one)


def test_digits_are_a_number_before_a_part_of_a_name(home: Path) -> None:
    one, two = experiment(home / "digits-20261121-ab37"), experiment(home / "digits-20261121-3710")
    assert locate("3710") == str(two)
    with pytest.raises(NoExperiment, match="no experiment '37' in"):
        locate("37")  # a typo of a number must not find ab37
    (home / numbering.LINKS).mkdir()
    (home / numbering.LINKS / "3709").symlink_to("../gone")
    assert take_number(one) == 3710
    assert locate("3710") == str(one)


def test_exact_name_comes_before_a_part_of_one(home: Path) -> None:
    one, ten, other = (experiment(home / name) for name in ("digits-1", "digits-10", "my-digits"))
    assert locate("digits-1") == str(one)
    assert locate("its-10") == str(ten)
    assert locate("my") == str(other)
    assert locate(Path("my-digits")) == str(other)


def test_ambiguous_name_lists_the_newest_first(home: Path) -> None:
    for age, name in enumerate(("b-asha", "c-asha", "a-asha")):
        take_number(experiment(home / name))
        os.utime(home / name / "experiment.yaml", (100 - age, 100 - age))
    with pytest.raises(NoExperiment) as raised:
        locate("asha")
    assert str(raised.value).splitlines() == [
        f"'asha' matches 3 experiments in {home}; give a number, or more of the name:",
        "     1  b-asha",
        "     2  c-asha",
        "     3  a-asha",
    ]
