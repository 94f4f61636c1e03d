"""Bugs of users' code, by the names that `tests/ray/trials/bugs.py` has for them, and how their errors begin."""

from __future__ import annotations

import shutil
from pathlib import Path

TRIALS = Path(__file__).parent / "ray" / "trials"

CLASS = "python3 -m determined.launch.torch_distributed --trial bugs:Buggy"
PROGRAM = "python3 -m determined.launch.torch_distributed python3 bugs.py"

RAISES = ["ArithmeticError: went wrong", "  bugs.py:", 'raise ArithmeticError("went wrong")']
SYNTAX = ["SyntaxError: invalid syntax (bugs_syntax.py, line 1)", "  bugs_syntax.py:1, in <module>", "def broken(:"]
IMPORT = [
    "ModuleNotFoundError: No module named 'no_such_library'",
    "  bugs_import.py:3, in <module>",
    "import no_such_library",
]
DIED = ["a process of worker group group-"]
# Not what the other rank says of it, whose connection is closed long before Ray notices.
DIED_FIRST = ["the process of rank 0 of worker group group-"]
DIED_LAST = ["the process of rank 1 of worker group group-"]
CRASHED_LAST = ["the process of rank 1 of worker group group-0 died: Segmentation fault", "  bugs.py:", ""]
LEFT_ALONE = [
    "rank 0 is blocked in a collective; rank 1 already exited",
    "  bugs.py:",
    "dist.barrier()",
]
EXIT_3 = [f"{PROGRAM} exited with code 3", "  bugs.py:", "sys.exit(3)"]
EXIT_TEXT = [f"{PROGRAM} exited with code 1", "  bugs.py:", 'sys.exit("no data")']
EXIT_0 = [f"{PROGRAM} exited with code 0 during training; to end training early", "  bugs.py:", "sys.exit()"]

# By bug: how its error begins, line by line. None: there is none.
OF_A_CLASS: dict[str, list[str] | None] = {
    "none": None,
    "made: exception": RAISES,
    "made: syntax": SYNTAX,
    "made: import": IMPORT,
    "batch: exception": RAISES,
    "batch: exit 0": ["SystemExit", "  bugs.py:", "sys.exit()"],
    "batch: exit 3": ["SystemExit: 3", "  bugs.py:", "sys.exit(3)"],
    "batch: exit text": ["SystemExit: no data", "  bugs.py:", 'sys.exit("no data")'],
    "validation: exception": RAISES,
    "none again": None,
}
OF_A_PROGRAM: dict[str, list[str] | None] = {
    "none": None,
    "before: syntax": SYNTAX,
    "before: import": IMPORT,
    "before: exception": RAISES,
    "before: exit 3": EXIT_3,
    "before: exit text": EXIT_TEXT,
    "made: exception": RAISES,
    "made: exit 3": EXIT_3,
    "batch: exception": RAISES,
    "batch: exit 0": EXIT_0,
    "batch: exit 3": EXIT_3,
    "fit twice": ["RuntimeError: a trial of an experiment can call fit() only once", "  bugs.py:", "trainer.fit("],
    "after: exception": RAISES,
    "after: exit 0": None,
    "after: exit 3": EXIT_3,
    "core: nothing at all": None,
    "core: exception": RAISES,
    "core: exit 3": EXIT_3,
    "none again": None,
}
# Of one rank of two. What that rank does to the other one is seen after a restart of both, which takes its time.
OF_A_RANK: dict[str, list[str] | None] = {
    "none": None,
    "before: exit 3": EXIT_3,
    "made: exception": RAISES,
    "batch: exit 0": EXIT_0,
    "batch: exit 3": EXIT_3,
    "after: exception": RAISES,
    "after: exit 3": EXIT_3,
    "core: exception": RAISES,
    "core: pause": None,
    "core: barrier": LEFT_ALONE,
    "none again": None,
}
DEATH_OF_A_RANK: dict[str, list[str] | None] = {
    "before: end": DIED_LAST,
    "batch: end": DIED_LAST,
    "first batch: end": DIED_FIRST,
    "batch: segfault": CRASHED_LAST,
    "after: end": DIED_LAST,
    "none at last": None,
}


def model_dir(directory: Path) -> Path:
    """A model directory with these bugs."""
    model = directory / "model"
    shutil.copytree(TRIALS, model, ignore=shutil.ignore_patterns("__pycache__"))
    (model / "bugs_syntax.py").write_text("def broken(:\n    pass\n")
    (model / "bugs_import.py").write_text("\n\nimport no_such_library\n")
    return model


def check_error(bug: str, error: str, begins: list[str] | None) -> None:
    """That it begins so: each line with the one expected, whatever it is indented by."""
    told = error.splitlines()
    assert bool(told) == (begins is not None), (bug, error)
    for line, begin in zip(told, begins or [], strict=False):
        assert line.startswith(begin) or line.strip().startswith(begin), (bug, told[:3])
