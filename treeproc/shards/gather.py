"""Many rows of many record batches at once.

The rows of a shuffled batch lie in about as many record batches, each a memory map of its own. A slice of each would cost four
times what it takes to read the items by their addresses, as this does. No address can be wrong: when they are made, the edges
of all lists are checked against the arrays that they cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from treeproc.shards.ragged import ranges

_MOST_BYTES = 2**56  # of any address space


class Gather:
    """The rows of record batches, as `Shard.columns` has them, counted through all of them."""

    def __init__(self, batches: Sequence[Mapping[str, Any]]):
        self._batches = batches
        sizes = [len(columns["example_id"]) for columns in batches]
        self.batch = np.repeat(np.arange(len(batches), dtype=np.int32), sizes)  # of every row
        self.first = np.cumsum(sizes) - sizes  # row of every record batch
        self.edges = {
            name: np.concatenate([_checked_edges(columns[name], size) for columns, size in zip(batches, sizes, strict=True)])
            for name, views in (batches[0] if batches else {}).items()
            if isinstance(views, tuple)
        }
        self._fields: dict[tuple[str, str | None], _ByAddress] = {}

    def __contains__(self, column: str) -> bool:
        return bool(self._batches) and column in self._batches[0]

    def pick(self, rows: Sequence[int] | np.ndarray) -> "PickedRows":
        """These rows, in this order."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and rows.min() < 0:
            raise IndexError(f"rows count from 0, but one is {rows.min()}")
        return PickedRows(self, rows, self.batch[rows])

    def field(self, column: str, part: str | None) -> "_ByAddress":
        if (column, part) not in self._fields:
            self._fields[column, part] = _ByAddress([_array(columns[column], part) for columns in self._batches])
        return self._fields[column, part]


@dataclass(frozen=True)
class PickedRows:
    """Rows of a `Gather`, and the record batch of each."""

    source: Gather
    rows: np.ndarray  # [rows] int64
    batch: np.ndarray  # [rows] int32

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, column: str) -> np.ndarray:
        """[rows] of a column of numbers."""
        start, ones = self.rows - self.source.first[self.batch], np.ones(len(self), dtype=np.int64)
        return self.source.field(column, None).slices(self.batch, start, ones)

    def items(self, column: str, part: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Items of the lists of all rows, one after the other, and lengths [rows]; of one field where items are structs."""
        edges, at = self.source.edges[column], self.rows + self.batch  # a record batch has one more edge than rows
        start = edges[at].astype(np.int64)
        lengths = edges[at + 1] - start
        return self.source.field(column, part).slices(self.batch, start, lengths), lengths


class _ByAddress:
    """Arrays [a], [b], ... of one type, read together wherever they are in memory."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = arrays  # keeps the memory
        size, filled = arrays[0].itemsize, [array for array in arrays if len(array)] or arrays[:1]
        lowest = min(filled, key=lambda array: array.ctypes.data)
        offsets = [array.ctypes.data - lowest.ctypes.data if len(array) else 0 for array in arrays]
        if any(offset % size or array.dtype != lowest.dtype for offset, array in zip(offsets, arrays, strict=True)):
            raise ValueError("arrays must be of one type, at multiples of its size")
        self._all = as_strided(lowest, shape=(_MOST_BYTES // size,), strides=(size,), writeable=False)
        self._first = np.array(offsets) // size

    def slices(self, array: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The items from `start` on of `array`, `lengths` of them, for every triple, one after the other."""
        return self._all[ranges(self._first[array] + start, lengths)]


def _checked_edges(views: tuple[np.ndarray, Any], size: int) -> np.ndarray:
    edges, flat = views
    most = min(map(len, flat.values())) if isinstance(flat, Mapping) else len(flat)
    if len(edges) != size + 1 or edges[0] < 0 or edges[-1] > most or (np.diff(edges) < 0).any():
        raise ValueError("edges of lists must ascend within their items")
    return edges


def _array(views: Any, part: str | None) -> np.ndarray:
    if isinstance(views, tuple):
        return views[1] if part is None else views[1][part]
    return views
