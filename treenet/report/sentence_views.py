"""The sentences of a report: their selection, trees, translations and attention, and the layout of a tree in a picture.

Leaves stand on one line, a node stands above the middle of its leaves, one level higher than what is below it. Edges go
down from a bar between two levels, so that none crosses a box. Units are CSS pixels at a font size of 12. Widths are those
of DejaVu Sans, which is wider than most fonts of a browser.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from urllib.parse import quote

import numpy as np
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

from treenet.analysis.attention_stats import (
    SentenceAttention,
    attend_examples,
    display_label,
    node_heights,
    read_labels,
    translated,
)
from treenet.analysis.encoder_attention import encode_examples, has_self_attention
from treenet.data.splits import read_split
from treenet.report.report_inputs import ReportRun
from treenet.runs.loading import LoadedRun, load_processor
from treenet.tasks.translation_metrics import sentence_chrf
from treeproc.common.settings import UserError
from treeproc.shards.lengths import read_lengths

# A picture of more leaves than this is hard to read, one of fewer than that says little: chosen are sentences between.
_FEWEST, _MOST = 5, 30
WORD_START = "\u2581"  # the mark of sentencepiece for a blank
END = "end"
# Of the name of a figure: a file name has 255 bytes, and a temporary one 18 more than its own, and a suffix.
_LONGEST_NAME = 233


@dataclass(frozen=True)
class View:
    """One model's translation of one sentence and where it looked, over the tree that the model read.

    Positions are leaves, then nodes in pre-order; a plain model has no nodes.
    """

    run: str
    example_id: int
    source: str
    reference: str
    translation: str
    chrf: float  # of this line alone
    leaves: list[str]
    labels: list[str]  # of nodes
    starts: list[int]
    ends: list[int]
    parents: list[int]
    heights: list[int]
    tokens: list[str]  # target pieces as the vocabulary has them, the last one END
    weights: np.ndarray  # [A, H, T, S]
    self_weights: np.ndarray | None = None  # of the encoder [layers, H, S, S]; None if they are not known, or left out

    @property
    def line(self) -> int:
        """Return the number of the line in its split, from 1, as in `evaluate.py --compare`."""
        return self.example_id + 1

    @property
    def figure(self) -> str:
        """Return the name of the files of its picture; a run may have any name. A long one is cut, and a hash tells it apart."""
        name = f"line_{self.line}.{quote(self.run, safe='')}"
        if len(name) <= _LONGEST_NAME:
            return name
        return f"{name[: _LONGEST_NAME - 13]}-{hashlib.sha256(self.run.encode()).hexdigest()[:12]}"


def choose_examples(runs: Sequence[ReportRun], baseline: ReportRun, split: str, count: int, given: Sequence[int]) -> list[int]:
    """Return the ids of the examples to show; `given` are lines. Raises UserError for a line that the split does not have.

    Unless they are given: those on which the baseline and the next run of the same text differ most in chrF. Wins and losses
    take turns. With one run: sentences of all lengths.
    """
    lengths = read_lengths(baseline.data / "encoded", split)
    order = np.argsort(lengths["example_id"], kind="stable")
    ids, leaves = lengths["example_id"][order], lengths["leaves"][order]
    if given:
        if missing := sorted(set(given) - set((ids + 1).tolist())):
            there = f"its lines are {ids[0] + 1} to {ids[-1] + 1}, except dropped ones"
            raise UserError(f"lines: {split} of {baseline.data} has no line {missing[0]}; {there}")
        return [line - 1 for line in dict.fromkeys(given)]
    legible = np.flatnonzero((leaves >= _FEWEST) & (leaves <= _MOST))
    rows = legible if len(legible) >= count else np.flatnonzero(leaves > 0)
    if not count or not len(rows):
        return []
    base = baseline.current_translations(split)
    others = [run for run in runs if run is not baseline and len(run.current_translations(split) or ()) == len(ids)]
    if base is None or len(base) != len(ids) or not others:
        by_length = rows[np.argsort(leaves[rows], kind="stable")]
        return ids[by_length[np.linspace(0, len(by_length) - 1, min(count, len(by_length))).astype(int)]].tolist()
    processor = load_processor(baseline.data)
    references = [processor.decode(row["tgt_pieces"].tolist()) for row in read_split(baseline.data, "encoded", split)]
    gains = sentence_chrf(others[0].translations[split], references) - sentence_chrf(base, references)
    ranked = rows[np.argsort(gains[rows], kind="stable")].tolist()
    chosen = [row for pair in zip(reversed(ranked), ranked, strict=True) for row in pair]
    return ids[list(dict.fromkeys(chosen))[:count]].tolist()


def build_views(name: str, run: LoadedRun, split: str, ids: Sequence[int]) -> list[View]:
    """Build the views of one model on the examples `ids`, in that order, translated with the decoding settings of its run."""
    wanted = set(ids)
    references = {row["example_id"]: row for row in read_split(run.data, "encoded", split) if row["example_id"] in wanted}
    own = translated(run, list(references.values()))
    labels = read_labels(run.data)
    encoded: dict[int, np.ndarray | None] = {}
    if has_self_attention(run.model):
        found = encode_examples(run.model, references.values())
        encoded = dict(zip(references, found, strict=True))
    views = {}
    for sentence in attend_examples(run.model, own):
        number = sentence.example["example_id"]
        view = _view(name, run, sentence, references[number]["tgt_pieces"].tolist(), labels)
        views[number] = replace(view, self_weights=encoded.get(number))
    return [views[number] for number in ids if number in views]


def _view(name: str, run: LoadedRun, sentence: SentenceAttention, reference: list[int], labels: list[str]) -> View:
    example, processor, shown = sentence.example, run.processor, slice(0, sentence.num_nodes)
    leaves, target = example["leaves"]["piece"].tolist(), example["tgt_pieces"].tolist()
    translation, reference_text = processor.decode(target), processor.decode(reference)
    return View(
        run=name,
        example_id=int(example["example_id"]),
        source=processor.decode(leaves),
        reference=reference_text,
        translation=translation,
        chrf=float(sentence_chrf([translation], [reference_text])[0]),
        leaves=[processor.id_to_piece(piece) for piece in leaves],
        labels=[labels[label] for label in example["nodes"]["label"][shown].tolist()],
        starts=example["spans"]["start"][shown].tolist(),
        ends=example["spans"]["end"][shown].tolist(),
        parents=example["nodes"]["parent"][shown].tolist(),
        heights=node_heights(example["spans"]["subtree_end"][shown]).tolist(),
        tokens=[*(processor.id_to_piece(piece) for piece in target), END],
        weights=sentence.weights,
    )


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
