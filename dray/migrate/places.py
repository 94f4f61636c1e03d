"""Paths that exist only in Determined's containers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from dray.migrate.finding import Verdict

Mounts: TypeAlias = Mapping[str, str]
"""Paths in a container to paths of the machine: ``bind_mounts`` of the experiment files."""

_WORKDIR = "/run/determined/workdir"
_CHECKPOINTS = "/determined_shared_fs"


def mounts_of(raw: Mapping[object, object]) -> dict[str, str]:
    """The bind mounts of an experiment file whose path in the container differs from that on the machine."""
    found = {}
    mounts = raw.get("bind_mounts")
    for each in mounts if isinstance(mounts, list) else []:
        if isinstance(each, Mapping):
            there, here = each.get("container_path"), each.get("host_path")
            # A relative path is below the working directory, and can't be told from other words.
            if isinstance(there, str) and isinstance(here, str) and there.startswith("/") and there != here:
                found[there.rstrip("/")] = here.rstrip("/")
    return found


def of_container(text: str, mounts: Mounts) -> tuple[Verdict, str] | None:
    """The finding for a text that is a path in a container; None for any other text."""
    if _below(text, _WORKDIR):
        return "change", (
            f"{_WORKDIR} exists only in Determined's containers; the working directory is the model's directory here, "
            f"too: write {_rest(text, _WORKDIR) or '.'}"
        )
    if _below(text, "/run/determined"):
        return (
            "change",
            f"{text} exists only in Determined's containers; use dray.get_cluster_info()",
        )
    if _below(text, _CHECKPOINTS):
        return "change", f"{_CHECKPOINTS} exists only in Determined's containers; give the path on Ray's nodes"
    for there, here in mounts.items():
        if _below(text, there):
            return "look", (
                f"{there} is where bind_mounts put {here} in Determined's containers; dray mounts nothing, so write "
                f"{here}{text[len(there) :]}, or make {there} a link to it on Ray's nodes"
            )
    return None


def _below(text: str, place: str) -> bool:
    return text == place or text.startswith(f"{place}/")


def _rest(text: str, place: str) -> str:
    return text.removeprefix(place).strip("/")
