"""The sizes of all encoded rows, which `lengths.arrow` holds, as columns in the memory map; and how often each size occurs.

So planning batches opens no shard. `size_counts.arrow` holds the counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from treeproc.common.cache import local_copy
from treeproc.common.errors import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.arrow_file import BadArrowFile, ReadAhead, read_arrow
from treeproc.shards.rows import edges_of
from treeproc.shards.schema import LENGTHS_SCHEMA, SIZE_COUNTS_SCHEMA
from treeproc.shards.shard import lacks
from treeproc.shards.store import read_index

_MOST_BYTES = 2**56  # of any address space


class _Memory:
    """All memory as one array of a type, in NumPy's array interface. Item 0 is at the address of one item's size, not at 0."""

    def __init__(self, dtype: np.dtype):
        shape = (_MOST_BYTES // dtype.itemsize,)
        self.__array_interface__ = {"data": (dtype.itemsize, True), "shape": shape, "typestr": dtype.str, "version": 3}


@cache
def memory_of(dtype: np.dtype) -> np.ndarray:
    """Return all memory as an array of this type; an array begins at the item `place_of(array)` of it."""
    return np.asarray(_Memory(dtype))


def place_of(array: np.ndarray) -> int:
    """Find the item of `memory_of` its type where an array begins. Raises ValueError for gaps, or between two items."""
    if not len(array):
        return 0  # nothing is read of it, and its address may be any
    if array.ctypes.data % array.itemsize or array.strides != (array.itemsize,):
        raise ValueError("arrays must be without gaps, at multiples of the size of their items")
    return array.ctypes.data // array.itemsize - 1


class Column:
    """A column of numbers in several pieces of memory. It reads like an array: by number, slice, array or mask; what is read is
    a copy.

    The pieces are at the addresses [pieces] and have sizes of at least 1; `keep` is the object whose memory they are in. A piece
    takes 16 bytes here, an array of NumPy hundreds. Raises ValueError for an address between two items.
    """

    def __init__(self, addresses: np.ndarray, sizes: np.ndarray, dtype: np.dtype, keep: object):
        self.dtype, self._edges, self._keep = np.dtype(dtype), edges_of(sizes), keep
        items, between = np.divmod(addresses, self.dtype.itemsize)
        if between.any():
            raise ValueError("pieces must begin at multiples of the size of their items")
        self._places = items - 1  # as `place_of` has them

    def __len__(self) -> int:
        return int(self._edges[-1])

    def __iter__(self) -> Iterator[np.generic]:
        return iter(np.asarray(self))

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return self._part(0, len(self)).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: "int | slice | Sequence[int] | np.ndarray") -> np.ndarray:
        """Return rows. Raises IndexError for a row that is not there. Negative numbers do not count from the end: an error."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._part(start, stop)[::step] if step > 0 else np.asarray(self)[index]
        rows = np.asarray(index)
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        if rows.size and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"rows must be from 0 to {len(self) - 1}, but some are outside")
        piece = np.searchsorted(self._edges, rows, side="right") - 1
        return memory_of(self.dtype)[self._places[piece] + rows - self._edges[piece]]

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield a copy of each piece."""
        memory, sizes = memory_of(self.dtype), np.diff(self._edges).tolist()
        return (memory[place : place + size].copy() for place, size in zip(self._places.tolist(), sizes, strict=True))

    def _part(self, start: int, stop: int) -> np.ndarray:
        parts = [np.zeros(0, self.dtype)]
        if start < stop:
            first, last = np.searchsorted(self._edges, [start, stop - 1], side="right").tolist()
            edges, memory = self._edges[first - 1 : last + 1].clip(start, stop), memory_of(self.dtype)
            begins = self._places[first - 1 : last] + edges[:-1] - self._edges[first - 1 : last]
            parts += [memory[begin : begin + size] for begin, size in zip(begins.tolist(), np.diff(edges).tolist(), strict=True)]
        return np.concatenate(parts)


LENGTHS = "lengths.arrow"


def read_lengths(folder: AnyPath, split: str) -> dict[str, np.ndarray]:
    """Read columns of `lengths.arrow` for one split: shard, row, example_id, leaves, nodes, tgt_pieces; see `open_lengths`."""
    return {name: np.array(column) for name, column in open_lengths(folder, split).items()}


def open_lengths(folder: AnyPath, split: str) -> dict[str, Column]:
    """Open what `read_lengths` reads without a copy: columns in the memory map. Raises UserError for a damaged file."""
    return open_columns(folder, LENGTHS, LENGTHS_SCHEMA, split)


def open_columns(folder: AnyPath, name: str, schema: pa.Schema, split: str) -> dict[str, Column]:
    """Open the rows of one split of a file of this schema, which has a column `split`: its other columns, in the memory map.

    Raises UserError when the file is not there, is damaged or has other columns.
    """
    path = folder / name
    try:
        if isinstance(path, Path):
            local = path
        elif name in (files := read_index(folder).get("files", {})):
            local = local_copy(path, files[name])
        else:
            raise BadArrowFile("is not in index.json")
        with pa.memory_map(str(local)) as source:
            memory = source.read_buffer()  # no copy: the memory map, which outlives the file that is closed here
        with ReadAhead(local, memory) as ahead:
            found, batches = read_arrow(pa.BufferReader(memory), [schema], ahead)
        if found != schema:
            raise BadArrowFile(f"must have the columns {', '.join(schema.names)}")
    except (OSError, BadArrowFile) as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else error
        raise UserError(lacks(error, path) or f"{path} {what}; run tree-attention preprocess again") from None
    parts = [part for batch in batches for part in _rows_of_split(batch, split)]
    return {field.name: _column(field, parts, memory) for field in schema if field.name != "split"}


def _column(field: pa.Field, parts: Sequence[pa.RecordBatch], memory: pa.Buffer) -> Column:
    dtype = np.dtype(field.type.to_pandas_dtype())
    arrays = [part.column(field.name) for part in parts]
    addresses = np.array([array.buffers()[1].address + array.offset * dtype.itemsize for array in arrays], dtype=np.int64)
    sizes = np.array([len(array) for array in arrays], dtype=np.int64)
    if ((addresses < memory.address) | (addresses + sizes * dtype.itemsize > memory.address + memory.size)).any():
        raise ValueError("record batches must be in the memory map that is kept")
    return Column(addresses, sizes, dtype, memory)


def _rows_of_split(batch: pa.RecordBatch, split: str) -> Iterator[pa.RecordBatch]:
    """Yield the parts of a record batch that are of a split: all of it or nothing, but in files that were written at once."""
    column = batch.column("split")
    names = column.dictionary.to_pylist()
    if split not in names or not len(column):
        return
    # Not `to_numpy`, which imports pandas.
    codes = np.frombuffer(column.indices.buffers()[1], np.int8)[column.offset : column.offset + len(column)]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], codes == names.index(split), [False]])))
    for start, stop in edges.reshape(-1, 2).tolist():
        yield batch.slice(start, stop - start)


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
                raise UserError(f"{self._path} names other shards than index.json; run tree-attention preprocess again")
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
            raise UserError(f"{self._path} is damaged: it has numbers below 0; run tree-attention preprocess again")
        if int(rows.sum()) != self._rows[last] - self._rows[first]:
            raise UserError(f"{self._path} counts other rows than index.json; run tree-attention preprocess again")
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
            raise UserError(f"{self._path} is damaged: {error}; run tree-attention preprocess again") from None
        return counts


def open_counts(folder: AnyPath, split: str, lengths: dict[str, Column], shard_rows: np.ndarray) -> StoredCounts | CountedLengths:
    """Open the counts of a split, from their file where the index names it."""
    if SIZE_COUNTS in read_index(folder).get("files", {}):
        return StoredCounts(folder, split, shard_rows)
    return CountedLengths(folder / LENGTHS, lengths, shard_rows)
