"""The layout of a tree: positions of its leaves and nodes in a picture, and the picture as SVG for the page.

Leaves stand on one line, a node stands above the middle of its leaves, one level higher than what is below it. Edges go
down from a bar between two levels, so that none crosses a box. Units are CSS pixels at a font size of 12. Widths are those
of DejaVu Sans, which is wider than most fonts of a browser.
"""

from dataclasses import dataclass
from functools import cache
from html import escape

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from treenet.analysis.attention_stats import display_label
from treenet.report.sentence_views import WORD_START, View

FONT_SIZE = 12
BOX_HEIGHT = 28
_LEVEL = 42  # from one level to the next
_PADDING = 5  # left and right of a text
_GAP, _INNER_GAP = 9, 3  # between words, and between the pieces of one
_SHARE_WIDTH = 22  # the number under a text needs as much
_MARGIN = 8


@dataclass(frozen=True)
class Box:
    """A leaf or node at its position among the keys: the middle of its box, and its half width."""

    text: str
    is_leaf: bool
    phrase: str  # the words it stands for
    x: float
    y: float
    half: float


@dataclass(frozen=True)
class TreeLayout:
    width: float
    height: float
    boxes: list[Box]  # by position: leaves, then nodes in pre-order
    edges: list[tuple[int, int]]  # (parent, child) positions

    def corners(self) -> list[list[tuple[float, float]]]:
        """Return each edge as the points of a line: down from the parent, aside, down to the child."""
        lines = []
        for parent, child in self.edges:
            upper, lower = self.boxes[parent], self.boxes[child]
            top, bottom = upper.y + BOX_HEIGHT / 2, lower.y - BOX_HEIGHT / 2
            bar = top + (_LEVEL - BOX_HEIGHT) / 2
            lines.append([(upper.x, top), (upper.x, bar), (lower.x, bar), (lower.x, bottom)])
        return lines


@cache
def _font() -> FT2Font:
    font = FT2Font(font_manager.findfont("DejaVu Sans"))
    font.set_size(FONT_SIZE, 72)
    return font


@cache
def _character_width(character: str) -> float:
    font = _font()
    if not font.get_char_index(ord(character)):
        return FONT_SIZE  # another font draws it, East Asian ones as wide as high
    return font.load_char(ord(character)).linearHoriAdvance / 65536


def text_width(text: str) -> float:
    return sum(map(_character_width, text))


def piece_text(piece: str) -> str:
    """Return a piece without the mark of its blank; a piece of nothing else keeps it."""
    return piece.removeprefix(WORD_START) or piece


def node_text(label: str) -> str:
    """Return the text of a node. The root of a split word shows the word's tag."""
    return label if display_label(label) == label else label.partition("=")[2]


def lay_out(view: View) -> TreeLayout:
    """Lay out the tree of a view; only a row of leaves where the model read no tree."""
    texts = [piece_text(piece) for piece in view.leaves]
    labels = [node_text(label) for label in view.labels]
    half = [max(text_width(text), _SHARE_WIDTH) / 2 + _PADDING for text in [*texts, *labels]]
    num_leaves = len(texts)
    gaps = [0, *(_GAP if piece.startswith(WORD_START) else _INNER_GAP for piece in view.leaves[1:])]
    # A column is as wide as its leaf; columns grow together where a node is wider than all its leaves.
    column = [2 * width for width in half[:num_leaves]]
    for node, (start, end) in enumerate(zip(view.starts, view.ends, strict=True)):
        missing = 2 * half[num_leaves + node] - sum(column[start:end]) - sum(gaps[start + 1 : end])
        if missing > 0:
            column[start:end] = [width + missing / (end - start) for width in column[start:end]]
    lefts, rights, edge = [], [], float(_MARGIN)
    for gap, width in zip(gaps, column, strict=True):
        lefts.append(edge + gap)
        edge += gap + width
        rights.append(edge)
    levels = max(view.heights, default=0)
    base = _MARGIN + BOX_HEIGHT / 2 + levels * _LEVEL
    words = [" ".join(_words(view.leaves[start:end])) for start, end in zip(view.starts, view.ends, strict=True)]
    boxes = [Box(text, True, text, (lefts[i] + rights[i]) / 2, base, half[i]) for i, text in enumerate(texts)]
    for node, text in enumerate(labels):
        x = (lefts[view.starts[node]] + rights[view.ends[node] - 1]) / 2
        boxes.append(Box(text, False, words[node], x, base - view.heights[node] * _LEVEL, half[num_leaves + node]))
    innermost = [-1] * num_leaves
    for node, (start, end) in enumerate(zip(view.starts, view.ends, strict=True)):  # in pre-order a later one is inside
        innermost[start:end] = [node] * (end - start)
    edges = [(num_leaves + node, leaf) for leaf, node in enumerate(innermost) if node >= 0]
    edges += [(num_leaves + parent, num_leaves + node) for node, parent in enumerate(view.parents) if parent >= 0]
    return TreeLayout(edge + _MARGIN, base + BOX_HEIGHT / 2 + _MARGIN, boxes, edges)


def _words(pieces: list[str]) -> list[str]:
    return "".join(pieces).replace(WORD_START, " ").split()


def draw_svg(layout: TreeLayout, label: str) -> str:
    """Draw the tree for the page; what has `data-p` is shaded by the script."""
    out = [
        f'<svg class="tree" role="img" aria-label="{escape(label)}" width="{layout.width:.0f}" height="{layout.height:.0f}" '
        f'viewBox="0 0 {layout.width:.0f} {layout.height:.0f}">'
    ]
    lines = ["M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in line) for line in layout.corners()]
    out.append(f'<path class="edges" d="{"".join(lines)}"/>')
    for position, box in enumerate(layout.boxes):
        kind = "leaf" if box.is_leaf else "node"
        title = box.text if box.is_leaf else f"{box.text}: {box.phrase}"
        place = f'x="{box.x - box.half:.1f}" y="{box.y - BOX_HEIGHT / 2:.1f}" width="{2 * box.half:.1f}" height="{BOX_HEIGHT}"'
        out.append(
            f'<g class="{kind}" data-p="{position}"><title>{escape(title)}</title><rect {place} rx="{3 if box.is_leaf else 9}"/>'
            f'<text class="name" x="{box.x:.1f}" y="{box.y - 1.5:.1f}">{escape(box.text)}</text>'
            f'<text class="share" x="{box.x:.1f}" y="{box.y + 10:.1f}"></text></g>'
        )
    return "".join([*out, "</svg>"])
