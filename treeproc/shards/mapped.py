"""Values of memory maps by their addresses: items of many arrays are read at once, wherever the arrays are.

A slice of each array would cost four times what it takes to read the items by their addresses. The caller must check
the addresses, and keep the arrays alive while they are read.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from treeproc.shards.ragged import edges_of

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
