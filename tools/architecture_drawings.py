"""SVG drawings of the rooms and of one training step.

Both have an opaque background, so that they are legible on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from html import escape

from package_imports import transitive_reduction
from package_walk import Entry

INK, FAINT, LINE, PAPER = "#1f2933", "#5f6c7b", "#7b8794", "#ffffff"
PALETTE = ("#dbeafe", "#dcfce7", "#fef3c7", "#fae8ff", "#ffe4e6", "#e0f2fe", "#ecfccb", "#ede9fe")
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
MARGIN = 24

BOX_WIDTH, BOX_GAP, LAYER_GAP, LINE_HEIGHT = 350, 24, 34, 18

ROW_HEIGHT, FILE_HEIGHT, INDENT = 30, 24, 28
BOLD_LETTER, LETTER = 8.3, 7.0  # widths that are reserved for a letter

Graph = Mapping[str, set[str]]


def draw_rooms(graph: Graph, labels: Mapping[str, Sequence[str]]) -> str:
    """Draw rooms as boxes in layers. An arrow goes to each imported room, unless a path of other
    arrows already leads there.
    """
    arrows = transitive_reduction({room: set(targets) for room, targets in graph.items()})
    layers = _layers(graph)
    centers = _centers(layers, arrows)
    tops, heights = _vertical_places(layers, labels)
    parts = []
    for room, targets in arrows.items():
        for target in sorted(targets):
            bottom = tops[room] + heights[room]
            parts.append(_arrow(centers[room], bottom, centers[target], tops[target]))
    for room, lines in labels.items():
        left = centers[room] - BOX_WIDTH / 2
        parts.append(_box(left, tops[room], BOX_WIDTH, heights[room], PALETTE[0]))
        parts += _lines(centers[room], tops[room] + 21, lines)
    width = max(centers.values()) + BOX_WIDTH / 2 + MARGIN
    height = max(tops[room] + heights[room] for room in labels) + 2 * MARGIN
    caption = (
        "An arrow points to an imported room. Imports that follow from other arrows are left out."
    )
    parts.append(_text(MARGIN, height - MARGIN / 2, caption, color=FAINT, size=12))
    return _document(width, height, parts)


def _vertical_places(
    layers: Sequence[Sequence[str]], labels: Mapping[str, Sequence[str]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Where each box begins, and how high it is. Boxes of one layer have the same height."""
    tops, heights, top = {}, {}, MARGIN
    for layer in reversed(layers):
        height = 16 + LINE_HEIGHT * max(len(labels[room]) for room in layer)
        for room in layer:
            tops[room], heights[room] = top, height
        top += height + LAYER_GAP
    return tops, heights


def _layers(graph: Graph) -> list[list[str]]:
    """Rooms by the length of the longest path to a room that imports nothing, bottom first."""
    depth: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        depth[room] = max((depth[target] + 1 for target in graph[room]), default=0)
    return [sorted(room for room in depth if depth[room] == at) for at in sorted({*depth.values()})]


