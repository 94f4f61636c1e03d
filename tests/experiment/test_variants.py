"""Variants of an experiment's code: stored once, checked before, and refused with one error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dray.code import ignore
from dray.code.patch import apply
from dray.config.load import load_config
from dray.errors import Invalid
from dray.experiment import variants
from dray.records.directory import ExperimentDirectory

TRAIN = "lr = 0.1\nTrial = print(lr)\n"
PATCH = "--- a/train.py\n+++ b/train.py\n@@ -1,2 +1,2 @@\n-lr = 0.1\n+lr = 0.2\n Trial = print(lr)\n"


def experiment(tmp_path: Path, entrypoint: str = "python3 train.py", **fields: Any) -> ExperimentDirectory:
    model = tmp_path / "model"
    (model / "pkg").mkdir(parents=True, exist_ok=True)
    (model / "train.py").write_text(TRAIN)
    (model / "pkg" / "a.py").write_text("a = 1\n")
    (model / "inner").symlink_to("pkg")
    (model / "data").symlink_to(tmp_path)
    config = load_config(
        {
            "entrypoint": entrypoint,
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
            **fields,
        }
    )
    return ExperimentDirectory.create(tmp_path / "experiment", config, model)


def created(name: str) -> str:
    return f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+b = 1\n"


def left(directory: ExperimentDirectory) -> list[str]:
    return os.listdir(directory.variants) if directory.variants.exists() else []


def never(*_: object) -> str:
    raise AssertionError("a program is not imported")


def test_a_patch_makes_a_whole_directory_and_its_difference(tmp_path: Path) -> None:
    directory = experiment(tmp_path)
    name = variants.from_patch(directory, PATCH, never)
    code = directory.code_of(name)
    assert (code / "train.py").read_text() == TRAIN.replace("0.1", "0.2")
    assert (code / "pkg" / "a.py").read_text() == "a = 1\n"
    assert (os.readlink(code / "inner"), os.readlink(code / "data")) == ("pkg", str(tmp_path))
    assert (directory.code / "train.py").read_text() == TRAIN
    assert directory.code_of(None) == directory.code
    changed = apply(directory.diff_of(name), lambda file: (directory.code / file).read_bytes())
    assert changed == {"train.py": (code / "train.py").read_bytes()}


def test_equal_code_has_one_directory_and_is_checked_once(tmp_path: Path) -> None:
    directory, imported = experiment(tmp_path, "train:Trial"), list[Path]()

    def importer(_: object, place: Path) -> str:
        imported.append(place)
        return ""

    name = variants.from_patch(directory, PATCH, importer)
    other = tmp_path / "other"
    (other / "pkg").mkdir(parents=True)
    (other / "train.py").write_text(TRAIN.replace("0.1", "0.2"))
    (other / "pkg" / "a.py").write_text("a = 1\n")
    (other / "inner").symlink_to("pkg")
    (other / "data").symlink_to(tmp_path)
    (directory.code / "__pycache__").mkdir()
    (directory.code / "__pycache__" / "train.pyc").write_bytes(b"x")
    assert variants.from_directory(directory, other, importer) == name
    (other / "pkg" / "b.py").write_text("b = 1\n")
    assert variants.from_directory(directory, other, importer) != name
    assert len(imported) == 2
    assert len(left(directory)) == 2


def test_secrets_are_hidden_in_variants_too(tmp_path: Path) -> None:
    directory = experiment(tmp_path, environment={"environment_variables": {"API_KEY": "s3cr3t-enough"}})
    name = variants.from_patch(directory, PATCH.replace("0.2", "'s3cr3t-enough'"), never)
    assert "s3cr3t-enough" not in (directory.code_of(name) / "train.py").read_text() + directory.diff_of(name)


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        (created("data/x.py"), "the patch is about data/x.py, but data is a link in the code"),
        (created("inner/a.py"), "the patch is about inner/a.py, but inner is a link in the code"),
        ("diff --git a/data b/data\ndeleted file mode 100644\n", "but data is a link in the code"),
        (created("train.py/x.py"), "the patch is about train.py/x.py, but train.py is a file of the code"),
        (created("pkg"), "the patch is about pkg, which is a directory of the code"),
        (created("../x.py"), "outside of the code's directory"),
        (created("x" * 300), "which can't be a file: File name too long"),
        (created("new/x.py") + created("new"), "the patch is about 'new', which can't be a file: Is a directory"),
        (created("new") + created("new/x.py"), "the patch is about 'new/x.py', which can't be a file: "),
        (PATCH.replace("+lr = 0.2", "+lr = (0.2"), "the variant's train.py can't be parsed: "),
        (PATCH.replace("+lr = 0.2", "+lr = '\0'"), "the variant's train.py can't be parsed: "),
        (PATCH.replace("+lr = 0.2", f"+lr = {'-' * 200_000}1"), "parsed: it is nested too deeply"),
        (
            "--- a/train.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-lr = 0.1\n-Trial = print(lr)\n",
            "the variant's code can't be used: no script train.py in the variant's code",
        ),
        (PATCH.replace("+lr = 0.2", "+lr = 0.1"), "the variant's code is the experiment's own"),
        (created("startup-hook.sh"), "a variant can't change startup-hook.sh"),
        (PATCH.replace("0.1", "0.5"), "hunk 1 of train.py (line 3 of the patch): it expects 'lr = 0.5' at line 1"),
    ],
    ids=lambda value: "",
)
def test_what_can_not_be_used_is_refused_and_leaves_nothing(patch: str, says: str, tmp_path: Path) -> None:
    directory = experiment(tmp_path)
    with pytest.raises(Invalid) as error:
        variants.from_patch(directory, patch, never)
    assert says in str(error.value), str(error.value)
    assert not left(directory)
    assert not (tmp_path / "x.py").exists()


def test_code_that_can_not_be_imported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    directory = experiment(tmp_path, "train:Trial")
    with pytest.raises(Invalid) as error:
        variants.from_patch(directory, PATCH, lambda _, place: f"importing train from {place} raised NameError")
    says = "the variant's code can't be used: importing train from the variant's code raised NameError"
    assert (str(error.value), left(directory)) == (says, [])


def test_with_a_startup_hook_only_workers_import_the_code(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "startup-hook.sh").write_text("export X=1\n")
    directory = experiment(tmp_path, "train:Trial")
    assert directory.has_variant(variants.from_patch(directory, PATCH, never))


def test_code_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, other = experiment(tmp_path), tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text(TRAIN)
    with (other / "weights.bin").open("wb") as file:
        file.truncate(ignore.MAX_CODE_BYTES)
    with pytest.raises(Invalid, match=r"weights.bin .*give a directory with only the model's code"):
        variants.from_directory(directory, other, never)
    with pytest.raises(Invalid, match=r"no such directory: .*nowhere"):
        variants.from_directory(directory, tmp_path / "nowhere", never)
    monkeypatch.setattr(variants, "MAX_FILES", 5)
    with pytest.raises(Invalid, match=r"the variant has more than 96 MiB or 5 files"):
        variants.from_patch(directory, created("b.py"), never)
    assert not left(directory)


def test_a_class_of_a_script_has_no_variants(tmp_path: Path) -> None:
    config = load_config({"searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}}})
    directory = ExperimentDirectory.create(tmp_path / "experiment", config, None)
    with pytest.raises(Invalid, match="has no code that a trial can change: its class is from a script"):
        variants.from_patch(directory, PATCH, never)


@pytest.mark.parametrize("name", ["../../etc", "", "3f9c01ab52dg", "3f9c01ab52de"])
def test_no_other_directory_is_a_variant(name: str, tmp_path: Path) -> None:
    assert not experiment(tmp_path).has_variant(name)
