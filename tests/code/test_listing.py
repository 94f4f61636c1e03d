"""Code as text for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.code import listing
from dray.code.listing import CodeFile, code_files, code_text


@pytest.fixture
def code(tmp_path: Path) -> Path:
    code = tmp_path / "code"
    (code / "net" / "__pycache__").mkdir(parents=True)
    (code / "model_def.py").write_text("x = 'é'\n")
    (code / "net" / "layers.py").write_text("")
    (code / "net" / "__pycache__" / "layers.pyc").write_bytes(b"\0")
    (code / "weights.bin").write_bytes(b"\0\1")
    (tmp_path / "secret").write_text("secret")
    (code / "link").symlink_to(tmp_path / "secret")
    (code / "links").symlink_to(tmp_path)
    return code


def test_files_are_listed_and_links_are_not_followed(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, is_all = code_files(code)
    assert [(each.path, each.is_link) for each in files] == [
        ("link", True),
        ("links", True),
        ("model_def.py", False),
        ("net/layers.py", False),
        ("weights.bin", False),
    ]
    assert files[2] == CodeFile("model_def.py", 9)
    assert is_all
    monkeypatch.setattr(listing, "MAX_FILES", 5)
    assert code_files(code) == (files, True)
    monkeypatch.setattr(listing, "MAX_FILES", 4)
    assert code_files(code) == (files[:4], False)
    assert code_files(code / "none") == ([], True)


def test_the_text_of_a_file_is_bounded_and_a_binary_one_has_none(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_text(code, "model_def.py") == ("x = 'é'\n", 9)
    assert code_text(code, "net/layers.py") == ("", 0)
    assert code_text(code, "weights.bin") == (None, 2)
    (code / "latin.py").write_bytes(b"caf\xe9")
    assert code_text(code, "latin.py") == (None, 4)
    monkeypatch.setattr(listing, "MAX_BYTES", 6)
    assert code_text(code, "model_def.py") == ("x = '", 9), "not half a letter"


@pytest.mark.parametrize(
    "path",
    [
        "link",
        "links/secret",
        "links/code/model_def.py",
        "../secret",
        "net/../../secret",
        "/etc/passwd",
        "",
        ".",
        "net",
        "no",
    ],
)
def test_nothing_outside_of_the_code_is_read(code: Path, path: str) -> None:
    with pytest.raises(FileNotFoundError):
        code_text(code, path)
