"""Determined's names: which of them dray has, and what to use instead of the others."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from dray.compat.names import COUNTERPARTS, MEMBERS, MISSING, MODULES, missing
from dray.migrate.scopes import DETERMINED

_EXCEPTIONS = ("Error", "Exception")
"""The alias has exception classes with these endings, which may be raised and caught."""

_KEPT = frozenset(
    {
        "determined.TrialInfo._config",
        "determined.TrialInfo._steps_completed",
        "determined.pytorch.PyTorchTrialContext._current_batch_idx",
        "determined.pytorch.PyTorchTrialContext._epoch_len",
    }
)
"""Determined's private attributes that dray has, because Determined's own examples use them."""


def public(module: str) -> list[str]:
    """The names that a star import of this Determined module brings."""
    inside = (path.removeprefix(f"{module}.") for path in (*COUNTERPARTS, *MISSING) if path.startswith(f"{module}."))
    return [name for name in inside if "." not in name and not name.startswith("_")]


def why_not(path: str) -> str | None:
    """What to do instead of using this dotted name of Determined; None if dray has it."""
    for prefix in _prefixes(path):
        if prefix in MEMBERS:
            return MEMBERS[prefix]
        if prefix in MODULES or prefix == DETERMINED:
            rest = path.removeprefix(prefix).removeprefix(".")
            return _not_in(prefix, rest.partition(".")[0]) if rest else None
        if prefix in COUNTERPARTS:
            member = path.removeprefix(prefix).removeprefix(".").partition(".")[0]
            is_private = member.startswith("_") and not member.startswith("__") and f"{prefix}.{member}" not in _KEPT
            # The tables do not list other attributes of a class.
            return f"{member} is private to Determined, and dray does not have it" if is_private else None
        if prefix in MISSING:
            return None if path.endswith(_EXCEPTIONS) or prefix == "determined.errors" else MISSING[prefix]
    raise AssertionError(f"{path} is none of Determined's names")


def is_nowhere(path: str) -> bool:
    """Whether neither Determined nor dray has this name, so that importing it fails."""
    return missing(path) is None and why_not(path) is not None


def _not_in(module: str, name: str) -> str | None:
    home = DETERMINED + MODULES.get(module, "dray").removeprefix("dray")  # for a private module, the public one
    if f"{home}.{name}" in COUNTERPARTS or name.startswith("__"):
        return None
    if name.startswith("_"):
        return f"{name} is private to Determined, and dray does not have it; use public names of {module}"
    near = difflib.get_close_matches(name, public(home), n=1)
    return f"neither Determined nor dray has it; did you mean {home}.{near[0]}?" if near else "dray has no such name"


def _prefixes(path: str) -> Iterator[str]:
    """``a.b.c``, ``a.b``, ``a``."""
    while path:
        yield path
        path = path.rpartition(".")[0]
