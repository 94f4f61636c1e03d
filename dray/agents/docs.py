"""The pages of dray's docs that agents need, in pieces that fit an answer."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import dray
from dray.agents.answers import MOST_BYTES
from dray.errors import NoExperiment

SKILL = "agents"
PAGES = {
    SKILL: "How to work with dray: read this first",
    "concepts": "The terms: experiment, trial, rung, slot, worker group",
    "pytorch-api": "The trial API that model code is written in",
    "core-api": "Programs with their own training loop",
    "config": "Every field of the experiment file",
    "search": "Search methods, samplers, resuming and extending",
    "early-stopping": "How rungs stop bad trials early",
    "budgets": "Limits of time, slot-hours and money, and what is left at one",
    "steering": "Adding, forking and stopping trials of a running search",
    "results": "Reading results from Python",
    "faults": "What happens to a trial that fails",
    "serve": "The server: its queue, its HTTP API, its safety",
    "cli": "The command dray",
}


@cache
def page(name: str) -> str:
    """The text of a page, without the links to other pages."""
    if name not in PAGES:
        raise NoExperiment(f"there is no page {name!r:.60}; the pages are: {', '.join(PAGES)}")
    package = Path(dray.__file__).parent
    installed = package / "docs"  # where the wheel has them
    folder = installed if installed.exists() else package.parent / "docs"
    return (folder / f"{name}.md").read_text(encoding="utf-8")


def sections(name: str) -> dict[str, str]:
    """The sections of a page by their headings as in its links; a page's beginning is "start"."""
    found = {"start": ""}
    current, fenced = "start", False
    for line in page(name).splitlines(keepends=True):
        fenced ^= line.startswith("```")
        if not fenced and (heading := re.match(r"#{2,3} (.+)", line)):
            current = re.sub(r"[^\w -]", "", heading[1].lower()).strip().replace(" ", "-")
            found[current] = ""
        found[current] += line
    return found


def read(name: str, section: str = "") -> str:
    """A page or a section of it. What does not fit an answer is cut, and the end says what follows where."""
    parts = sections(name)
    if section and section not in parts:
        raise NoExperiment(f"page {name} has no section {section!r:.60}; its sections are: {', '.join(parts)}")
    text = parts[section] if section else page(name)
    if len(text.encode()) <= MOST_BYTES:
        return text
    names = "" if section else f" The page's sections, to be read one by one: {', '.join(parts)}."
    note = "\n[Cut here: {} more characters." + names + "]\n"
    room = MOST_BYTES - len(note.encode()) - 10
    kept = text.encode()[:room].decode(errors="ignore").rpartition("\n")[0]
    return kept + note.format(len(text) - len(kept))
