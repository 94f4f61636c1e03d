"""What a report's file has in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Written(HTMLParser):
    """A report, read as a browser does.

    Attributes:
        title, policy: the document's title, and its Content-Security-Policy.
        script, style: what runs, and how it looks.
        addresses: of other files, which would be loaded.
        answers: what the page is told, by path and query.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.title = self.policy = self.script = self.style = ""
        self.addresses, self._saved, self._in = list[str](), "", ""
        self.feed(file.read_text(encoding="utf-8"))
        self.saved: dict[str, Any] = json.loads(self._saved)
        self.answers = {(path, *query.values()): body for path, query, body in self.saved["answers"]}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._in = "saved" if found.get("id") == "saved" else tag
        self.policy = self.policy or str(found["content"]) if "http-equiv" in found else self.policy
        self.addresses += [str(found[name]) for name in ("src", "href", "action", "data") if name in found]

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        match self._in:
            case "saved":
                self._saved += data
            case "script":
                self.script += data
            case "style":
                self.style += data
            case "title":
                self.title += data

    @property
    def about(self) -> Any:
        return self.answers[("",)]

    def figures(self, kind: str) -> Any:
        return self.answers[f"/figures/{kind}",]["figures"]
