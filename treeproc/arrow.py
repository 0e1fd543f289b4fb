"""Rows to Arrow IPC bytes and back to NumPy views."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from treeproc.schema import ROWS_PER_RECORD_BATCH


def _column(rows: Sequence[dict], column: pa.Field) -> pa.Array:
    """Fresh Arrow array of one column. A list of structs is given as a dict of parallel lists."""
    values = [row[column.name] for row in rows]
    if not pa.types.is_list(column.type):
        return pa.array(values, column.type)
    item = column.type.value_type
    if pa.types.is_struct(item):
        fields = [item.field(i) for i in range(item.num_fields)]
        lengths = [len(value[fields[0].name]) for value in values]
        flat = [pa.array(list(chain.from_iterable(v[f.name] for v in values)), f.type) for f in fields]
        child = pa.StructArray.from_arrays(flat, fields=fields)
    else:
        lengths = [len(value) for value in values]
        child = pa.array(list(chain.from_iterable(values)), item)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), child, type=column.type)


def ipc_bytes(rows: Sequence[dict], schema: pa.Schema) -> bytes:
    """An uncompressed Arrow IPC file, whose bytes depend on `rows` and `schema` alone."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(rows), ROWS_PER_RECORD_BATCH):
            batch = rows[start : start + ROWS_PER_RECORD_BATCH]
            writer.write_batch(pa.record_batch([_column(batch, column) for column in schema], schema=schema))
    return sink.getvalue().to_pybytes()


def column_views(array: pa.Array):
    """(offsets, {field: flat}) for lists of structs, (offsets, flat) for lists, else the array itself."""
    if not pa.types.is_list(array.type):
        return _numpy(array)
    # Record batches written by `ipc_bytes` are whole arrays, so offsets count from the first child.
    offsets, child = array.offsets.to_numpy(), array.flatten()
    if pa.types.is_struct(child.type):
        return offsets, {child.type.field(i).name: _numpy(child.field(i)) for i in range(child.type.num_fields)}
    return offsets, _numpy(child)


def _numpy(array: pa.Array):
    return array if pa.types.is_string(array.type) else array.to_numpy()


def pick(views, offset: int):
    if not isinstance(views, tuple):
        value = views[offset]
        return value.as_py() if isinstance(value, pa.Scalar) else value.item()
    offsets, flat = views
    start, stop = offsets[offset], offsets[offset + 1]
    if isinstance(flat, dict):
        return {name: _slice(values, start, stop) for name, values in flat.items()}
    return _slice(flat, start, stop)


def _slice(values, start: int, stop: int):
    part = values[start:stop]
    return part.to_pylist() if isinstance(part, pa.Array) else part
