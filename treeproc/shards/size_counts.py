"""Numbers of rows by size. The number of batches follows from them, at a hundredth of the bytes of the rows' lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeproc.common.errors import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.lengths import LENGTHS, open_columns
from treeproc.shards.mapped import Column
from treeproc.shards.ragged import edges_of
from treeproc.shards.schema import SIZE_COUNTS_SCHEMA
from treeproc.shards.store import read_index

SIZE_COUNTS = "size_counts.arrow"
_DENSE = 1 << 22  # cells of a table that is counted in one go; of larger sizes the pairs are sorted
_ROWS_AT_ONCE = 1 << 20
_CELLS_AT_ONCE = 1 << 18  # of the file, so that merging the shards of a window takes little memory


@dataclass(frozen=True)
class SizeCounts:
    """Numbers of rows by size, a cell for each pair of sizes that occurs; ordered by leaves, then target pieces."""

    leaves: np.ndarray  # [cells] int64
    tgt_pieces: np.ndarray  # [cells] int64
    rows: np.ndarray  # [cells] int64
    nodes: np.ndarray  # [cells] int64, of all rows of the cell together

    @classmethod
    def of(cls, leaves: np.ndarray, tgt_pieces: np.ndarray, nodes: np.ndarray) -> "SizeCounts":
        """Return the counts of rows [n] of these sizes. Raises ValueError for a size below 0."""
        return cls._sum(leaves, tgt_pieces, None, nodes)

    @classmethod
    def merge(cls, parts: Sequence["SizeCounts"]) -> "SizeCounts":
        """Return the counts of all parts together."""
        columns = [
            np.concatenate(column) for column in zip(*((p.leaves, p.tgt_pieces, p.rows, p.nodes) for p in parts), strict=True)
        ]
        return cls._sum(*columns) if columns else cls(*(np.zeros(0, dtype=np.int64) for _ in range(4)))

    @classmethod
    def _sum(cls, leaves: np.ndarray, tgt_pieces: np.ndarray, rows: np.ndarray | None, nodes: np.ndarray) -> "SizeCounts":
        if not len(leaves):
            return cls(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        if min(leaves.min(), tgt_pieces.min(), nodes.min()) < 0:
            raise ValueError("a size must be at least 0")
        width = int(tgt_pieces.max()) + 1
        keys = leaves.astype(np.int64) * width + tgt_pieces
        cells, place = None, keys
        if (int(leaves.max()) + 1) * width > _DENSE:
            cells, place = np.unique(keys, return_inverse=True)
        # The sums are exact: a double holds every integer up to 2^53.
        counted = np.bincount(place, rows).astype(np.int64)
        summed = np.bincount(place, nodes).astype(np.int64)
        if cells is None:
            cells = np.flatnonzero(counted)
            counted, summed = counted[cells], summed[cells]
        return cls(cells // width, cells % width, counted, summed)

    def __getitem__(self, cells: np.ndarray) -> "SizeCounts":
        """Return some of the cells."""
        return SizeCounts(self.leaves[cells], self.tgt_pieces[cells], self.rows[cells], self.nodes[cells])

    def without_targets(self) -> "SizeCounts":
        """Return the counts by leaves alone: target pieces are 0."""
        return self._sum(self.leaves, np.zeros_like(self.tgt_pieces), self.rows, self.nodes)

    def take(self, rows: np.ndarray) -> "SizeCounts":
        """Take so many rows [cells] of each cell, with the mean of its nodes each, rounded over the cell."""
        nodes = np.rint(self.nodes * (rows / np.maximum(1, self.rows))).astype(np.int64)
        return SizeCounts(self.leaves, self.tgt_pieces, rows, nodes)[rows > 0]


class StoredCounts:
    """The counts of every shard of a split, from `size_counts.arrow`."""

    def __init__(self, folder: AnyPath, split: str, shard_rows: np.ndarray):
        self._path, self._columns = folder / SIZE_COUNTS, open_columns(folder, SIZE_COUNTS, SIZE_COUNTS_SCHEMA, split)
        cells, last = np.zeros(len(shard_rows), dtype=np.int64), -1
        for numbers in self._columns["shard"].pieces():  # one for each shard
            if not last < (last := int(numbers[0])) < len(cells) or (numbers != last).any():
                raise UserError(f"{self._path} names other shards than index.json; run workflows/preprocess.py again")
            cells[last] = len(numbers)
        self._edges, self._rows = edges_of(cells), edges_of(shard_rows)

    def count(self, first: int, last: int) -> SizeCounts:
        """Sum the counts of the shards `first` to `last`, without the last. Raises UserError if the rows are others."""
        counts = SizeCounts.merge([])
        while first < last:
            after = int(np.searchsorted(self._edges, self._edges[first] + _CELLS_AT_ONCE))
            after = min(max(after, first + 1), last)
            counts, first = SizeCounts.merge([counts, self._read(first, after)]), after
        return counts

    def _read(self, first: int, last: int) -> SizeCounts:
        cells = slice(int(self._edges[first]), int(self._edges[last]))
        leaves, tgt_pieces, rows, nodes = (self._columns[name][cells] for name in ("leaves", "tgt_pieces", "rows", "nodes"))
        if len(rows) and min(rows.min(), leaves.min(), tgt_pieces.min(), nodes.min()) < 0:
            raise UserError(f"{self._path} is damaged: it has numbers below 0; run workflows/preprocess.py again")
        if int(rows.sum()) != self._rows[last] - self._rows[first]:
            raise UserError(f"{self._path} counts other rows than index.json; run workflows/preprocess.py again")
        return SizeCounts(leaves, tgt_pieces, rows, nodes)


class CountedLengths:
    """The counts of every shard of a split that has no `size_counts.arrow`: they are counted in its lengths."""

    def __init__(self, path: AnyPath, lengths: dict[str, Column], shard_rows: np.ndarray):
        self._path, self._lengths, self._rows = path, lengths, edges_of(shard_rows)

    def count(self, first: int, last: int) -> SizeCounts:
        """Sum as `StoredCounts.count` does."""
        counts, stop = SizeCounts.merge([]), int(self._rows[last])
        try:
            for start in range(int(self._rows[first]), stop, _ROWS_AT_ONCE):
                rows = slice(start, min(stop, start + _ROWS_AT_ONCE))
                part = SizeCounts.of(*(self._lengths[name][rows] for name in ("leaves", "tgt_pieces", "nodes")))
                counts = SizeCounts.merge([counts, part])
        except ValueError as error:
            raise UserError(f"{self._path} is damaged: {error}; run workflows/preprocess.py again") from None
        return counts


def open_counts(folder: AnyPath, split: str, lengths: dict[str, Column], shard_rows: np.ndarray) -> StoredCounts | CountedLengths:
    """Open the counts of a split, from their file where the index names it."""
    if SIZE_COUNTS in read_index(folder).get("files", {}):
        return StoredCounts(folder, split, shard_rows)
    return CountedLengths(folder / LENGTHS, lengths, shard_rows)
