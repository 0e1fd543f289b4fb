"""Examples of an encoded data set by row number, and batches built ahead of the training step."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from treenet.data.batch import TreeBatch, collate_rows
from treenet.data.input_kinds import TREES, InputKind
from treenet.data.row_lists import ALWAYS, COLUMNS, RowLists
from treenet.structure.ragged import Ragged
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.gather import Gather, PickedRows
from treeproc.shards.lengths import read_lengths
from treeproc.shards.shard import open_shards
from treeproc.shards.store import read_index

Item = TypeVar("Item")


class ExampleSource:
    """One split of DATA/encoded, memory-mapped.

    Row numbers count over the whole split, in the order of `lengths.arrow`. Raises UserError when
    shards and lengths do not belong together, or the data set has not got what a model that `reads` needs.
    """

    def __init__(self, folder: AnyPath, split: str, reads: InputKind = TREES):
        self.reads = reads
        check_columns(folder, reads)
        self.lengths = read_lengths(folder, split)
        shards = open_shards(folder, split)
        sizes = [len(shard) for shard in shards]
        if sum(sizes) != len(self):
            raise UserError(
                f"{folder / 'lengths.arrow'} has {len(self)} {split} rows, but the shards have {sum(sizes)}; "
                "run workflows/preprocess.py again"
            )
        shard = np.repeat(np.array([shard.record.index for shard in shards], np.int32), sizes)
        row = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        if not (np.array_equal(shard, self.lengths["shard"]) and np.array_equal(row, self.lengths["row"])):
            raise UserError(f"{folder / 'lengths.arrow'} names rows that the shards have not; run workflows/preprocess.py again")
        self._gather = Gather([columns for shard in shards for columns in shard.columns])

    def __len__(self) -> int:
        return len(self.lengths["row"])

    def batch(self, rows: Sequence[int] | np.ndarray) -> TreeBatch:
        """The rows as one padded batch."""
        picked = self.pick(rows)
        out = RowLists(example_ids=picked.values("example_id"))
        for name in (*ALWAYS, *self.reads.columns):
            setattr(out, name, self.lists(picked, *COLUMNS[name]))
        return collate_rows(out, self.reads)

    def pick(self, rows: Sequence[int] | np.ndarray) -> PickedRows:
        """Rows whose columns are read."""
        return self._gather.pick(rows)

    def lists(self, picked: PickedRows, column: str, part: str | None = None) -> Ragged:
        """A list column of rows, or one field of it; empty lists where the data set has no target side."""
        if column not in self._gather:
            return Ragged(np.zeros(0, dtype=np.int32), np.zeros(len(picked), dtype=np.int64))
        return Ragged(*picked.items(column, part))

    def target_tokens(self, rows: np.ndarray) -> int:
        """Target pieces with EOS, which the loss of a batch is divided by, without reading a shard."""
        return int(self.lengths["tgt_pieces"][rows].sum()) + len(rows)


def check_columns(folder: AnyPath, reads: InputKind) -> None:
    """Raises UserError when DATA/encoded has not got what a model that `reads` needs."""
    if reads.reads_arcs and "arcs" not in read_index(folder).get("columns", []):
        raise UserError(f"{folder} has no arcs, which this model reads; preprocess again with parser.dependencies=true")


class Prefetcher(Generic[Item]):
    """Runs an iterator in a thread, `depth` items ahead; an error in it is raised to the consumer.

    `waited` is the time in seconds that the consumer spent waiting for an item.
    """

    _END = object()

    def __init__(self, items: Iterator[Item], depth: int = 4):
        self._items, self._stop = items, threading.Event()
        self._queue: queue.Queue = queue.Queue(maxsize=depth)
        self._thread = threading.Thread(target=self._fill, daemon=True)
        self.waited = 0.0

    def __enter__(self) -> "Prefetcher[Item]":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Item]:
        while True:
            started = time.monotonic()
            item = self._queue.get()
            self.waited += time.monotonic() - started
            if item is self._END:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _fill(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(self._END)
        except BaseException as error:  # handed over: the consumer raises it
            self._put(error)

    def _put(self, item: object) -> bool:
        """False when the consumer has left."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False
