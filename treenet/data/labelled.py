"""Labelled examples as batches: the class of an example, and of the phrases in it that have one.

Pairs of sentences have a score or a class. Shapes: B batch, L leaves, N nodes, W words, P positions of a model that have classes.
Of pairs: P pairs, B = 2 P sentences; those of a pair are neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from treenet.config.tasks import SplitWords
from treenet.data.batch import SourceBatch, collate_rows
from treenet.data.examples import Examples, ExampleSource
from treenet.data.input_kinds import LEAVES, InputKind, RowLists
from treenet.data.plan import BatchPlan
from treenet.structure import ArcLevels
from treenet.structure.base import Ragged, pad
from treeproc.common.errors import check_choice
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.gather import PickedRows
from treeproc.shards.rows import ranges
from treeproc.shards.store import read_index

NO_CLASS = -1
# Examples at a time when all phrases of a split are looked at.
_CHUNK = 1024


@dataclass
class LabelledBatch(SourceBatch):
    """A padded batch with classes."""

    labels: Tensor  # [B] int64, class of every example
    position_labels: Tensor  # [B, P] int64, NO_CLASS where there is none; leaves, then nodes, or words; P = 0 without any

    @property
    def numbers(self) -> Tensor:
        """Return the numbers [B] of the examples that have the classes."""
        return self.example_ids


class _OneTarget(Examples):
    def count_targets(self, leaves: np.ndarray, tgt_pieces: np.ndarray) -> np.ndarray:
        """Return 1 for each example [n]: its class or score."""
        return np.ones_like(leaves)


class LabelledSource(_OneTarget, ExampleSource):
    """One split of a data set with classes, in the form that a model reads.

    With `phrases`, models that read trees or arcs get the classes of all phrases that have a position. `split_words` chooses
    the positions of a tree that have the class of a word of several pieces. Raises UserError if the data set lacks something
    that the model needs.
    """

    def __init__(
        self,
        folder: AnyPath,
        split: str,
        reads: InputKind,
        *,
        phrases: bool,
        split_words: SplitWords = "pieces",
        states: AnyPath | None = None,
    ):
        check_choice("split_words", split_words, SplitWords)
        super().__init__(folder, split, reads, states)
        self._phrases = phrases and reads.positions != "leaves"
        self._split_words = split_words
        _check_classes(folder)
        self._targets = self._count_targets() if self._phrases else None

    def batch(self, rows: Sequence[int] | np.ndarray) -> LabelledBatch:
        """Return the rows as one padded batch."""
        batch, picked = super().batch(rows), self.pick(rows)
        if self.reads.rooted:
            check_roots(picked)
        labels = picked.values("label").astype(np.int64)
        position_labels = np.zeros((len(labels), 0), dtype=np.int64)
        if self._phrases:
            classes = self._phrase_classes(picked)
            if isinstance(batch.structure, ArcLevels):
                position_labels = self._classes_of_words(picked, batch.structure, *classes)
                position_labels[np.arange(len(labels)), batch.structure.root.numpy()] = labels
            else:
                parts = [pad(lists, NO_CLASS, self.reads.width_multiple)[0] for lists in classes]
                position_labels = np.concatenate(parts, axis=1)
        return LabelledBatch(**vars(batch), labels=torch.from_numpy(labels), position_labels=torch.from_numpy(position_labels))

    def target_tokens(self, rows: np.ndarray) -> int:
        """Return the number of classes to be predicted, which the loss of a batch is divided by."""
        return super().target_tokens(rows) if self._targets is None else int(self._targets[rows].sum())

    def epoch_targets(self, plan: BatchPlan) -> int:
        """Return `target_tokens` of all rows in use."""
        return super().epoch_targets(plan) if self._targets is None else self.target_tokens(plan.rows)

    def _count_targets(self) -> np.ndarray:
        """Count the classes of every example [n], by reading them all."""
        if self.reads.positions == "words":
            return np.concatenate([(self.batch(rows).position_labels != NO_CLASS).sum(1).numpy() for rows in _chunks(len(self))])
        counts = []
        for rows in _chunks(len(self)):
            counted = np.zeros(len(rows), dtype=np.int64)
            for part in self._phrase_classes(self.pick(rows)):
                row = np.repeat(np.arange(len(rows)), part.lengths)
                counted += np.bincount(row[part.flat != NO_CLASS], minlength=len(rows))
            counts.append(counted)
        return np.concatenate(counts)

    def _phrase_classes(self, picked: PickedRows) -> tuple[Ragged, Ragged]:
        """Return the classes of leaves and of nodes of examples. The first node of a tree, the root, has the example's class."""
        leaves, nodes = _classes(self, picked)
        if self.reads.positions != "words":
            if self._split_words != "pieces":
                words = self.lists(picked, "leaves", "word_index")
                for row in zip(leaves, nodes, _spans(self, picked), words, strict=True):
                    _label_split_words(*row, pieces_too=self._split_words == "both")
            has_root = nodes.lengths > 0
            nodes.flat[(np.cumsum(nodes.lengths) - nodes.lengths)[has_root]] = picked.values("label")[has_root]
        return leaves, nodes

    def _classes_of_words(self, picked: PickedRows, arcs: ArcLevels, leaves: Ragged, nodes: Ragged) -> np.ndarray:
        """Return [B, P] classes of the phrases that words are the heads of."""
        words = self.lists(picked, "leaves", "word_index")
        rows = zip(arcs.span.numpy(), _spans(self, picked), nodes, leaves, words, strict=True)
        return np.stack([_find_classes(*row) for row in rows])


