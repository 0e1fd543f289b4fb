"""Labelled examples as batches: the class of an example, and of the phrases in it that have one.

Shapes: B batch, L leaves, N nodes, W words, P positions of a model that have classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treenet.config.training import SplitWords
from treenet.data.batch import SourceBatch, collate_rows, pad
from treenet.data.examples import ExampleSource, list_items
from treenet.data.input_kinds import LEAVES, InputKind
from treenet.data.row_lists import RowLists
from treenet.structure import ArcLevels
from treenet.structure.ragged import Ragged
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.ragged import ranges
from treeproc.shards.store import read_index

NO_CLASS = -1
# Examples at a time when all phrases of a split are looked at.
_CHUNK = 1024


@dataclass
class LabelledBatch(SourceBatch):
    """A padded batch with classes."""

    labels: Tensor  # [B] int64, class of every example
    position_labels: Tensor  # [B, P] int64, NO_CLASS where there is none; leaves, then nodes, or words; P = 0 without any


class LabelledSource(ExampleSource):
    """One split of a data set with classes, in the form that a model reads.

    With `phrases`, models that read trees or arcs get the classes of all phrases that have a position; `split_words` says
    which positions of a tree have the class of a word of several pieces. Raises UserError when a model needs what the data
    set has not got.
    """

    def __init__(self, folder: AnyPath, split: str, reads: InputKind, *, phrases: bool, split_words: SplitWords = "pieces"):
        super().__init__(folder, split, reads)
        self._phrases = phrases and reads.positions != "leaves"
        self._split_words = split_words
        _check_classes(folder)
        self._targets = self._count_targets()

    def batch(self, rows: Sequence[int] | np.ndarray) -> LabelledBatch:
        """The rows as one padded batch."""
        batch = super().batch(rows)
        labels: list[int] = []
        nodes: list[np.ndarray] = []
        leaves: list[np.ndarray] = []
        spans: list[np.ndarray] = []
        words: list[np.ndarray] = []
        for columns, row in self.places(rows):
            labels.append(columns["label"][row])
            if self.reads.rooted:
                check_root(columns, row)
            if self._phrases and self.reads.positions == "words":
                spans.append(_spans(columns, row))
                words.append(list_items(columns["leaves"], row, "word_index"))
            if self._phrases:
                for part, classes in zip((leaves, nodes), self._phrase_classes(columns, row), strict=True):
                    part.append(classes)
        position_labels = np.zeros((len(labels), 0), dtype=np.int64)
        if self._phrases and self.reads.positions == "words":
            arcs = batch.structure
            assert isinstance(arcs, ArcLevels)
            found = [_find_classes(*row) for row in zip(arcs.span.numpy(), spans, nodes, leaves, words, strict=True)]
            position_labels = np.stack(found)
            position_labels[np.arange(len(labels)), arcs.root.numpy()] = labels
        elif self._phrases:
            multiple = self.reads.width_multiple
            parts = [pad(lists, NO_CLASS, multiple)[0] for lists in (leaves, nodes)]
            position_labels = np.concatenate(parts, axis=1)
        return LabelledBatch(
            **vars(batch), labels=torch.tensor(labels, dtype=torch.int64), position_labels=torch.from_numpy(position_labels)
        )

    def target_tokens(self, rows: np.ndarray) -> int:
        """Classes to be predicted, which the loss of a batch is divided by."""
        return int(self._targets[rows].sum())

    def _count_targets(self) -> np.ndarray:
        """Classes of every example [n]."""
        if not self._phrases:
            return np.ones(len(self), dtype=np.int64)
        if self.reads.positions == "words":
            return np.concatenate([(self.batch(rows).position_labels != NO_CLASS).sum(1).numpy() for rows in _chunks(len(self))])
        classes = (self._phrase_classes(*place) for place in self.places(np.arange(len(self))))
        return np.array([sum(int((part != NO_CLASS).sum()) for part in parts) for parts in classes])

    def _phrase_classes(self, columns: Any, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Classes of the leaves and of the nodes of an example; of a tree the first node, the root, has the example's."""
        leaves, nodes = _classes(columns, "leaf_labels", row, "leaves"), _classes(columns, "node_labels", row, "nodes")
        if self.reads.positions != "words":
            if self._split_words != "pieces":
                words = list_items(columns["leaves"], row, "word_index")
                _label_split_words(leaves, nodes, _spans(columns, row), words, pieces_too=self._split_words == "both")
            nodes[:1] = columns["label"][row]
        return leaves, nodes


