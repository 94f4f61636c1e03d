"""Draw docs/architecture.svg: the packages of dray as rows of boxes, from the import graph and the layers in
pyproject.toml. ``python docs/rooms.py`` writes it.

An arrow is an import. One that others imply (a imports b, which imports c: a to c) is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import grimp
import tomllib

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, BOX, GAP, MARGIN = 900, 30, 34, 16
STYLE = """
  rect { fill: #e8eef7; stroke: #4a6fa5; } text { font: 13px sans-serif; text-anchor: middle; fill: #1b2a41; }
  path { fill: none; stroke: #7d8fa8; opacity: .7; }
  @media (prefers-color-scheme: dark) { rect { fill: #22304a; } text { fill: #e6ecf5; } path { stroke: #8fa3bf; } }
"""


def floors() -> list[list[str]]:
    """The packages, top layer first; `searchers`, which does not import dray, is at the bottom."""
    [layers] = [
        contract["layers"]
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]
    return [*([room.strip() for room in re.split("[:|]", layer)] for layer in layers), ["searchers"]]


def imports(rooms: Sequence[str]) -> dict[str, set[str]]:
    """Which other packages each package imports, without the imports that others imply."""
    graph = grimp.build_graph("dray", "searchers", cache_dir=None)
    home = {
        module: room for module in graph.modules for room in rooms if module == room or module.startswith(f"{room}.")
    }
    found: dict[str, set[str]] = {room: set() for room in rooms}
    for module, room in home.items():
        for imported in graph.find_modules_directly_imported_by(module):
            if home.get(imported, room) != room:
                found[room].add(home[imported])
    return {
        room: {one for one in direct if not any(one in _reached(found, other) for other in direct - {one})}
        for room, direct in found.items()
    }


def _reached(edges: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        new = edges[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def svg() -> str:
    """The whole picture."""
    rows = floors()
    edges = imports([room for row in rows for room in row])
    centre, boxes = {}, []
    for n, row in enumerate(rows):
        y, step = MARGIN + n * (BOX + GAP), WIDTH / len(row)
        for k, room in enumerate(row):
            # Rows of one box alternate left and right of the middle, so that arrows do not hide each other.
            x = step * (k + 0.5) + (90 * (n % 3 - 1) if len(row) == 1 else 0)
            centre[room] = x, y
            name = room.removeprefix("dray.")
            half = 10 + 4 * len(name)
            boxes += [
                f'<rect x="{x - half:.0f}" y="{y}" width="{2 * half}" height="{BOX}" rx="5"/>',
                f'<text x="{x:.0f}" y="{y + 20}">{name}</text>',
            ]
    arrows = []
    for room in centre:
        for imported in sorted(edges[room]):
            (x, y), (to_x, to_y) = centre[room], centre[imported]
            y, middle = y + BOX, (y + BOX + to_y) / 2
            arrows.append(f'<path d="M{x:.0f} {y} C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y}"/>')
    height = 2 * MARGIN + len(rows) * (BOX + GAP) - GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *arrows, *boxes, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg())
    print(f"wrote {PICTURE}")
