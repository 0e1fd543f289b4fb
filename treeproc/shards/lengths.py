"""The sizes of all encoded rows, which `lengths.arrow` holds, so that planning batches opens no shard."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from treeproc.common.cache import local_copy
from treeproc.common.errors import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.arrow_file import BadArrowFile, read_arrow
from treeproc.shards.mapped import Column
from treeproc.shards.read_ahead import ReadAhead
from treeproc.shards.schema import LENGTHS_SCHEMA
from treeproc.shards.shard import lacks
from treeproc.shards.store import read_index

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
        raise UserError(lacks(error, path) or f"{path} {error}; run workflows/preprocess.py again") from None
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
    code = names.index(split)
    if codes.min() == codes.max() == code:
        yield batch
        return
    edges = np.flatnonzero(np.diff(np.concatenate([[False], codes == code, [False]])))
    for start, stop in edges.reshape(-1, 2).tolist():
        yield batch.slice(start, stop - start)