class PhraseSource(ExampleSource):
    """All phrases of a split that have a class, each as an example of its own, for models that read leaves alone.

    A phrase is the leaves of a node or of a word; the whole example is always one. A fraction of the data is one of
    examples, not of phrases.
    """

    def __init__(self, folder: AnyPath, split: str, reads: InputKind = LEAVES):
        super().__init__(folder, split, reads)
        _check_classes(folder)
        found = [self._phrases_of(rows) for rows in _chunks(len(self))]
        self._row, self._start, self._end, self._class = np.concatenate(found, axis=1)
        self.lengths = {name: column[self._row] for name, column in self.lengths.items()}
        self.lengths |= {"leaves": self._end - self._start, "nodes": np.zeros(len(self._row), dtype=np.int64)}

    def _phrases_of(self, rows: np.ndarray) -> np.ndarray:
        """[4, phrases]: row, first leaf, one past the last, class."""
        out = []
        for row, (columns, at) in zip(rows.tolist(), self.places(rows), strict=True):
            spans, words = _spans(columns, at), list_items(columns["leaves"], at, "word_index")
            nodes, leaves = _classes(columns, "node_labels", at, "nodes"), _classes(columns, "leaf_labels", at, "leaves")
            start, end, classes = _labelled_spans(spans, nodes, leaves, words)
            complete = (start == 0) & (end == len(words))
            start, end = np.append(start[~complete], 0), np.append(end[~complete], len(words))
            classes = np.append(classes[~complete], columns["label"][at])
            out.append(np.stack([np.full(len(start), row), start, end, classes]))
        return np.concatenate(out, axis=1)

    def batch(self, rows: Sequence[int] | np.ndarray) -> LabelledBatch:
        """Phrases as one padded batch; `example_ids` are numbers of phrases."""
        rows = np.asarray(rows)
        leaves = self.lists(self._gather.pick(self._row[rows]), "leaves", "piece")
        lengths, none = self._end[rows] - self._start[rows], np.zeros(len(rows), dtype=np.int64)
        starts = np.cumsum(leaves.lengths) - leaves.lengths + self._start[rows]
        nothing = dict.fromkeys(("labels", "starts", "ends", "subtree_ends", "targets"), Ragged(none[:0], none))
        out = RowLists(rows, Ragged(leaves.flat[ranges(starts, lengths)], lengths), **nothing)
        batch = collate_rows(out, self.reads)
        labels = torch.from_numpy(self._class[rows])
        return LabelledBatch(**vars(batch), labels=labels, position_labels=labels.new_zeros(len(rows), 0))

    def target_tokens(self, rows: np.ndarray) -> int:
        """Classes to be predicted, which the loss of a batch is divided by."""
        return len(rows)


def _check_classes(folder: AnyPath) -> list[str]:
    """Columns of a data set. Raises UserError when it has no classes."""
    columns = read_index(folder).get("columns", [])
    if "label" not in columns:
        raise UserError(f"{folder} has no classes (its columns: {', '.join(columns)}); choose a data set with labels")
    return columns


def _chunks(count: int) -> list[np.ndarray]:
    return np.array_split(np.arange(count), max(1, -(-count // _CHUNK)))


def check_root(columns: Any, row: int) -> None:
    """Raises UserError for several trees side by side: a root has all nodes below it."""
    subtree_end = list_items(columns["spans"], row, "subtree_end")
    if len(subtree_end) and subtree_end[0] < len(subtree_end):
        raise UserError(
            f"line {columns['example_id'][row] + 1} has several trees side by side and so no root; encode the data with "
            "tree.documents: dummy_root"
        )


def _spans(columns: Any, row: int) -> np.ndarray:
    """[N, 3]: start, end, subtree_end."""
    return np.stack([list_items(columns["spans"], row, name) for name in ("start", "end", "subtree_end")], axis=1)


def _classes(columns: Any, name: str, row: int, like: str) -> np.ndarray:
    """A copy of the classes of nodes or leaves; none where the data set has no such column."""
    if name in columns:
        return list_items(columns[name], row).astype(np.int64)
    start, stop = columns[like][0][row : row + 2].tolist()
    return np.full(stop - start, NO_CLASS, dtype=np.int64)


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
    """First leaf, one past the last, and class of every phrase that has one, each span once."""
    first = np.flatnonzero(np.diff(words, prepend=-1))
    start = np.concatenate([spans[:, 0], first])
    end = np.concatenate([spans[:, 1], np.append(first[1:], len(words))])
    classes = np.concatenate([nodes, leaves[first]])
    kept = np.flatnonzero(classes != NO_CLASS)
    _, once = np.unique(start[kept] * (len(words) + 1) + end[kept], return_index=True)
    kept = kept[once]
    return start[kept], end[kept], classes[kept]


def _find_classes(wanted: np.ndarray, spans: np.ndarray, nodes: np.ndarray, leaves: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Classes [W + 1] of the phrases over the spans `wanted` [W + 1, 2]."""
    start, end, classes = _labelled_spans(spans, nodes, leaves, words)
    width = len(words) + 1
    keys, of_wanted = start * width + end, wanted[:, 0] * width + wanted[:, 1]
    at = np.minimum(np.searchsorted(keys, of_wanted), len(keys) - 1)
    if not len(keys):
        return np.full(len(wanted), NO_CLASS)
    return np.where(keys[at] == of_wanted, classes[at], NO_CLASS)
