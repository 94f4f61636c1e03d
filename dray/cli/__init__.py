"""The command ``dray``: experiments, their trials and their checkpoints, from a terminal or a script.

Exit codes: 0 done, 1 failed, 2 bad input, 3 done but some trials failed, 128 + n stopped by signal n. Errors go to
standard error, after ``dray:``; results go to standard output, as a table or, with ``--json``, as one JSON value. See
``docs/cli.md``.

Each command imports what it needs in its own function: ``dray --help`` answers at once, and commands that only read
import neither torch nor Ray.
"""

from dray.cli.command import app, main

__all__ = ["app", "main"]
