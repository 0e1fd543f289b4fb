"""Columns of examples: of a batch that was read from shards at once, or put together row by row."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treenet.structure.span_table import Ragged

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
