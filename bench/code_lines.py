"""Counts lines of code, without docstrings, comments and blank lines, by folder.

    python bench/code_lines.py [--files 10] [TREE ...]

Several trees, such as two commits', are printed side by side.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PRODUCT = ("dray", "searchers")
_BLANK = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """The number of lines that have code.

    >>> code_lines('def f():\\n    "Docs."\\n\\n    # why\\n    return (1 +\\n        2)\\n')
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A docstring, or another text on its own, such as one below an attribute.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def counted(tree: Path) -> dict[str, int]:
    """The code lines of each Python file of the product, the tests and the rest, by its path."""
    tops = (*PRODUCT, "tests", "bench", "examples", "docs")
    files = (file for top in tops for file in sorted((tree / top).rglob("*.py")))
    return {str(file.relative_to(tree)): code_lines(file.read_text()) for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--files", type=int, default=0, help="also print this many of the largest files")
    arguments = parser.parse_args()
    found = [counted(tree) for tree in arguments.trees]
    folders = [Counter[str]() for _ in found]
    for files, sums in zip(found, folders, strict=True):
        for name, lines in files.items():
            parts = Path(name).parts
            sums["product" if parts[0] in PRODUCT else parts[0]] += lines
            if len(parts) > 2:
                sums["/".join(parts[:2])] += lines
    for name in sorted(folders[0].keys() | folders[-1].keys(), key=lambda each: ("/" in each, each)):
        print(f"{name:36}", *(f"{sums[name]:8,}" for sums in folders))
    for name, lines in sorted(found[-1].items(), key=lambda item: -item[1])[: arguments.files]:
        print(f"{name:60} {lines:6,}")


if __name__ == "__main__":
    main()
