"""The command ``dray``: experiments, their trials and their checkpoints, from a terminal or a script.

Exit codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C. What goes wrong is told on standard error, after
``dray:``; what is read goes to standard output, as a table or, with ``--json``, as one JSON value. ``docs/cli.md``.

Each command imports what it needs within itself: ``dray --help`` answers at once, and what only reads imports neither
torch nor Ray.
"""

from dray.cli.command import app, main

__all__ = ["app", "main"]
