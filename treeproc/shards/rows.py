"""Rows of different lengths: as one flat array and their lengths or edges, as Arrow IPC bytes, and as NumPy views of those."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from treeproc.common.errors import UserError
from treeproc.shards.schema import ROWS_PER_RECORD_BATCH


@dataclass(frozen=True)
class WordEnds:
    """Words of many lines: line r has words [edges[r], edges[r + 1]), word w ends before character ends[w] of its line."""

    edges: np.ndarray
    ends: np.ndarray


def edges_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
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


def hash_ids(ids: np.ndarray) -> np.ndarray:
    """Compute splitmix64 of the ids as uint64 [n]: spread evenly, the same on every machine and in every run."""
    with np.errstate(over="ignore"):
        mixed = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


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
    offsets, content = pa.py_buffer(_offsets(edges)), pa.py_buffer(np.ascontiguousarray(data))
    return pa.StringArray.from_buffers(len(edges) - 1, offsets, content)


def _offsets(edges: np.ndarray) -> np.ndarray:
    """Return edges as the offsets of Arrow's lists and strings. Raises UserError if these cannot count so far."""
    if edges[-1] > np.iinfo(np.int32).max:
        raise UserError(
            f"up to {ROWS_PER_RECORD_BATCH:,} neighbouring examples have {edges[-1]:,} bytes of text, or words, but a data set "
            "holds less than 2 GiB of them; cut long examples into shorter ones"
        )
    return edges.astype(np.int32)


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


@dataclass(frozen=True)
class Batches:
    """Rows as record batches of ROWS_PER_RECORD_BATCH rows, the last one of what is left."""

    batches: Sequence[pa.RecordBatch]

    def __len__(self) -> int:
        return sum(map(len, self.batches))


@dataclass(frozen=True)
class Lists:
    """A list column of many rows: `flat` holds the items of all rows, by field where they are structs."""

    lengths: Sequence[int] | np.ndarray
    flat: Sequence | np.ndarray | Mapping[str, Sequence | np.ndarray]


def _column(rows: Sequence[dict], column: pa.Field) -> Sequence | Lists:
    """Return one column for `column_batch`. A list of structs is given as a dict of parallel lists."""
    values = [row[column.name] for row in rows]
    if not pa.types.is_list(column.type):
        return values
    item = column.type.value_type
    if not pa.types.is_struct(item):
        return Lists([len(value) for value in values], list(chain.from_iterable(values)))
    names = [item.field(i).name for i in range(item.num_fields)]
    flat = {name: list(chain.from_iterable(value[name] for value in values)) for name in names}
    return Lists([len(value[names[0]]) for value in values], flat)


def record_batches(rows: Sequence[dict], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows in the batches of a shard."""
    for start in range(0, len(rows), ROWS_PER_RECORD_BATCH):
        batch = rows[start : start + ROWS_PER_RECORD_BATCH]
        yield column_batch({column.name: _column(batch, column) for column in schema}, schema)


def column_batch(columns: Mapping[str, Sequence | np.ndarray | Lists], schema: pa.Schema) -> pa.RecordBatch:
    """Build one record batch from columns."""
    return pa.record_batch([_array(columns[column.name], column.type) for column in schema], schema=schema)


def _array(values: Sequence | np.ndarray | Lists, type_: pa.DataType) -> pa.Array:
    if not isinstance(values, Lists):
        return arrow_array(values, type_)
    item = type_.value_type
    if isinstance(values.flat, Mapping):
        fields = [item.field(i) for i in range(item.num_fields)]
        child = pa.StructArray.from_arrays([arrow_array(values.flat[f.name], f.type) for f in fields], fields=fields)
    else:
        child = arrow_array(values.flat, item)
    return pa.ListArray.from_arrays(arrow_array(_offsets(edges_of(values.lengths)), pa.int32()), child, type=type_)


def ipc_bytes(rows: Sequence[dict] | Batches, schema: pa.Schema) -> bytes:
    """Return an uncompressed Arrow IPC file, whose bytes depend on `rows` and `schema` alone."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in rows.batches if isinstance(rows, Batches) else record_batches(rows, schema):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def batch_views(batch: pa.RecordBatch) -> dict:
    """Return `column_views` of every column."""
    return {name: column_views(batch.column(name)) for name in batch.schema.names}


def column_views(array: pa.Array) -> Any:
    """Return (offsets, {field: flat}) for lists of structs, (offsets, flat) for lists, else the array itself."""
    if not pa.types.is_list(array.type):
        return _numpy(array)
    # Record batches written by `ipc_bytes` are whole arrays, so offsets count from the first child.
    offsets, child = numbers_of(array.offsets), array.flatten()
    if pa.types.is_struct(child.type):
        return offsets, {child.type.field(i).name: _numpy(child.field(i)) for i in range(child.type.num_fields)}
    return offsets, _numpy(child)


def _numpy(array: pa.Array) -> pa.Array | np.ndarray:
    return array if pa.types.is_string(array.type) else numbers_of(array)


def pick(views: Any, offset: int) -> Any:
    if not isinstance(views, tuple):
        value = views[offset]
        return value.as_py() if isinstance(value, pa.Scalar) else value.item()
    offsets, flat = views
    start, stop = offsets[offset], offsets[offset + 1]
    if isinstance(flat, dict):
        return {name: _slice(values, start, stop) for name, values in flat.items()}
    return _slice(flat, start, stop)


def _slice(values: pa.Array | np.ndarray, start: int, stop: int) -> list | np.ndarray:
    part = values[start:stop]
    return part.to_pylist() if isinstance(part, pa.Array) else part