class PhraseSource(_OneTarget, ExampleSource):
    """All phrases of a split that have a class, each as a separate example, for models that read leaves alone.

    A phrase is the leaves of a node or of a word. The whole example is always a phrase. A fraction of the data is a fraction
    of the examples, not of the phrases. The source holds all phrases in memory, and they make one window.
    """

    def __init__(self, folder: AnyPath, split: str, reads: InputKind = LEAVES):
        super().__init__(folder, split, reads)
        _check_classes(folder)
        found = [self._phrases_of(rows) for rows in _chunks(len(self))]
        self._row, self._start, self._end, self._class = np.concatenate(found, axis=1)
        self.shards = None
        self.lengths = {name: column[self._row] for name, column in self.lengths.items()}
        self.lengths |= {"leaves": self._end - self._start, "nodes": np.zeros(len(self._row), dtype=np.int64)}

    def _phrases_of(self, rows: np.ndarray) -> np.ndarray:
        """Return [4, phrases]: row, first leaf, one past the last, class."""
        picked, out = self.pick(rows), []
        leaves, nodes = _classes(self, picked)
        parts = _spans(self, picked), nodes, leaves, self.lists(picked, "leaves", "word_index")
        for row, label, *of_row in zip(rows.tolist(), picked.values("label").tolist(), *parts, strict=True):
            start, end, classes = _labelled_spans(*of_row)
            length = len(of_row[-1])
            complete = (start == 0) & (end == length)
            start, end = np.append(start[~complete], 0), np.append(end[~complete], length)
            classes = np.append(classes[~complete], label)
            out.append(np.stack([np.full(len(start), row), start, end, classes]))
        return np.concatenate(out, axis=1)

    def batch(self, rows: Sequence[int] | np.ndarray) -> LabelledBatch:
        """Return phrases as one padded batch; `example_ids` are numbers of phrases."""
        rows = np.asarray(rows)
        leaves = self.lists(self.pick(self._row[rows]), "leaves", "piece")
        lengths, none = self._end[rows] - self._start[rows], np.zeros(len(rows), dtype=np.int64)
        starts = np.cumsum(leaves.lengths) - leaves.lengths + self._start[rows]
        nothing = dict.fromkeys(("labels", "starts", "ends", "subtree_ends", "targets"), Ragged(none[:0], none))
        out = RowLists(rows, Ragged(leaves.flat[ranges(starts, lengths)], lengths), **nothing)
        batch = collate_rows(out, self.reads)
        labels = torch.from_numpy(self._class[rows])
        return LabelledBatch(**vars(batch), labels=labels, position_labels=labels.new_zeros(len(rows), 0))


def _check_classes(folder: AnyPath) -> None:
    """Raise UserError when a data set has no classes."""
    columns = read_index(folder).get("columns", [])
    if "label" not in columns:
        raise UserError(f"{folder} has no classes (its columns: {', '.join(columns)}); choose a data set with labels")


