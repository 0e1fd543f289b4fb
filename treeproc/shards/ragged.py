"""Rows of different lengths as one flat array and their lengths or edges."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pyarrow as pa


def edges_of(lengths: np.ndarray) -> np.ndarray:
    """Return [n + 1] where each row begins, and the total."""
    edges = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=edges[1:])
    return edges


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the indices starts[0], ..., starts[0] + lengths[0] - 1, starts[1], ... of several slices of a flat array."""
    edges = edges_of(lengths)
    return np.arange(edges[-1]) + np.repeat(starts - edges[:-1], lengths)


def take(flat: np.ndarray, edges: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen rows of a ragged array: (flat, lengths)."""
    lengths = edges[rows + 1] - edges[rows]
    return flat[ranges(edges[rows], lengths)], lengths


def flatten(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return lists of integers as (flat, lengths)."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum())), lengths


def string_bytes(strings: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the UTF-8 bytes of a string array and the edges [n + 1] of its strings in them, without a copy."""
    if not len(strings):
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, edges, data = strings.buffers()
    edges = np.frombuffer(edges, dtype=np.int32)[strings.offset : strings.offset + len(strings) + 1]
    every = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return every[edges[0] : edges[-1]], (edges - edges[0]).astype(np.int64)


def strings_of(data: np.ndarray, edges: np.ndarray) -> pa.Array:
    """Return strings that lie one after the other in `data`, UTF-8 bytes; the inverse of `string_bytes`."""
    offsets, content = pa.py_buffer(edges.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))
    return pa.StringArray.from_buffers(len(edges) - 1, offsets, content)


def cut_strings(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Cut the strings at `starts` of `data`, of `lengths` bytes."""
    return strings_of(data[ranges(starts, lengths)], edges_of(lengths))


def arrow_array(values: Sequence | np.ndarray, type_: pa.DataType) -> pa.Array:
    """Return an Arrow array of texts or numbers that are all there. `pa.array` would load pandas, if it is installed."""
    if pa.types.is_string(type_):
        texts = [text.encode() for text in values]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return strings_of(np.frombuffer(b"".join(texts), np.uint8), edges_of(lengths))
    numbers = np.ascontiguousarray(values, dtype=type_.to_pandas_dtype())
    return pa.Array.from_buffers(type_, len(numbers), [None, pa.py_buffer(numbers)])


def numbers_of(array: pa.Array) -> np.ndarray:
    """Return the numbers of an array without nulls, where they lie. `Array.to_numpy` would load pandas, if it is installed.

    Raises ValueError for nulls.
    """
    if array.null_count:
        raise ValueError(f"{array.null_count:,} of {len(array):,} numbers are missing")
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.zeros(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def window_bounds(shard_rows: np.ndarray, window_rows: int) -> np.ndarray:
    """Return the first shards of windows, and the number of shards [windows + 1]. There is one window where all rows fit.

    The n rows have ceil(n / window_rows) windows of about the same size, which end where a shard ends: they may be larger
    by half a shard. A shard that is larger than a window is a window alone.
    """
    edges = edges_of(shard_rows)
    windows = max(1, -(-int(edges[-1]) // window_rows))
    wanted = edges[-1] * np.arange(1, windows) // windows
    after = np.searchsorted(edges, wanted)
    before = np.maximum(0, after - 1)
    nearest = np.where(wanted - edges[before] <= edges[after] - wanted, before, after)
    nearest = np.searchsorted(edges, edges[nearest])  # shards without rows make no difference
    inside = nearest[(edges[nearest] > 0) & (edges[nearest] < edges[-1])]
    return np.unique(np.concatenate([[0], inside, [len(shard_rows)]]))
