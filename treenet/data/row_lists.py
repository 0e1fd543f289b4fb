"""Columns of examples, gathered from shards row by row."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

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
Append = Callable[[np.ndarray], None]
# Fields that every batch has, for any encoder.
ALWAYS = ("pieces", "labels", "starts", "ends", "subtree_ends", "targets")


@dataclass
class RowLists:
    """The columns of a batch's examples, one array an example; columns beyond `ALWAYS` where an encoder reads them."""

    example_ids: list[int] = field(default_factory=list)
    pieces: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    starts: list[np.ndarray] = field(default_factory=list)
    ends: list[np.ndarray] = field(default_factory=list)
    subtree_ends: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    words: list[np.ndarray] = field(default_factory=list)  # word of each leaf
    pos_tags: list[np.ndarray] = field(default_factory=list)  # tag of each leaf
    governors: list[np.ndarray] = field(default_factory=list)  # governor of each word, -1 for the root
    relations: list[np.ndarray] = field(default_factory=list)  # relation of each word to its governor

    def __len__(self) -> int:
        return len(self.example_ids)

    def appenders(self, columns: Iterable[str] = ()) -> list[tuple[str, list[tuple[str | None, Append]]]]:
        """For every column of a shard that is read, its fields, and the function that appends an example's values of one."""
        found: dict[str, list[tuple[str | None, Append]]] = {}
        for name in (*ALWAYS, *columns):
            column, part = COLUMNS[name]
            found.setdefault(column, []).append((part, getattr(self, name).append))
        return list(found.items())

    def spans(self) -> list[np.ndarray]:
        """[N, 3] of each example: start, end, subtree_end."""
        flat = np.stack([np.concatenate(lists) for lists in (self.starts, self.ends, self.subtree_ends)], axis=1)
        return np.split(flat, np.cumsum(lengths_of(self.labels))[:-1])


def lengths_of(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[len(rows)] int64."""
    return np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
