"""Hooks of MkDocs: an anchor for each field of the config, links to files of the repository, CONTRIBUTING.md and
CHANGELOG.md as pages, descriptions, the weight of pages in a search; and for programs each page as Markdown, and a
list of them, llms.txt."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
#: The folders of the repository that are not installed.
FILES = re.compile(r"(?<!\[)`((?:bench|clusters|docs|examples|tests)/[\w/.-]+|Makefile|constraints\.txt)`(?!\])")
AT_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_config(config: Any) -> None:
    """The addresses are those of the project, in pyproject.toml."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.site_url, config.repo_url = urls.get("Documentation", ""), urls.get("Repository", "")


def on_files(files: Any, config: Any) -> None:
    for source, name in AT_ROOT.items():
        files.append(File.generated(config, name, content=as_page((ROOT / source).read_text())))


def as_page(text: str) -> str:
    """A file of the repository's root as a page: with links to pages, and to no other files."""
    text = re.sub(r"\]\(docs/([\w-]+\.(?:md|svg))", r"](\1", text)
    return re.sub(r"\[([^\]]+)\]\((?:README\.md|(?:[\w-]+/)+[\w.-]*)\)", r"\1", text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    page.meta.setdefault("description", description(markdown))
    if page.file.src_uri in ("pytorch-api.md", "searchers-api.md"):
        # Each class is a heading there, which would come before the field of the config that has its name.
        page.meta["search"] = {"boost": 0.5}
    if page.file.src_uri == "config.md":
        markdown = with_anchors(markdown)
    return with_links(markdown, config.repo_url)


def description(markdown: str) -> str:
    """The first sentence of a page, without markup."""
    text = re.sub(r"^---\n.*?^---$|<!--.*?-->|^```.*?^```$|^#[^\n]*$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraph = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text.strip().partition("\n\n")[0])
    return re.split(r"(?<=\.) ", " ".join(re.sub(r"[`*]", "", paragraph).split()), maxsplit=1)[0].rstrip(":")


def with_anchors(markdown: str) -> str:
    """The page of the config with an anchor for each field, such as config.html#searcher.max_trials."""
    section, lines = "", []
    for line in markdown.splitlines():
        if heading := re.match(r"## `?([\w.\[\]]+)", line):
            section = "" if heading[1] == "The" else heading[1].replace("[]", "").lower() + "."
        lines.append(re.sub(r"^\| `(\w+)` \|", rf"| [`\1`](#{section}\1){{#{section}\1}} |", line))
    return "\n".join(lines)


def with_links(markdown: str, repository: str) -> str:
    """Files of the repository that are named outside of blocks of code, as links into it, if it has an address."""
    if not repository:
        return markdown
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    link = rf"[`\1`]({repository.rstrip('/')}/blob/main/\1)"
    return "".join(part if part.startswith("```") else FILES.sub(link, part) for part in parts)


def on_post_build(config: Any) -> None:
    """Write the copies."""
    site, lines = Path(config.site_dir), [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    sources = {name: as_page((ROOT / source).read_text()) for source, name in AT_ROOT.items()}
    sources |= {path.name: path.read_text() for path in sorted(Path(config.docs_dir).glob("*.md"))}
    for name, text in sources.items():
        (site / name).write_text(text)
    for section in config.nav:
        [(title, pages)] = section.items()
        lines += [f"## {title}", ""]
        for page in pages:
            [(label, name)] = page.items()
            lines.append(f"- [{label}]({config.site_url}{name}): {description(sources[name])}")
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines))
