"""The sizes of all encoded rows in one file, so that planning batches opens no shard."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from treeproc.common.files import atomic_output
from treeproc.shards.schema import LENGTHS_SCHEMA
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord

_SIZES = ("leaves", "nodes", "tgt_pieces")


def write_lengths(folder: Path, records: Sequence[ShardRecord]) -> None:
    """`lengths.arrow` of an encoded stage, one record batch per shard."""
    splits = list(dict.fromkeys(record.split for record in records))
    with atomic_output(folder / "lengths.arrow") as file, pa.ipc.new_file(file, LENGTHS_SCHEMA) as writer:
        for record in records:
            writer.write_batch(_lengths_of(Shard(folder, record), splits))


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


def _lengths_of(shard: Shard, splits: Sequence[str]) -> pa.RecordBatch:
    flat = row_sizes(shard)
    codes = pa.array(np.full(len(shard), splits.index(shard.record.split)), pa.int8())
    split = pa.DictionaryArray.from_arrays(codes, pa.array(splits, pa.string()))
    arrays = [split if column.name == "split" else pa.array(flat[column.name], column.type) for column in LENGTHS_SCHEMA]
    return pa.record_batch(arrays, schema=LENGTHS_SCHEMA)


def _joined(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _sizes(views: dict, name: str) -> np.ndarray:
    """Items per row; 0 where the data set has no such column."""
    return np.diff(views[name][0]) if name in views else np.zeros(len(views["example_id"]), dtype=np.int64)
