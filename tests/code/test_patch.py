"""Patches: what applies, as git and diff write it, and what is refused before any file is touched."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from dray.code.difference import MAX_COMPARED_LINES, difference, differences
from dray.code.patch import MAX_PATCH_BYTES, BadPatch, apply, read_patch

MODEL = b"import torch\n\n\ndef lr():\n    return 0.1\n\n\ndef width():\n    return 64\n"
CODE = {"model.py": MODEL, "pkg/a.py": b"a = 1\n", "notes.txt": b"no newline", "dos.py": b"x = 1\r\ny = 2\r\n"}
HUNK = "@@ -4,2 +4,2 @@ def lr():\n def lr():\n-    return 0.1\n+    return 0.2\n"
CHANGED = MODEL.replace(b"0.1", b"0.2")
FILES = "--- a/model.py\n+++ b/model.py\n"


def tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("seed", range(60))
def test_a_patch_that_was_made_makes_one_directory_into_the_other(seed: int, tmp_path: Path) -> None:
    random, sides = Random(seed), [tmp_path / "a", tmp_path / "b"]
    pieces = ["a\n", "b\n", "\n", "  c\n", "--- x\n", "+++ y\n", "@@ -1 +1 @@\n", "é\n", "d\r\n", "-- \n", "\\ z\n"]

    def text() -> list[str]:
        return [random.choice(pieces) for _ in range(random.randrange(25))]

    for name in ("model.py", "pkg/a.py", "pkg/b c.py", "café.py", "empty.py"):
        lines = text()
        changed = [line for line in lines if random.random() < 0.9] + text()[: random.randrange(3)]
        for side, content in zip(sides, ("".join(lines), "".join(changed)), strict=True):
            if random.random() < 0.85:
                (side / name).parent.mkdir(parents=True, exist_ok=True)
                (side / name).write_bytes(content[: -1 if random.random() < 0.2 else None].encode())
    before, after = (tree(side) for side in sides)
    patch = "".join(differences(*sides))
    if before == after:
        assert patch == ""
    else:
        changed_files = apply(patch, before.get)
        assert {name: content for name, content in {**before, **changed_files}.items() if content is not None} == after


@pytest.mark.parametrize(
    "patch",
    [
        FILES + HUNK,
        f"diff --git a/model.py b/model.py\nindex 5c3f0a1..77b1c2d 100644\n{FILES}{HUNK}",
        f"--- model.py\t2026-01-01 10:00:00.0 +0000\n+++ model.py\t2026-01-02 10:00:00.0 +0000\n{HUNK}",
        f"diff -u model.py.orig model.py\n--- model.py.orig\t2026-01-01\n+++ model.py\t2026-01-02\n{HUNK}",
        f"--- old/model.py\t2026-01-01\n+++ new/model.py\t2026-01-02\n{HUNK}",
        f"From 5c3f0a1 Mon Sep 17\nSubject: [PATCH] lr\n\n---\n model.py | 2 +-\n\n{FILES}{HUNK}-- \n2.39.2\n",
        FILES + HUNK.replace("-4,2 +4,2", "-40,2 +40,2"),
        (FILES + HUNK).replace("\n", "\r\n"),
        FILES + "@@ -2,4 +2,4 @@\n\n\n def lr():\n-    return 0.1\n+    return 0.2\n",
        FILES + "@@ -5 +5 @@\n-    return 0.1\n+    return 0.2\n",
    ],
    ids=["bare", "git", "diff-u", "orig", "recursive", "mail", "moved", "crlf", "stripped", "no-context"],
)
def test_forms_of_the_same_patch_do_the_same(patch: str) -> None:
    assert apply(patch, CODE.get) == {"model.py": CHANGED}


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ("--- /dev/null\n+++ b/new/b.py\n@@ -0,0 +1 @@\n+b = 1\n", {"new/b.py": b"b = 1\n"}),
        (
            "--- old/b.py\t1970-01-01 00:00:00.0 +0000\n+++ new/b.py\t2026-01-02\n@@ -0,0 +1 @@\n+b = 1\n",
            {"b.py": b"b = 1\n"},
        ),
        ("diff --git a/pkg/b.py b/pkg/b.py\nnew file mode 100644\nindex 0000000..e69de29\n", {"pkg/b.py": b""}),
        (
            'diff --git "a/caf\\303\\251 \\"1\\".py" "b/caf\\303\\251 \\"1\\".py"\nnew file mode 100644\n'
            '--- /dev/null\n+++ "b/caf\\303\\251 \\"1\\".py"\n@@ -0,0 +1 @@\n+b = 1\n',
            {'café "1".py': b"b = 1\n"},
        ),
        (
            "diff --git a/pkg/a.py b/pkg/a.py\ndeleted file mode 100644\n--- a/pkg/a.py\n+++ /dev/null\n"
            "@@ -1 +0,0 @@\n-a = 1\n",
            {"pkg/a.py": None},
        ),
        (
            "diff --git a/pkg/a.py b/pkg/c.py\nsimilarity index 100%\nrename from pkg/a.py\nrename to pkg/c.py\n",
            {"pkg/a.py": None, "pkg/c.py": b"a = 1\n"},
        ),
        (
            "diff --git a/pkg/a.py b/pkg/c.py\nsimilarity index 60%\nrename from pkg/a.py\nrename to pkg/c.py\n"
            "--- a/pkg/a.py\n+++ b/pkg/c.py\n@@ -1 +1,2 @@\n a = 1\n+c = 2\n",
            {"pkg/a.py": None, "pkg/c.py": b"a = 1\nc = 2\n"},
        ),
        (
            "--- a/notes.txt\n+++ b/notes.txt\n@@ -1 +1,2 @@\n-no newline\n\\ No newline at end of file\n"
            "+no newline\n+one\n",
            {"notes.txt": b"no newline\none\n"},
        ),
        (
            "--- a/dos.py\n+++ b/dos.py\n@@ -1,2 +1,2 @@\n x = 1\r\n-y = 2\r\n+y = 3\r\n",
            {"dos.py": b"x = 1\r\ny = 3\r\n"},
        ),
        (
            FILES + HUNK + "@@ -8,2 +8,3 @@\n def width():\n+    # wide\n     return 64\n",
            {"model.py": CHANGED.replace(b"    return 64", b"    # wide\n    return 64")},
        ),
    ],
    ids=["new", "diff-new", "empty", "quoted", "deleted", "renamed", "renamed-changed", "newline", "crlf", "two-hunks"],
)
def test_files_are_created_deleted_renamed_and_changed(patch: str, expected: dict[str, bytes | None]) -> None:
    assert apply(patch, CODE.get) == expected


def created(name: str) -> str:
    return f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+b = 1\n"


OF_GIT = "diff --git a/model.py b/model.py\n"
HOSTILE = {
    "outside": (created("../x.py"), "'../x.py', which is outside of the code's directory"),
    "absolute": (created("/etc/cron.d/x"), "'/etc/cron.d/x', which is outside"),
    "plainly absolute": ("--- /dev/null\n+++ /etc/passwd\n@@ -0,0 +1 @@\n+x\n", "'/etc/passwd', which is outside"),
    "out and back": (created("pkg/../../x.py"), "'pkg/../../x.py', which is outside"),
    "quoted": ('--- /dev/null\n+++ "b/\\056\\056/x.py"\n@@ -0,0 +1 @@\n+x\n', "'../x.py', which is outside"),
    "renamed away": (
        "diff --git a/pkg/a.py b/../a.py\nrename from pkg/a.py\nrename to ../a.py\n",
        "'../a.py', which is outside",
    ),
    "nul": (created("x\0.py"), "which is outside"),
    "link": (
        "diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n\\ No newline\n",
        "line 2 of the patch is about a link, and a patch of code can change only files",
    ),
    "changed link": (f"{OF_GIT}index 1..2 120000\n{FILES}{HUNK}", "line 2 of the patch is about a link"),
    "submodule": ("diff --git a/s b/s\nnew file mode 160000\n", "is about a submodule"),
    "mode": (f"{OF_GIT}old mode 100644\nnew mode 100755\n", "line 2 of the patch changes a file's mode"),
    "setuid": ("diff --git a/s b/s\nnew file mode 104755\n", "no plain file, by its mode 104755"),
    "binary": (f"{OF_GIT}index 1..2 100644\nGIT binary patch\nliteral 3\n", "line 3 of the patch is about a binary"),
    "binary files": ("Binary files a/w.bin and b/w.bin differ\n", "line 1 of the patch is about a binary file"),
    "copy": ("diff --git a/model.py b/c.py\ncopy from model.py\ncopy to c.py\n", "git diff --no-renames"),
    "only in": ("Only in new: x.py\n", "Only in new: x.py, without its content; make the patch with diff -ruN"),
    "empty": ("", "the patch changes no file; make one with git diff or diff -u"),
    "no patch": ("please make the model better\n", "the patch changes no file"),
    "no such file": (FILES.replace("model", "modle") + HUNK, "changes modle.py, but the code has no such file"),
    "there already": (created("model.py"), "the patch creates model.py, but the code has it already"),
    "two files": ("--- model.py\n+++ notes.txt\n" + HUNK, "is it about model.py or notes.txt? the code has both"),
    "other lines": (
        FILES + HUNK.replace("0.1", "0.3"),
        "hunk 1 of model.py (line 3 of the patch): it expects '    return 0.3' at line 5, where the code has "
        "'    return 0.1'",
    ),
    "ambiguous": (
        FILES + "@@ -7 +7 @@\n-\n+#\n@@ -9 +9 @@\n-\n+#\n",
        "hunk 2 of model.py (line 6 of the patch): it expects '' at line 9",
    ),
    "several places": (FILES + "@@ -5 +5 @@\n-\n+#\n", "its lines are in several places, but not at line 5"),
    "second hunk": (
        FILES + HUNK + "@@ -8 +8 @@\n-def height():\n+def depth():\n",
        "hunk 2 of model.py (line 7 of the patch): it expects 'def height():' at line 8, where the code has 'def width",
    ),
    "overlapping": (FILES + HUNK + HUNK.replace("0.2", "0.3"), "hunk 2 of model.py"),
    "beyond the end": (FILES + "@@ -99,0 +100 @@\n+x\n", "it comes after line 99, which the code does not have"),
    "line ends": (
        "--- a/dos.py\n+++ b/dos.py\n@@ -1,2 +1,2 @@\n x = 1\n-y = 2\n+y = 3\n",
        "line 1 of the code ends in other characters: LF in the patch, CRLF there",
    ),
    "deleted in part": ("--- a/model.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-import torch\n", "not all of its lines"),
    "few lines": (FILES + HUNK.replace("-4,2", "-4,3"), "at line 3 of the patch has fewer lines than its header says"),
    "cut off": ("diff --git a/new.py b/new.py\nindex 0000000..77b1c2d\n", "nothing follows the header of the file"),
    "endless name": (f"--- {'a/' * 9999}\n+++ {'a/' * 9999}\n{HUNK}", " letters are left out ... "),
    "many lines": (FILES + HUNK + "+    # more\n", "has more lines than its header says"),
    "no counts": (FILES + "@@ ... @@\n-x\n+y\n", "line 3 of the patch must be like @@ -1,3 +1,4 @@, got '@@ ... @@'"),
    "no hunk": (FILES, "line 2 of the patch: no hunk"),
    "stray hunk": (HUNK, "line 1 of the patch: '@@ -4,2 +4,2 @@ def lr():' is not where the header"),
    "half a header": ("--- a/model.py\n" + HUNK, "line 1 of the patch: '--- a/model.py' is not where"),
    "no text": (FILES + HUNK.replace("0.2", "\ud800"), "the patch is not UTF-8 text"),
    "huge": (FILES + HUNK + "x" * MAX_PATCH_BYTES, "the patch has more than 524,288 bytes; give a directory"),
    "many ands": (f"Files{' and' * 60_000}\n", "changes no file"),
}  # fmt: skip


@pytest.mark.parametrize("which", HOSTILE)
def test_what_is_no_patch_of_these_files_is_one_clear_error(which: str) -> None:
    patch, says = HOSTILE[which]
    with pytest.raises(BadPatch) as error:
        apply(patch, CODE.get)
    assert says in str(error.value), str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_at_most_100_hunks_are_looked_for() -> None:
    code = {"long.py": b"".join(b"%d\n" % line for line in range(200))}
    hunks = [f"@@ -1 +1 @@\n-{line}\n+{line}.5\n" for line in range(10, 111)]
    long = "--- a/long.py\n+++ b/long.py\n"
    changed = apply(long + "".join(hunks[:100]), code.get)["long.py"]
    assert changed is not None
    assert changed.count(b".5\n") == 100
    with pytest.raises(BadPatch, match=r"hunk 101 of long.py \(line 303 of the patch\) is one of more than 100"):
        apply(long + "".join(hunks), code.get)
    with pytest.raises(BadPatch, match=r"hunk 51 of long.py .* is one of more than 100"):
        apply(long + "".join(hunks[:50]) + long + "".join(hunks[50:]), code.get)


@pytest.mark.parametrize(("content", "says"), [(b"--- a/caf\xe9.py\n", "is not UTF-8 text"), (None, "No such file")])
def test_a_file_that_is_no_text_is_no_patch(content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.diff").write_bytes(content)
    with pytest.raises(BadPatch, match=says):
        read_patch(tmp_path / "x.diff")


def test_a_binary_file_is_one_line_of_a_difference() -> None:
    assert [*difference("w.bin", b"\0", None)][-1] == "Binary files a/w.bin and /dev/null differ\n"
    with pytest.raises(BadPatch, match="is about a binary file"):
        apply("".join(difference("w.bin", b"\0", b"\0\0")), {"w.bin": b"\0"}.get)


def test_a_link_is_compared_and_not_followed(tmp_path: Path) -> None:
    for side, target in (("before", "/data/small"), ("after", "/etc/passwd")):
        (tmp_path / side).mkdir()
        (tmp_path / side / "data").symlink_to(target)
    (tmp_path / "after" / "file").symlink_to("/etc/passwd")
    patch = "".join(differences(tmp_path / "before", tmp_path / "after"))
    assert [line for line in patch.splitlines() if line[0] in "+-"] == [
        "--- a/data",
        "+++ b/data",
        "-/data/small",
        "+/etc/passwd",
        "--- /dev/null",
        "+++ b/file",
        "+/etc/passwd",
    ]
    with pytest.raises(BadPatch, match="is about a link"):
        apply(patch, CODE.get)


def test_a_long_change_is_a_replacement_that_applies() -> None:
    count = MAX_COMPARED_LINES + 10
    old = b"".join(b"%d\n" % (i % 7) for i in range(count)) + b"end\n" * 9
    new = b"first\n" + b"".join(b"%d\n" % (i % 5) for i in range(count)) + b"end\n" * 9
    patch = "".join(difference("data.py", old, new))
    assert patch.count("@@ -") == 1
    assert apply(patch, {"data.py": old}.get) == {"data.py": new}
