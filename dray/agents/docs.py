"""The pages of dray's docs, in pieces that fit an answer."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import dray
from dray.agents.answers import MOST_BYTES
from dray.errors import NoExperiment

_PACKAGE = Path(dray.__file__).parent
_INSTALLED = _PACKAGE / "docs"  # where the wheel has them
_FOLDER = _INSTALLED if _INSTALLED.exists() else _PACKAGE.parent / "docs"
SKILL = "agents"


@cache
def titles() -> dict[str, str]:
    """The pages with their titles, the skill first."""
    names = sorted((path.stem for path in _FOLDER.glob("*.md")), key=lambda name: (name != SKILL, name))
    return {name: page(name).partition("# ")[2].partition("\n")[0] for name in names}


@cache
def page(name: str) -> str:
    """The text of a page."""
    try:
        return (_FOLDER / f"{Path(name).name}.md").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NoExperiment(f"there is no page {name!r:.60}; the pages are: {', '.join(titles())}") from None


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
