"""The sizes of all encoded rows in one file, so that planning batches opens no shard, and how often each occurs in another.

Tasks make the record batches of many rows, each those of some shards. A task leaves them in a file beside the shards, and this
process copies them in order.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pyarrow as pa

from treeproc.common.cache import find_changed
from treeproc.common.files import TEMPORARY_PREFIX, atomic_output
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.arrow_file import BadArrowFile, read_arrow
from treeproc.shards.lengths import LENGTHS, SIZE_COUNTS, SizeCounts
from treeproc.shards.schema import LENGTHS_SCHEMA, SIZE_COUNTS_SCHEMA, WINDOW_ROWS
from treeproc.shards.shard import Shard
from treeproc.shards.store import Index, ShardRecord, fingerprint_of
from treeproc.stages.run_jobs import Run, grouped, in_number_order, run_here

_SIZES = ("leaves", "nodes", "tgt_pieces")
# Rows of a task: a second of work, where Ray's driver takes 20 ms a task. Its files have 29 bytes a row.
TASK_ROWS = 1_000_000
_SCHEMAS = {LENGTHS: LENGTHS_SCHEMA, SIZE_COUNTS: SIZE_COUNTS_SCHEMA}


def write_lengths(
    folder: AnyPath, records: Sequence[ShardRecord], window_rows: int = WINDOW_ROWS, run: Run = run_here
) -> list[str]:
    """Write `lengths.arrow` of an encoded stage, a record batch per shard; returns its name. `run` may run tasks that make them.

    With more than `window_rows` rows, also `size_counts.arrow`. With fewer rows, its readers count in the lengths.
    """
    splits, names = list(dict.fromkeys(record.split for record in records)), _names(records, window_rows)
    measure = MeasureShards(folder, splits, names)
    with ExitStack() as stack:
        files = [stack.enter_context(atomic_output(folder / name)) for name in names]
        writers = [stack.enter_context(pa.ipc.new_file(file, _SCHEMAS[name])) for file, name in zip(files, names, strict=True)]
        for batches in map(measure.batches, records) if run is run_here else _from_tasks(measure, records, run):
            for writer, batch in zip(writers, batches, strict=True):
                writer.write_batch(batch)
    return names


def kept_lengths(folder: AnyPath, index: Index, records: Sequence[ShardRecord], window_rows: int = WINDOW_ROWS) -> dict[str, str]:
    """Return the hashes of the files by name, if they are still those that `index` names, of the same shards; empty otherwise."""
    known = index.get("files", {})
    hashes = {name: known.get(name, "") for name in _names(records, window_rows)}
    if not all(hashes.values()) or records != index.records() or find_changed(folder, hashes):
        return {}
    return hashes


def _names(records: Sequence[ShardRecord], window_rows: int) -> list[str]:
    return [LENGTHS, SIZE_COUNTS] if sum(record.rows for record in records) > window_rows else [LENGTHS]


class MeasureShards:
    """Makes the record batches of some shards, one for each of the files `names`, and leaves them in the stage's folder."""

    def __init__(self, folder: AnyPath, splits: Sequence[str], names: Sequence[str]):
        self.folder, self.splits, self.names = folder, splits, names

    def __call__(self, shards: Sequence[ShardRecord], task: str) -> dict:
        """Leave those of these shards. `task` is the part of the files' names that no other task has."""
        for name, parts in zip(self.names, zip(*map(self.batches, shards), strict=True), strict=True):
            with atomic_output(self.file(name, task)) as file, pa.ipc.new_file(file, _SCHEMAS[name]) as writer:
                for part in parts:
                    writer.write_batch(part)
        return {}

    def batches(self, record: ShardRecord) -> list[pa.RecordBatch]:
        """Return the record batch of a shard for each file."""
        sizes = row_sizes(Shard(self.folder, record))
        tables = [(name, sizes if name == LENGTHS else _counts_of(sizes, record)) for name in self.names]
        return [_record_batch(table, record, self.splits, _SCHEMAS[name]) for name, table in tables]

    def file(self, name: str, task: str) -> AnyPath:
        """Return the file of a task, which a job that continues removes."""
        return self.folder / f"{TEMPORARY_PREFIX}{task}-{name}"


def _from_tasks(measure: MeasureShards, records: Sequence[ShardRecord], run: Run) -> Iterator[Sequence[pa.RecordBatch]]:
    """Yield `measure.batches` of every record, in order."""
    groups = grouped([(record.rows, record) for record in records], TASK_ROWS)
    # Named by content: a task of a job that was killed may still write, perhaps by other settings.
    tasks = [fingerprint_of([shard.sha256 for shard in group], number) for number, group in enumerate(groups)]
    jobs = [{"shards": group, "task": task} for group, task in zip(groups, tasks, strict=True)]
    arguments = {"folder": measure.folder, "splits": measure.splits, "names": measure.names}
    for task, _ in zip(tasks, in_number_order(run(MeasureShards, arguments, jobs)), strict=True):
        files = [measure.file(name, task) for name in measure.names]
        yield from zip(
            *(_read_batches(file, _SCHEMAS[name]) for file, name in zip(files, measure.names, strict=True)), strict=True
        )
        for file in files:
            file.unlink(missing_ok=True)


def _read_batches(path: AnyPath, schema: pa.Schema) -> list[pa.RecordBatch]:
    try:
        return read_arrow(pa.BufferReader(path.read_bytes()), [schema])[1]
    except (OSError, BadArrowFile) as error:
        raise UserError(f"{path}, which a task wrote, {_reason(error)}; run the same command again") from None


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, BadArrowFile) else f"cannot be read: {getattr(error, 'strerror', None) or error}"


def row_sizes(shard: Shard) -> dict[str, np.ndarray]:
    """Return the columns of `lengths.arrow` for one encoded shard, but the split."""
    none = np.zeros(0, dtype=np.int64)
    flat = {name: np.concatenate([none, *(_sizes(views, name) for views in shard.columns)]) for name in _SIZES}
    return flat | {
        "example_id": shard.ids,
        "shard": np.full(len(shard), shard.record.index),
        "row": np.arange(len(shard)),
    }


def _counts_of(sizes: dict[str, np.ndarray], record: ShardRecord) -> dict[str, np.ndarray]:
    """Return the columns of `size_counts.arrow`, but the split."""
    counts = vars(SizeCounts.of(sizes["leaves"], sizes["tgt_pieces"], sizes["nodes"]))
    return {**counts, "shard": np.full(len(counts["rows"]), record.index)}


def _record_batch(
    columns: dict[str, np.ndarray], record: ShardRecord, splits: Sequence[str], schema: pa.Schema
) -> pa.RecordBatch:
    codes = pa.array(np.full(len(columns["shard"]), splits.index(record.split)), pa.int8())
    split = pa.DictionaryArray.from_arrays(codes, pa.array(splits, pa.string()))
    arrays = [split if column.name == "split" else pa.array(columns[column.name], column.type) for column in schema]
    return pa.record_batch(arrays, schema=schema)


def _sizes(views: dict, name: str) -> np.ndarray:
    """Return the number of items per row; 0 if the data set has no such column."""
    return np.diff(views[name][0]) if name in views else np.zeros(len(views["example_id"]), dtype=np.int64)
