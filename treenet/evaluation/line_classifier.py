"""Raw lines to classes: the model of a classifier run on lines of text or on pairs, with the phrases whose classes it learned.

Shapes: B batch, P positions, C classes.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from treenet.data.batch import WINDOW, TreeBatch, count_leaves, in_order
from treenet.evaluation.settings import ClassifyLinesSettings
from treenet.layers.backend import choose_device, scoring
from treenet.runs.loading import LoadedClassifier, load_classifier
from treenet.structure import ArcLevels
from treenet.translation.line_translator import Translated, build_line_encoder, gather, local_runs
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.online.input_files import ADDED, form_of
from treeproc.online.raw_lines import EncodedLine, RawLineEncoder, TableRow

BATCH_TOKENS = 8192
_DIGITS = 6  # the last ones of float32 depend on the machine and on the batch
_NUMBER = re.compile(r"[-+]?[0-9]+(?:[.,][0-9]+)?")
EMPTY = "is empty, so the model does not read it"
ROOTLESS = "has several trees side by side, and so no single root"


@dataclass(frozen=True)
class _Probabilities:
    """The probabilities of classes [C]."""

    probabilities: list[float]

    @property
    def best(self) -> int:
        """Return the number of the most probable class."""
        return int(np.argmax(self.probabilities))


@dataclass(frozen=True)
class Phrase(_Probabilities):
    """A phrase of a line: the probabilities of its classes [C], and its leaves [start, end)."""

    start: int
    end: int


@dataclass(frozen=True)
class Classes(_Probabilities):
    """The probabilities of the classes of a line [C], and its phrases, the outer ones first; none if they were not asked for."""

    phrases: list[Phrase]


def check_phrases(run: LoadedClassifier) -> None:
    """Raise UserError if the model has no classes of phrases."""
    if run.model.classifies_positions:
        return
    if run.model.reads_pairs:
        why = "it classifies pairs of texts"
    elif run.model.reads.positions == "leaves":
        why = f"model.name = {run.config.model.name} has no nodes"
    else:
        why = "it learned only the classes of whole texts (classifier.supervision = root)"
    raise UserError(
        f"phrases: the run has no classes of phrases, because {why}; leave phrases out, or give a run of a tree model that "
        "learned all_phrases"
    )


class Item(NamedTuple):
    """A line that gets a class, or the pair of texts of a line."""

    line: EncodedLine  # with the problem if it gets none; the source of a pair has a tab between its texts
    rows: tuple[dict, ...]  # one, or two of a pair; none if there is a problem


def read_items(run: LoadedClassifier, encoder: RawLineEncoder, lines: Sequence, first: int = 0) -> list[Item]:
    """Return an item for every line. The first line has the 0-based number `first` in the input."""
    encode = encoder.encode_pairs if run.model.reads_pairs else encoder.encode
    return join_sides(run, encode(lines, first))


def join_sides(run: LoadedClassifier, encoded: Sequence[EncodedLine]) -> list[Item]:
    """Return items of encoded lines. If the model reads pairs, two lines are a pair."""
    if not run.model.reads_pairs:
        return [_item(run, [line]) for line in encoded]
    return [_item(run, pair) for pair in zip(encoded[::2], encoded[1::2], strict=True)]


def _item(run: LoadedClassifier, sides: Sequence[EncodedLine]) -> Item:
    problems, notes = [line.problem or _why_not(run, line.row) for line in sides], [line.note for line in sides]
    problem, note = _of_sides(problems), _of_sides(notes)
    of_line = sides[:1] if sides[0] is sides[-1] else sides  # a line without two columns is one text
    source = "\t".join(line.source for line in of_line)
    line = replace(sides[0], source=source, problem=problem, note=note)
    return Item(line, () if problem else tuple(line.row for line in sides if line.row is not None))


def _of_sides(messages: Sequence[str]) -> str:
    """Return the first message about a text, with its place if the other text of the pair has not the same."""
    if len(set(messages)) == 1:
        return messages[0]
    side, message = next((side, message) for side, message in enumerate(messages) if message)
    return f"{('first', 'second')[side]} text: {message}"


def _why_not(run: LoadedClassifier, row: dict | None) -> str:
    """Return why the model cannot classify an encoded row; empty if it can."""
    if not row or not count_leaves(row):
        return EMPTY
    nodes = row["spans"]["subtree_end"]
    return ROOTLESS if run.model.reads.rooted and nodes[0] < len(nodes) else ""


def classify_items(run: LoadedClassifier, items: Sequence[Item], *, phrases: bool = False) -> Iterator[Classes | None]:
    """Return the classes of items, in their order, computed in batches of similar length; None of one with a problem.

    The model is put into evaluation mode. Raises UserError if phrases are wanted, and the model has no classes of them.
    """
    found = _classify_rows(run, [item.rows for item in items if item.rows], phrases=phrases)
    return (next(found) if item.rows else None for item in items)


def _classify_rows(run: LoadedClassifier, rows: Sequence[tuple[dict, ...]], *, phrases: bool) -> Iterator[Classes]:
    model, device = run.model.eval(), next(run.model.parameters()).device
    if phrases:
        check_phrases(run)

    @torch.no_grad()
    def classify(batch: TreeBatch, members: list[tuple[dict, ...]]) -> list[Classes]:
        with scoring(model):
            output = model(batch)
        if not output.examples.isfinite().all():
            raise UserError("the model's predictions are not finite; classify with an earlier checkpoint")
        examples = output.examples.softmax(-1).double().cpu().numpy()
        if not phrases:
            return [Classes(_rounded(one), []) for one in examples]
        positions = output.positions.softmax(-1).double().cpu().numpy()
        spans = batch.structure.span.cpu().numpy() if isinstance(batch.structure, ArcLevels) else [None] * len(members)
        width = batch.leaf_pieces.shape[1]
        return [
            Classes(_rounded(one), list(_phrases(run, row, found, span, width)))
            for one, (row,), found, span in zip(examples, members, positions, spans, strict=True)
        ]

    def size(rows: tuple[dict, ...]) -> int:
        return len(rows) * max(map(count_leaves, rows))

    return in_order(classify, model.reads, rows, Classes([], []), size, BATCH_TOKENS, device, WINDOW)


def _rounded(probabilities: np.ndarray) -> list[float]:
    return [round(value, _DIGITS) for value in probabilities.tolist()]


def _phrases(run: LoadedClassifier, row: dict, positions: np.ndarray, span: np.ndarray | None, width: int) -> Iterator[Phrase]:
    """Yield the phrases of a row once each, in pre-order, from the probabilities [P, C] of its positions.

    `span` has those of arcs. Positions of trees are `width` leaves, then the nodes. A word of several pieces has the classes of
    the node over its pieces if that node learned them, else the mean over its pieces.
    """
    if span is not None:
        found = {(start, end): positions[place] for place, (start, end) in enumerate(span.tolist()) if end > start}
    else:
        starts, ends = (row["spans"][name].tolist() for name in ("start", "end"))
        found = {}
        for node, place in enumerate(zip(starts, ends, strict=True)):
            found.setdefault(place, positions[width + node])
        _, first, counts = np.unique(row["leaves"]["word_index"], return_index=True, return_counts=True)
        for start, count in zip(first.tolist(), counts.tolist(), strict=True):
            if count == 1:
                found.setdefault((start, start + 1), positions[start])
            # The node over the pieces learned no class, but for the root of a text of one word.
            elif run.config.classifier.split_words == "pieces" and (start, start + count) != (starts[0], ends[0]):
                found[start, start + count] = positions[start : start + count].mean(0)
    for start, end in sorted(found, key=lambda place: (place[0], -place[1])):
        yield Phrase(_rounded(found[start, end]), start, end)


class LineClassifier:
    """Model, parser and vocabulary of a classifier run, loaded once a process.

    Raises UserError when the run cannot be loaded, or is not a classifier.
    """

    result, done = "class", "classified"

    def __init__(self, settings: ClassifyLinesSettings, runs: Sequence[AnyPath]):
        self._settings = settings
        [folder] = local_runs(settings, runs)
        self._run = load_classifier(folder, checkpoint=settings.checkpoint, device=choose_device(settings.use_gpu))
        if settings.phrases:
            check_phrases(self._run)
        self._form = form_of(self._run.data)
        given_trees = settings.trees is not None or self._form.gives_trees(settings.input)
        self._encoder = build_line_encoder(self._run, given_trees=given_trees, max_pieces=settings.max_leaves)

    def describe(self) -> str:
        """Describe the model and its classes, in one line."""
        classes = self._run.classes
        listed = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
        of = " of pairs" if self._run.model.reads_pairs else ""
        return f"{self._run.config.model.name} {self._run.checkpoint}: {len(classes)} classes{of}: {listed}"

    def __call__(self, lines: Sequence, first: int) -> Translated:
        """Return the output for `lines`. Their first line has the 0-based number `first` in the input."""
        items = read_items(self._run, self._encoder, lines, first)
        numbered = [(number, item.line) for number, item in enumerate(items, start=first + 1)]
        found = classify_items(self._run, items, phrases=self._settings.phrases)
        rows = [line.row for line in lines if line.row is not None]
        notices = self._encoder.notices([line for _, line in numbered], first, "row" if rows else "line")
        notices |= self._class_texts(numbered) if rows else self._labels(numbered)

        def write_row(number: int, _: EncodedLine, one: Classes | None) -> str:
            return self._row(rows[number - first - 1], one)

        write = self._json if self._settings.json_lines else write_row if rows else self._text
        return gather(numbered, found, write, notices)

    explain = __call__

    def _labels(self, numbered: Sequence[tuple[int, EncodedLine]]) -> dict[str, str]:
        """Return a notice if half of the lines, or more, have a class and a tab before their text, as files of examples have."""
        if self._run.model.reads_pairs:
            return {}
        columns = [(number, *line.source.partition("\t")[:2]) for number, line in numbered]
        found = [(number, label) for number, label, tab in columns if tab and label.strip() in self._run.classes]
        if not found or 2 * len(found) < len(numbered):
            return {}
        number, label = found[0]
        named = "name the file *.tsv, or " if self._form.format == "labelled" else ""
        message = (
            f"begins with a class and a tab, which the model reads as text: {len(found):,} of {len(numbered):,} lines, for "
            f"example line {number:,} with {label.strip()!r}; {named}give the texts alone (cut -f2- FILE)"
        )
        return {"labels": message}

    def _class_texts(self, numbered: Sequence[tuple[int, EncodedLine]]) -> dict[str, str]:
        """Return a notice if half of the texts of rows, or more, are classes or numbers, as in a table of other columns."""
        is_pair, columns = self._run.model.reads_pairs, " and ".join(map(repr, self._form.labelled.texts))
        sides = [(number, line.source.split("\t") if is_pair else [line.source]) for number, line in numbered]
        texts = [(number, text.strip()) for number, of_row in sides for text in of_row]
        found = [(number, text) for number, text in texts if text in self._run.classes or _NUMBER.fullmatch(text)]
        if not found or 2 * len(found) < len(texts):
            return {}
        number, text = found[0]
        message = (
            f"the text is a class or a number: {len(found):,} of {len(texts):,} texts, for example row {number:,} with "
            f"{text!r}; if the texts are in other columns, a header line, or the keys, must name those {columns}"
        )
        return {"labels": message}

    def _text(self, number: int, line: EncodedLine, found: Classes | None) -> str:
        """Columns are separated by tabs: the probability with scores, the name of the class; empty if there is none."""
        columns = [f"{found.probabilities[found.best]:.6f}" if found else ""] if self._settings.scores else []
        return "\t".join([*columns, self._run.classes[found.best] if found else ""]) + "\n"

    def _row(self, row: TableRow, found: Classes | None) -> str:
        values = (self._run.classes[found.best], found.probabilities[found.best]) if found else (None, None)
        return row.with_columns(dict(zip(ADDED, values, strict=True)))

    def _json(self, number: int, line: EncodedLine, found: Classes | None) -> str:
        record: dict = {"line": number, "source": line.source, **describe_classes(self._run.classes, found)}
        if self._settings.phrases:
            record["phrases"] = describe_phrases(self._run.classes, found, line.row, self._encoder)
        return json.dumps(record | ({"error": line.problem} if line.problem else {}), ensure_ascii=False) + "\n"


def describe_classes(names: Sequence[str], found: Classes | None) -> dict:
    """Return label and probabilities of a line for JSON; null and none if it has no class."""
    if found is None:
        return {"label": None, "probabilities": {}}
    return {"label": names[found.best], "probabilities": dict(zip(names, found.probabilities, strict=True))}


def describe_phrases(names: Sequence[str], found: Classes | None, row: dict | None, encoder: RawLineEncoder) -> list[dict]:
    """Return the phrases of a line for JSON. `encoder` made its row."""
    if found is None or row is None:
        return []
    out = []
    for one in found.phrases:
        known = dict(zip(names, one.probabilities, strict=True))
        text = encoder.text_of(row["leaves"]["piece"][one.start : one.end])
        out.append({"text": text, "start": one.start, "end": one.end, "label": names[one.best], "probabilities": known})
    return out
