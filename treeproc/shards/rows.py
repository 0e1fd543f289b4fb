"""Rows to Arrow IPC bytes and back to NumPy views."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from treeproc.shards.ragged import arrow_array, edges_of, numbers_of
from treeproc.shards.schema import ROWS_PER_RECORD_BATCH


@dataclass(frozen=True)
class Batches:
    """Rows as record batches of ROWS_PER_RECORD_BATCH rows, the last one of what is left."""

    batches: Sequence[pa.RecordBatch]

    def __len__(self) -> int:
        return sum(map(len, self.batches))


@dataclass(frozen=True)
class Lists:
    """A list column of many rows: `flat` holds the items of all rows, by field where they are structs."""

    lengths: np.ndarray
    flat: np.ndarray | Mapping[str, np.ndarray]


def _column(rows: Sequence[dict], column: pa.Field) -> pa.Array:
    """Return a fresh Arrow array of one column. A list of structs is given as a dict of parallel lists."""
    values = [row[column.name] for row in rows]
    if not pa.types.is_list(column.type):
        return arrow_array(values, column.type)
    item = column.type.value_type
    if pa.types.is_struct(item):
        fields = [item.field(i) for i in range(item.num_fields)]
        lengths = [len(value[fields[0].name]) for value in values]
        flat = [arrow_array(list(chain.from_iterable(v[f.name] for v in values)), f.type) for f in fields]
        child = pa.StructArray.from_arrays(flat, fields=fields)
    else:
        lengths = [len(value) for value in values]
        child = arrow_array(list(chain.from_iterable(values)), item)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(arrow_array(offsets, pa.int32()), child, type=column.type)


def record_batches(rows: Sequence[dict], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows in the batches of a shard."""
    for start in range(0, len(rows), ROWS_PER_RECORD_BATCH):
        batch = rows[start : start + ROWS_PER_RECORD_BATCH]
        yield pa.record_batch([_column(batch, column) for column in schema], schema=schema)


def column_batch(columns: Mapping[str, np.ndarray | Lists], schema: pa.Schema) -> pa.RecordBatch:
    """Build one record batch from NumPy columns, of the same bytes as `record_batches` from rows."""
    return pa.record_batch([_array(columns[column.name], column.type) for column in schema], schema=schema)


def _array(values: np.ndarray | Lists, type_: pa.DataType) -> pa.Array:
    if not isinstance(values, Lists):
        return arrow_array(values, type_)
    item = type_.value_type
    if isinstance(values.flat, Mapping):
        fields = [item.field(i) for i in range(item.num_fields)]
        child = pa.StructArray.from_arrays([arrow_array(values.flat[f.name], f.type) for f in fields], fields=fields)
    else:
        child = arrow_array(values.flat, item)
    return pa.ListArray.from_arrays(arrow_array(edges_of(values.lengths), pa.int32()), child, type=type_)


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
