"""The page's files as one document, which needs no server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from string import Template

from dray.serve.site import FILES

ENTRY = "report.js"
STYLES = ("uplot.css", "page.css")
IMPORT = re.compile(r'^import (?:(\w+)|\{([^}]*)\}) from "\./(?:lib/)?([\w-]+\.js)";$', re.MULTILINE)
EXPORT_FROM = re.compile(r'^export \{([^}]*)\} from "\./([\w-]+\.js)";$', re.MULTILINE)
EXPORTS = re.compile(r"export ?\{([^}]*)\};?\s*\Z")
EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const|let) (\w+))", re.MULTILINE)
DOCUMENT = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body class="report">
<div id="app"><noscript>This report needs JavaScript.</noscript></div>
<script id="saved" type="application/json">$saved</script>
<script>$script</script>
</body>
</html>
""")


def document(title: str, saved: str) -> str:
    """The report as HTML. `saved`: the JSON that ``data.js`` reads in place of a server's answers."""
    script, style = _script(), "".join(FILES[name].read_text(encoding="utf-8") for name in STYLES)
    # Nothing is loaded, and nothing else runs, whatever the names and texts of an experiment are.
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    # In JSON, "<" is only within texts.
    safe = saved.replace("<", "\\u003c")
    return DOCUMENT.substitute(title=escape(title), policy=policy, style=style, saved=safe, script=script)


@cache
def _script() -> str:
    """The modules that the report needs, each in a function, in the order of their imports."""
    modules = "".join(f'modules["{name}"] = (() => {{\n{_as_function(name)}\n}})();\n' for name in _needed(ENTRY, {}))
    return f'"use strict";\n(() => {{\nconst modules = {{}};\n{modules}}})();\n'.replace("</script", "<\\/script")


def _needed(name: str, seen: dict[str, None]) -> Iterator[str]:
    """A module after those that it imports; without those in `seen`."""
    if name in seen:
        return
    seen[name] = None
    text = FILES[name].read_text(encoding="utf-8")
    for each in [*(found[3] for found in IMPORT.finditer(text)), *(found[2] for found in EXPORT_FROM.finditer(text))]:
        yield from _needed(each, seen)
    yield name


def _as_function(name: str) -> str:
    """The body of a function that returns what a module exports."""
    text, exports = FILES[name].read_text(encoding="utf-8"), list[str]()

    def imported(found: re.Match[str]) -> str:
        default, names, module = found.groups()
        return f'const {{ {f"default: {default}" if default else _renamed(names)} }} = modules["{module}"];'

    def passed_on(found: re.Match[str]) -> str:
        exports.append(found[1])
        return f'const {{{found[1]}}} = modules["{found[2]}"];'

    def listed(found: re.Match[str]) -> str:
        exports.append(re.sub(r"(\w+) as (\w+)", r"\2: \1", found[1]))
        return ""

    def declared(found: re.Match[str]) -> str:
        exports.append(found[2])
        return found[1]

    ways = [(EXPORTS, listed)]
    if FILES[name].parent.name != "lib":  # which says all at its end, and has other things in comments
        ways += [(IMPORT, imported), (EXPORT_FROM, passed_on), (EXPORT, declared)]
    for pattern, replace in ways:
        text = pattern.sub(replace, text)
    return f"{text.replace('import.meta.url', 'document.baseURI')}\nreturn {{ {', '.join(exports)} }};"


def _renamed(names: str) -> str:
    return re.sub(r"(\w+) as (\w+)", r"\1: \2", names)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