def _centers(layers: Sequence[Sequence[str]], arrows: Graph) -> dict[str, float]:
    """Horizontal centers. A room that is alone in its layer is above the rooms that it imports."""
    pitch = BOX_WIDTH + BOX_GAP
    middle = MARGIN + BOX_WIDTH / 2 + (max(len(layer) for layer in layers) - 1) * pitch / 2
    centers: dict[str, float] = {}
    for layer in layers:
        first = middle - (len(layer) - 1) * pitch / 2
        for index, room in enumerate(layer):
            alone = len(layer) == 1 and arrows[room]
            centers[room] = (
                _mean(centers[target] for target in arrows[room])
                if alone
                else first + pitch * index
            )
    return centers


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def draw_step(phases: Mapping[str, Sequence[Entry]]) -> str:
    """Draw one step: a tree of files for each function that the training loop calls.

    Each file is drawn below the file that calls it most.
    """
    entries = [entry for phase in phases.values() for entry in phase]
    rooms = sorted({_room(entry) for entry in entries})
    color = {room: PALETTE[index % len(PALETTE)] for index, room in enumerate(rooms)}
    file_width = max(len(entry.file) for entry in entries) * BOLD_LETTER + 20
    parts: list[str] = []
    rows, right = 0.0, 0.0

    def draw(
        entry: Entry, siblings: Sequence[Entry], parents: Mapping[str, str | None], depth: int
    ) -> None:
        nonlocal rows, right
        left, top = MARGIN + INDENT * depth, MARGIN + ROW_HEIGHT * rows
        middle, bottom = top + FILE_HEIGHT / 2, top + FILE_HEIGHT
        rows += 1
        parts.append(_box(left, top, file_width, FILE_HEIGHT, color[_room(entry)]))
        parts.append(_text(left + 10, middle + 4, entry.file, weight="bold"))
        functions = _abridged(entry.functions)
        parts.append(_text(left + file_width + 12, middle + 4, functions, color=FAINT, size=13))
        right = max(right, left + file_width + 12 + len(functions) * LETTER)
        for child in siblings:
            if parents[child.file] == entry.file:
                child_middle = MARGIN + ROW_HEIGHT * rows + FILE_HEIGHT / 2
                parts.append(_path(f"M{left + 12} {bottom:g} V{child_middle:g} H{left + INDENT}"))
                draw(child, siblings, parents, depth + 1)

    for phase, files in phases.items():
        parts.append(_text(MARGIN, MARGIN + ROW_HEIGHT * rows + 18, f"{phase}()", weight="bold"))
        rows += 1
        parents = _parents(files)
        for entry in files:
            if parents[entry.file] is None:
                draw(entry, files, parents, 0)
        rows += 0.5
    return _document(right + MARGIN, 2 * MARGIN + ROW_HEIGHT * rows, parts)


def _parents(entries: Sequence[Entry]) -> dict[str, str | None]:
    """For each file the most frequent caller that is not one of its own descendants."""
    parents: dict[str, str | None] = {entry.file: None for entry in entries}
    for entry in entries:
        for caller, _ in entry.callers.most_common():
            if caller in parents and entry.file not in _ancestors(caller, parents):
                parents[entry.file] = caller
                break
    return parents


def _ancestors(file: str, parents: Mapping[str, str | None]) -> list[str]:
    found = [file]
    while (parent := parents[found[-1]]) is not None:
        found.append(parent)
    return found


def _abridged(functions: Sequence[str]) -> str:
    """The first two names, so that the drawing stays narrow."""
    return ", ".join(functions[:2]) + (", ..." if len(functions) > 2 else "")


def _room(entry: Entry) -> str:
    return entry.file.split("/")[0]


def _document(width: float, height: float, parts: Iterable[str]) -> str:
    size = f"width='{width:g}' height='{height:g}' viewBox='0 0 {width:g} {height:g}'"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' {size} {FONT}>",
            "<defs><marker id='head' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='8' "
            "markerHeight='8' orient='auto'>"
            f"<path d='M0 0 L8 4 L0 8 z' fill='{LINE}'/></marker></defs>",
            f"<rect width='{width:g}' height='{height:g}' rx='8' fill='{PAPER}'/>",
            *parts,
            "</svg>\n",
        ]
    )


def _box(left: float, top: float, width: float, height: float, color: str) -> str:
    shape = f"x='{left:g}' y='{top:g}' width='{width:g}' height='{height:g}' rx='6'"
    return f"<rect {shape} fill='{color}' stroke='{LINE}'/>"


def _lines(center: float, top: float, lines: Sequence[str]) -> list[str]:
    """A bold line, and others below it."""
    return [
        _text(
            center,
            top + LINE_HEIGHT * index,
            line,
            anchor="middle",
            weight="normal" if index else "bold",
            size=12 if index else 14,
            color=FAINT if index else INK,
        )
        for index, line in enumerate(lines)
    ]


def _text(
    x: float,
    y: float,
    text: str,
    *,
    color: str = INK,
    size: int = 13,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    style = f"font-size='{size}' font-weight='{weight}' text-anchor='{anchor}' fill='{color}'"
    return f"<text x='{x:g}' y='{y:g}' {style}>{escape(text)}</text>"


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return _path(f"M{x:g} {y:g} L{to_x:g} {to_y:g}", " marker-end='url(#head)'")


def _path(steps: str, end: str = "") -> str:
    return f"<path d='{steps}' fill='none' stroke='{LINE}' stroke-width='1.5'{end}/>"
