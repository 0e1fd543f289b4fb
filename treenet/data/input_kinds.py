"""Input kinds: the forms in which encoders read an example; and the columns of examples that they read.

A kind names the columns of a shard that a batch needs, and builds the structure of a batch from them. It also names the
positions that an encoder of that kind has states for. Every encoder names its kind as `reads`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from treenet.structure import (
    Actions,
    ArcLevels,
    Dependencies,
    LinearizedTrees,
    PhraseLevels,
    SpanTable,
    SplitPoints,
    Structure,
    TreeLevels,
    TreeStructure,
    Words,
)
from treenet.structure.base import Ragged
from treenet.structure.branches import WIDTH_MULTIPLE
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.store import read_index, side_of

# The place of a field of `RowLists` in a shard: its column, and the field of the column's structs.
COLUMNS: dict[str, tuple[str, str | None]] = {
    "pieces": ("leaves", "piece"),
    "labels": ("nodes", "label"),
    "starts": ("spans", "start"),
    "ends": ("spans", "end"),
    "subtree_ends": ("spans", "subtree_end"),
    "targets": ("tgt_pieces", None),
    "words": ("leaves", "word_index"),
    "pos_tags": ("leaves", "pos_tag"),
    "governors": ("arcs", "governor"),
    "relations": ("arcs", "deprel"),
}
# Fields that every batch has, for any encoder.
ALWAYS = ("pieces", "labels", "starts", "ends", "subtree_ends", "targets")


@dataclass
class RowLists:
    """The columns of a batch's examples, one array an example, in lists or as `Ragged`.

    Columns beyond `ALWAYS` are there where an encoder reads them.
    """

    example_ids: Sequence[int] | np.ndarray = field(default_factory=list)
    pieces: Sequence[np.ndarray] = field(default_factory=list)
    labels: Sequence[np.ndarray] = field(default_factory=list)
    starts: Sequence[np.ndarray] = field(default_factory=list)
    ends: Sequence[np.ndarray] = field(default_factory=list)
    subtree_ends: Sequence[np.ndarray] = field(default_factory=list)
    targets: Sequence[np.ndarray] = field(default_factory=list)
    words: Sequence[np.ndarray] = field(default_factory=list)  # word of each leaf
    pos_tags: Sequence[np.ndarray] = field(default_factory=list)  # tag of each leaf
    governors: Sequence[np.ndarray] = field(default_factory=list)  # governor of each word, -1 for the root
    relations: Sequence[np.ndarray] = field(default_factory=list)  # relation of each word to its governor

    def __len__(self) -> int:
        return len(self.example_ids)

    def spans(self) -> Ragged:
        """Return [N, 3] of each example: start, end, subtree_end."""
        columns = [Ragged.of(lists) for lists in (self.starts, self.ends, self.subtree_ends)]
        return Ragged(np.stack([column.flat for column in columns], axis=1), columns[0].lengths)


@dataclass(frozen=True)
class InputKind:
    """One form of input. `build` makes the structure of a batch, and raises UserError for trees that are not of that form.

    `build_compact`, if set, makes another structure for accelerators, for padding to a multiple of WIDTH_MULTIPLE.
    """

    name: str
    build: Callable[[RowLists], Structure | None]
    columns: tuple[str, ...] = ()  # fields of `RowLists` beside those of all batches
    positions: Literal["leaves", "tree", "words"] = "leaves"  # "tree": leaves, then nodes, the root first; "words": a root last
    constituents: bool = False  # reads constituency trees
    binary: bool = False  # no node has more than two children
    build_compact: Callable[[RowLists], Structure | None] | None = None
    width_multiple: int = 1  # numbers of padded leaves and nodes are multiples of it
    least_target_width: int = 1  # columns of padded targets; torch.compile makes a separate graph for a size of 1

    @property
    def rooted(self) -> bool:
        """Return whether an example must have one root."""
        return self.positions == "tree"

    @property
    def reads_arcs(self) -> bool:
        """Return whether dependency arcs are needed."""
        return "governors" in self.columns

    def for_device(self, device: torch.device | str) -> "InputKind":
        """Return the kind in the form that a device wants; on CPUs itself."""
        if torch.device(device).type == "cpu":
            return self
        if self.build_compact is None:
            return replace(self, least_target_width=2)
        return replace(self, build=self.build_compact, width_multiple=WIDTH_MULTIPLE, least_target_width=2)

    def __str__(self) -> str:
        return self.name


def check_columns(folder: AnyPath, reads: InputKind) -> None:
    """Raise UserError if DATA/encoded lacks columns that a model that `reads` needs."""
    if reads.reads_arcs and "arcs" not in (index := read_index(folder)).get("columns", []):
        raise UserError(f"{folder} has no arcs, which this model reads; {hint_for_arcs(index)}")


def hint_for_arcs(index: Mapping) -> str:
    """Return what gives the data set of this index the arcs that it lacks."""
    name = "target_parser" if side_of(index) == "target" else "parser"
    parses = f"{name}.name=stanza " if index.get("parser_settings", {}).get("name") == "words" else ""
    return f"preprocess again with {parses}{name}.dependencies=true"


def _trees(rows: RowLists) -> TreeStructure:
    return TreeStructure.build(_count_leaves(rows), rows.spans())


def _compact_trees(rows: RowLists) -> TreeStructure:
    return TreeStructure.build_compact(_count_leaves(rows), rows.spans())


def _none(rows: RowLists) -> None:
    return None


def _binary_trees(rows: RowLists) -> TreeLevels:
    return TreeLevels.build(_span_table(rows))


def _phrases(rows: RowLists) -> PhraseLevels:
    return PhraseLevels.build(_span_table(rows), rows.labels, rows.words)


def _split_points(rows: RowLists) -> SplitPoints:
    return SplitPoints.build(_span_table(rows), rows.words)


def _actions(rows: RowLists) -> Actions:
    return Actions.build(rows.pieces, rows.labels, rows.words, rows.spans())


def _linearized(rows: RowLists) -> LinearizedTrees:
    return LinearizedTrees.build(_span_table(rows))


def _span_table(rows: RowLists) -> SpanTable:
    return SpanTable.build(_count_leaves(rows), rows.spans())


def _count_leaves(rows: RowLists) -> np.ndarray:
    return Ragged.of(rows.pieces).lengths


def _arcs(rows: RowLists) -> ArcLevels:
    return ArcLevels.build(rows.words, rows.governors)


def _words(rows: RowLists) -> Words:
    return Words.build(rows.words, rows.pos_tags)


def _dependencies(rows: RowLists) -> Words:
    return Words.build(rows.words, rows.pos_tags, Dependencies.build(rows.governors, rows.relations))


LEAVES = InputKind("leaves", _none, build_compact=_none)
TREES = InputKind("trees", _trees, positions="tree", constituents=True, build_compact=_compact_trees)
BINARY_TREES = InputKind("binary_trees", _binary_trees, positions="tree", constituents=True, binary=True)
PHRASES = InputKind("phrases", _phrases, ("words",), constituents=True)
SPLIT_POINTS = InputKind("split points", _split_points, ("words",), constituents=True)
LINEARIZED = InputKind("linearized trees", _linearized, constituents=True)
ACTIONS = InputKind("actions", _actions, ("words",), constituents=True)
ARCS = InputKind("arcs", _arcs, ("words", "governors"), positions="words")
WORDS = InputKind("words", _words, ("words", "pos_tags"))
DEPENDENCIES = InputKind("dependencies", _dependencies, ("words", "pos_tags", "governors", "relations"))
