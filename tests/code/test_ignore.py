"""What of a directory is code: what is left out, how much there may be, and what a copy has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dray.code import ignore
from dray.code.ignore import code_of, copied
from dray.errors import ConfigError


def write(root: Path, *names: str, size: int = 4) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("wb") as file:
            file.truncate(size)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "code", "model_def.py", "parts/layers.py", "data/train.csv", "notes.txt", "parts/notes.txt")
    return tmp_path / "code"


ALL = ("data/train.csv", "model_def.py", "notes.txt", "parts/layers.py", "parts/notes.txt")


@pytest.mark.parametrize(
    "clutter",
    [
        ".git/config",
        ".ssh/id_ed25519",
        ".env",
        "parts/.ipynb_checkpoints/x.ipynb",
        "parts/__pycache__/layers.cpython-311.pyc",
        "venv/lib/big.py",
        "parts/mine.egg-info/PKG-INFO",
        "ray_bootstrap_key.pem",
    ],
)
def test_what_no_program_needs_is_left_out_wherever_it_lies(root: Path, clutter: str) -> None:
    write(root, clutter)
    assert code_of(root).files == ALL


@pytest.mark.parametrize("marks", [["pyvenv.cfg"], ["conda-meta/history"], ["CACHEDIR.TAG"]])
def test_environments_and_caches_are_known_whatever_their_name(root: Path, marks: list[str]) -> None:
    write(root, *(f"parts/mine/{mark}" for mark in marks), "parts/mine/lib/big.py")
    assert code_of(root).files == ALL


def test_other_experiments_are_left_out_not_what_looks_like_one(root: Path) -> None:
    write(root, "results/e/experiment.yaml", "results/e/journal.jsonl", "results/e/trial_0/state.pth")
    write(root, "templates/experiment.yaml")
    assert code_of(root).files == (*ALL, "templates/experiment.yaml")


@pytest.mark.parametrize("file", [".drayignore", ".detignore"])
def test_ignore_file_has_the_syntax_of_gitignore(root: Path, file: str) -> None:
    (root / file).write_text("# data lie elsewhere\n/data/\n*.txt\n!parts/notes.txt\n")
    assert code_of(root).files == ("model_def.py", "parts/layers.py", "parts/notes.txt")


def test_drays_own_ignore_file_has_the_last_word(root: Path) -> None:
    (root / ".detignore").write_text("*.txt\ndata/\n")
    (root / ".drayignore").write_text("!notes.txt\n")
    assert code_of(root).files == ("model_def.py", "notes.txt", "parts/layers.py", "parts/notes.txt")


def test_ignore_file_takes_back_what_is_left_out_by_default(root: Path) -> None:
    write(root, ".streamlit/config.toml", ".env")
    (root / ".drayignore").write_text("!.streamlit/\n")
    assert code_of(root).files == (".streamlit/config.toml", *ALL)


def test_invalid_pattern_is_reported_with_its_line(root: Path) -> None:
    (root / ".drayignore").write_text("data/\n!\n")
    with pytest.raises(ConfigError, match=r"model_dir: line 2 of .*/\.drayignore is not a valid .gitignore pattern"):
        code_of(root)


def test_home_directory_is_looked_at_without_what_is_below(root: Path) -> None:
    code = code_of(root, deep=False)
    assert (code.files, code.folders) == (("model_def.py", "notes.txt"), ())


def test_size_is_that_of_the_code_alone(root: Path) -> None:
    write(root, "data/images.bin", size=3 << 20)
    (root / ".drayignore").write_text("data/\n")
    code = code_of(root)
    assert (code.size, code.summary) == (16, "4 files, 16 B")


def test_too_much_is_reported_with_what_takes_the_most(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignore, "MAX_CODE_BYTES", 4 << 20)
    write(root, "data/imagenet/train/all.bin", size=3 << 20)
    write(root, *(f"runs/{n}/events.bin" for n in range(4)), size=1 << 20)
    write(root, "small.bin", size=1 << 19)
    with pytest.raises(ConfigError) as raised:
        code_of(root)
    [fault] = raised.value.faults
    assert fault.path == "model_dir"
    assert f"{root} has at least 7.5 MiB of files, more than the 4 MiB" in fault.what
    assert "the largest are runs/ (4.0 MiB), data/ (3.0 MiB), small.bin (512.0 KiB)" in fault.what
    assert f"{root}/.drayignore" in fault.what
    (root / ".drayignore").write_text("runs/\n")
    assert code_of(root).size < 4 << 20


def test_directory_without_end_is_not_looked_at_to_its_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignore, "MAX_CODE_BYTES", 10)
    monkeypatch.setattr(ignore, "MAX_ENTRIES", 3)
    with pytest.raises(ConfigError, match=r"has at least \d+ B of files"):
        code_of(root)


def test_copy_is_the_code_with_its_empty_folders_and_modes(root: Path, tmp_path: Path) -> None:
    (root / "logs").mkdir()
    (root / "startup-hook.sh").write_text("true\n")
    (root / "startup-hook.sh").chmod(0o755)
    code = code_of(root)
    code.copy(tmp_path / "copy")
    assert copied(tmp_path / "copy").folders == ("data", "logs", "parts")
    assert copied(tmp_path / "copy").files == code.files
    assert (tmp_path / "copy" / "startup-hook.sh").stat().st_mode & 0o777 == 0o755


def test_small_files_that_are_shared_by_links_are_code(root: Path, tmp_path: Path) -> None:
    write(tmp_path / "shared", "utils.py", "big.bin", size=1 << 20)
    write(tmp_path / "shared", "big.bin", size=(1 << 20) + 1)
    for name in ("utils.py", "big.bin"):
        (root / name).symlink_to(f"../shared/{name}")
    code = code_of(root)
    assert (set(code.files) - set(ALL), code.links) == ({"utils.py"}, ("big.bin",))
    assert code.size == 4 * len(ALL) + (1 << 20)
    code.copy(tmp_path / "copy")
    assert not (tmp_path / "copy" / "utils.py").is_symlink()
    assert os.readlink(tmp_path / "copy" / "big.bin") == str(tmp_path / "shared" / "big.bin")


def test_links_lead_in_the_copy_to_where_they_led(root: Path, tmp_path: Path) -> None:
    write(tmp_path / "shared", "big.bin")
    (root / "shared").symlink_to("../shared")
    (root / "parts" / "up").symlink_to("../model_def.py")
    (root / "absolute").symlink_to(root / "parts")
    (root / "loop").symlink_to(".")
    (root / "nowhere").symlink_to("/not/there")
    code = code_of(root)
    assert code.files == ALL, "links are not followed"
    code.copy(tmp_path / "elsewhere" / "copy")
    copy = tmp_path / "elsewhere" / "copy"
    assert (copy / "shared" / "big.bin").exists()
    assert os.readlink(copy / "parts" / "up") == "../model_def.py"
    assert os.readlink(copy / "absolute") == "parts"
    assert os.readlink(copy / "loop") == "."
    assert os.readlink(copy / "nowhere") == "/not/there"
    code.copy(copy)  # of an experiment whose creation was killed


def test_unreadable_files_are_reported(root: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model_dir: can't be read: .*model_def\.py.*; make it readable, or exclude it in"
    ):
        code_of(root / "model_def.py")


def test_sockets_and_pipes_are_no_code(root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert code_of(root).files == ALL
