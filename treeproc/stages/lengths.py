"""The sizes of all encoded rows in one file, so that planning batches opens no shard, and how often each occurs in another."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from treeproc.common.files import atomic_output
from treeproc.shards.lengths import LENGTHS
from treeproc.shards.schema import LENGTHS_SCHEMA, SIZE_COUNTS_SCHEMA, WINDOW_ROWS
from treeproc.shards.shard import Shard
from treeproc.shards.size_counts import SIZE_COUNTS, SizeCounts
from treeproc.shards.store import ShardRecord

_SIZES = ("leaves", "nodes", "tgt_pieces")


def write_lengths(folder: Path, records: Sequence[ShardRecord], window_rows: int = WINDOW_ROWS) -> list[str]:
    """`lengths.arrow` of an encoded stage, one record batch per shard, and its name.

    With more than `window_rows` rows, also `size_counts.arrow`. With fewer rows, its readers count in the lengths.
    """
    splits = list(dict.fromkeys(record.split for record in records))
    names = [LENGTHS, SIZE_COUNTS] if sum(record.rows for record in records) > window_rows else [LENGTHS]
    with ExitStack() as stack:
        files = [stack.enter_context(atomic_output(folder / name)) for name in names]
        writers = [
            stack.enter_context(pa.ipc.new_file(file, schema))
            for file, schema in zip(files, (LENGTHS_SCHEMA, SIZE_COUNTS_SCHEMA), strict=False)
        ]
        for record in records:
            sizes = row_sizes(Shard(folder, record))
            for writer, batch in zip(writers, (_lengths_of, _counts_of), strict=False):
                writer.write_batch(batch(sizes, record, splits))
    return names


def row_sizes(shard: Shard) -> dict[str, np.ndarray]:
    """The columns of `lengths.arrow` for one encoded shard, but the split."""
    flat = {name: _joined(_sizes(views, name) for views in shard.columns) for name in _SIZES}
    return flat | {
        "example_id": example_ids(shard),
        "shard": np.full(len(shard), shard.record.index),
        "row": np.arange(len(shard)),
    }


def example_ids(shard: Shard) -> np.ndarray:
    """example_id of every row of a shard of any stage."""
    return _joined(views["example_id"] for views in shard.columns)


def _lengths_of(sizes: dict[str, np.ndarray], record: ShardRecord, splits: Sequence[str]) -> pa.RecordBatch:
    return _record_batch(sizes, record, splits, LENGTHS_SCHEMA)


def _counts_of(sizes: dict[str, np.ndarray], record: ShardRecord, splits: Sequence[str]) -> pa.RecordBatch:
    counts = vars(SizeCounts.of(sizes["leaves"], sizes["tgt_pieces"], sizes["nodes"]))
    return _record_batch({**counts, "shard": np.full(len(counts["rows"]), record.index)}, record, splits, SIZE_COUNTS_SCHEMA)


def _record_batch(
    columns: dict[str, np.ndarray], record: ShardRecord, splits: Sequence[str], schema: pa.Schema
) -> pa.RecordBatch:
    codes = pa.array(np.full(len(columns["shard"]), splits.index(record.split)), pa.int8())
    split = pa.DictionaryArray.from_arrays(codes, pa.array(splits, pa.string()))
    arrays = [split if column.name == "split" else pa.array(columns[column.name], column.type) for column in schema]
    return pa.record_batch(arrays, schema=schema)


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _sizes(views: dict, name: str) -> np.ndarray:
    """Items per row; 0 if the data set has no such column."""
    return np.diff(views[name][0]) if name in views else np.zeros(len(views["example_id"]), dtype=np.int64)