def _chunks(count: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), max(1, -(-count // _CHUNK)))


def check_all_roots(folder: AnyPath, index: Mapping, reads: InputKind) -> None:
    """Raise UserError, before a training of hours, if a text of any split lacks the root that a model reads."""
    if reads.rooted and index.get("tree_settings", {}).get("documents") != "dummy_root":
        for split in index["totals"]:
            source = ExampleSource(folder, split, reads)
            for rows in _chunks(len(source)):
                check_roots(source.pick(rows), f"{split}, ")


def check_roots(picked: PickedRows, where: str = "") -> None:
    """Raise UserError for several trees side by side: a root has all nodes below it."""
    subtree_end, lengths = picked.items("spans", "subtree_end")
    rows = np.flatnonzero(lengths)
    first = (np.cumsum(lengths) - lengths)[rows]
    wrong = rows[subtree_end[first] < lengths[rows]]
    if len(wrong):
        example = picked.values("example_id")[wrong[0]]
        raise UserError(
            f"{where}example_id {example} has several trees side by side, and so no single root; encode the data with "
            "tree.documents: dummy_root"
        )


def _spans(source: ExampleSource, picked: PickedRows) -> Ragged:
    """Return [N, 3] of each example: start, end, subtree_end."""
    columns = [source.lists(picked, "spans", name) for name in ("start", "end", "subtree_end")]
    return Ragged(np.stack([column.flat for column in columns], axis=1), columns[0].lengths)


def _classes(source: ExampleSource, picked: PickedRows) -> tuple[Ragged, Ragged]:
    """Return copies of the classes of leaves and of nodes; NO_CLASS where the data set has no such column."""
    found = []
    for name, like in (("leaf_labels", ("leaves", "piece")), ("node_labels", ("nodes", "label"))):
        if name in picked:
            classes = source.lists(picked, name)
            found.append(Ragged(classes.flat.astype(np.int64), classes.lengths))
        else:
            lengths = source.lists(picked, *like).lengths
            found.append(Ragged(np.full(int(lengths.sum()), NO_CLASS), lengths))
    return found[0], found[1]


def _label_split_words(leaves: np.ndarray, nodes: np.ndarray, spans: np.ndarray, words: np.ndarray, *, pieces_too: bool) -> None:
    """Give the node of every word of several pieces its class, in place, and take it from the pieces unless `pieces_too`.

    A word's own node is the lowest one over all its pieces.
    """
    _, first, counts = np.unique(words, return_index=True, return_counts=True)
    lowest = {(start, end): node for node, (start, end, _) in enumerate(spans.tolist())}
    for start, count in zip(first[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
        nodes[lowest[start, start + count]] = leaves[start]
        if not pieces_too:
            leaves[start : start + count] = NO_CLASS


def _labelled_spans(
    spans: np.ndarray, nodes: np.ndarray, leaves: np.ndarray, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first leaf, one past the last, and class of every phrase that has one, each span once."""
    first = np.flatnonzero(np.diff(words, prepend=-1))
    start = np.concatenate([spans[:, 0], first])
    end = np.concatenate([spans[:, 1], np.append(first[1:], len(words))])
    classes = np.concatenate([nodes, leaves[first]])
    kept = np.flatnonzero(classes != NO_CLASS)
    _, once = np.unique(start[kept] * (len(words) + 1) + end[kept], return_index=True)
    kept = kept[once]
    return start[kept], end[kept], classes[kept]


def _find_classes(wanted: np.ndarray, spans: np.ndarray, nodes: np.ndarray, leaves: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the classes [W + 1] of the phrases over the spans `wanted` [W + 1, 2]."""
    start, end, classes = _labelled_spans(spans, nodes, leaves, words)
    width = len(words) + 1
    keys, of_wanted = start * width + end, wanted[:, 0] * width + wanted[:, 1]
    at = np.minimum(np.searchsorted(keys, of_wanted), len(keys) - 1)
    if not len(keys):
        return np.full(len(wanted), NO_CLASS)
    return np.where(keys[at] == of_wanted, classes[at], NO_CLASS)


@dataclass
class PairBatch(SourceBatch):
    """A padded batch of sentences, and the scores of their pairs."""

    scores: Tensor  # [P] float64


class LabelledPairBatch(LabelledBatch):
    """A padded batch of sentences, and the classes [P] of their pairs. `position_labels` are none: [P, 0]."""

    @property
    def numbers(self) -> Tensor:
        return self.example_ids[::2] // 2


class PairSource(_OneTarget):
    """One split of a data set of pairs, in the form that a model reads; a row is a pair. All pairs make one window.

    `column` has what is known of a pair: its score or its class. Raises UserError when the data set has no such column, or pairs
    that have lost a sentence, or lacks what the model needs.
    """

    shards = None  # a pair may lie in two
    sentences = 2

    def __init__(
        self,
        folder: AnyPath,
        split: str,
        reads: InputKind,
        column: Literal["score", "label"] = "score",
        states: AnyPath | None = None,
    ):
        columns = read_index(folder).get("columns", [])
        if column not in columns:
            what, form = ("scores", "format sick") if column == "score" else ("classes", "pairs with classes")
            raise UserError(f"{folder} has no {what} (its columns: {', '.join(columns)}); choose a data set of {form}")
        self._column = column
        self._sentences = ExampleSource(folder, split, reads, states)
        lengths = {name: np.asarray(column) for name, column in self._sentences.lengths.items()}
        ids = lengths["example_id"]
        first, second = ids[: len(ids) // 2 * 2 : 2], ids[1::2]
        if len(ids) % 2 or (first % 2).any() or (second != first + 1).any():
            raise UserError(
                f"{folder}: a filter dropped one sentence of a pair of split {split}; preprocess again, with an even "
                "rows_per_shard: then the job drops both"
            )
        self.lengths = {name: column[::2] for name, column in lengths.items()}
        # Both sentences of a pair are padded to the longest of the batch.
        self.lengths |= {name: 2 * np.maximum(lengths[name][::2], lengths[name][1::2]) for name in ("leaves", "nodes")}
        self.lengths["example_id"] = first // 2

    def __len__(self) -> int:
        return len(self.lengths["example_id"])

    def batch(self, rows: Sequence[int] | np.ndarray) -> PairBatch | LabelledPairBatch:
        """Return the pairs as one padded batch; `example_ids` are those of sentences."""
        rows = np.asarray(rows)
        sentences = (2 * rows[:, None] + np.arange(2)).ravel()
        picked = self._sentences.pick(sentences)
        if self._sentences.reads.rooted:
            check_roots(picked)
        batch = self._sentences.batch(sentences)
        known = torch.from_numpy(picked.values(self._column)[::2].copy())
        if self._column == "score":
            return PairBatch(**vars(batch), scores=known)
        return LabelledPairBatch(**vars(batch), labels=known.long(), position_labels=known.new_zeros(len(rows), 0).long())
