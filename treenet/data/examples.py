"""Examples of an encoded data set by row number, and batches built ahead of the training step. Language models read one side."""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from treenet.data.batch import TreeBatch, collate_rows
from treenet.data.frozen_states import FrozenStates
from treenet.data.input_kinds import ALWAYS, COLUMNS, TREES, InputKind, RowLists, check_columns
from treenet.data.plan import BatchPlan
from treenet.data.windows import ShardSizes
from treenet.structure.base import Ragged
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.common.store_requests import AT_ONCE
from treeproc.shards.gather import Gather, PickedRows
from treeproc.shards.lengths import LENGTHS, Column, open_counts, open_lengths
from treeproc.shards.records import ShardRecord
from treeproc.shards.rows import edges_of
from treeproc.shards.schema import ROWS_PER_RECORD_BATCH
from treeproc.shards.shard import Shard, check_names, check_size, split_records
from treeproc.shards.store import read_index

Item = TypeVar("Item")


class Examples(ABC):
    """Examples of a split by row number, as batches are made from them."""

    lengths: Mapping[str, np.ndarray | Column]  # columns of `lengths.arrow`
    sentences = 1  # of the text stage for an example id of `lengths`

    @abstractmethod
    def batch(self, rows: Sequence[int] | np.ndarray) -> TreeBatch:
        """Return the rows as one padded batch."""

    def target_tokens(self, rows: np.ndarray) -> int:
        """Return the number of targets, which the loss of a batch is divided by, without reading a shard."""
        return int(self.count_targets(self.lengths["leaves"][rows], self.lengths["tgt_pieces"][rows]).sum())

    def epoch_targets(self, plan: BatchPlan) -> int:
        """Return `target_tokens` of all rows in use."""
        sizes = plan.used_sizes()
        return int((self.count_targets(sizes.leaves, sizes.tgt_pieces) * sizes.rows).sum())

    def count_targets(self, leaves: np.ndarray, tgt_pieces: np.ndarray) -> np.ndarray:
        """Return the number of targets of each example [n] of these sizes: target pieces with EOS."""
        return tgt_pieces + 1

    def sizes(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return the numbers [n] of leaves, nodes and target pieces of the rows."""
        return {name: self.lengths[name][rows] for name in ("leaves", "nodes", "tgt_pieces")}

    def in_epoch(self, epoch: int) -> "Examples":
        """Return the examples as an epoch has them: the same in all epochs, unless a subclass samples them."""
        return self


class ExampleSource(Examples):
    """One split of DATA/encoded, memory-mapped. A shard is opened when one of its rows is asked for.

    Row numbers count over the whole split, in the order of `lengths.arrow`. Raises UserError when
    shards and lengths do not belong together, or if the data set lacks columns that a model that `reads` needs. A shard
    is checked when it is opened. Here, the first shard is opened, and the sizes of the other files on disk are checked. With
    `states`, batches have the states of that folder (`FrozenStates`).
    """

    shards: ShardSizes | None  # of the rows; None if rows are not those of shards, and so in one window

    def __init__(self, folder: AnyPath, split: str, reads: InputKind = TREES, states: AnyPath | None = None):
        self.reads, self.folder = reads, folder
        check_columns(folder, reads)
        # Subclasses may have other examples, and so other `lengths`; `_stored` are those of the rows of the shards.
        self.lengths = self._stored = open_lengths(folder, split)
        # Without counts a record takes half a kB, so that all are held: a batch asks for shards in any order.
        self._records = [replace(record, counts={}, longest={}) for record in split_records(folder, split)]
        self._columns = read_index(folder).get("columns")
        sizes = np.array([record.rows for record in self._records], dtype=np.int64)
        if sizes.sum() != len(self):
            raise UserError(
                f"{folder / LENGTHS} has {len(self)} {split} rows, but the shards have {sizes.sum()}; "
                "run tree-attention preprocess again"
            )
        if isinstance(folder, Path):
            for record in self._records:
                check_size(folder, record)
        self.shards = ShardSizes(sizes, open_counts(folder, split, self.lengths, sizes).count)
        self._edges = edges_of(sizes)
        # Objects are copied several at a time.
        at_once = AT_ONCE if isinstance(folder, RemotePath) else 1
        self._gather = Gather(sizes, self._open, ROWS_PER_RECORD_BATCH, at_once=at_once)
        self._gather.pick(range(min(1, len(self))))
        self._states = None if states is None else FrozenStates(states, split, self.lengths["leaves"])

    def __len__(self) -> int:
        return len(self.lengths["row"])

    def records(self, rows: range) -> list[ShardRecord]:
        """Return the records of the shards that hold a range of rows."""
        first, last = np.searchsorted(self._edges, [rows.start, rows.stop - 1], side="right").tolist()
        return [self._records[number] for number in range(first - 1, last if rows else first - 1)]

    def batch(self, rows: Sequence[int] | np.ndarray) -> TreeBatch:
        """Return the rows as one padded batch."""
        batch = collate_rows(self.row_lists(rows), self.reads)
        if self._states is not None:
            batch.leaf_states = self._states.pad(np.asarray(rows), batch.leaf_pieces.shape[1])
        return batch

    def row_lists(self, rows: Sequence[int] | np.ndarray, names: Collection[str] = ()) -> RowLists:
        """Return the example ids and the columns `names` of rows. Without names, they are the columns that the model reads."""
        picked = self.pick(rows)
        out = RowLists(example_ids=picked.values("example_id"))
        for name in names or (*ALWAYS, *self.reads.columns):
            setattr(out, name, self.lists(picked, *COLUMNS[name]))
        return out

    def pick(self, rows: Sequence[int] | np.ndarray) -> PickedRows:
        """Return the rows whose columns are read."""
        return self._gather.pick(rows)

    def lists(self, picked: PickedRows, column: str, part: str | None = None) -> Ragged:
        """Return a list column of rows, or one field of it; empty lists where the data set has no target side."""
        if column not in picked:
            return Ragged(np.zeros(0, dtype=np.int32), np.zeros(len(picked), dtype=np.int64))
        return Ragged(*picked.items(column, part))

    def _open(self, number: int) -> list[dict]:
        """Return the record batches of a shard. Raises UserError if it is damaged, or its rows are not those of the lengths."""
        record = self._records[number]
        shard, rows = Shard(self.folder, record), slice(*self._edges[number : number + 2].tolist())
        check_names(self.folder, shard, self._columns)
        if (self._stored["shard"][rows] != record.index).any() or (self._stored["row"][rows] != np.arange(record.rows)).any():
            raise UserError(
                f"{self.folder / LENGTHS} names rows that are not in {record.name}; run tree-attention preprocess again"
            )
        return shard.columns


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
        """Put an item into the queue. Return False when the consumer has left."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False


class SourceSide(ExampleSource):
    """One split of a data set, with targets or without. Only the leaves plan and cut batches, so all models have the same."""

    def __init__(self, folder: AnyPath, split: str, reads: InputKind):
        super().__init__(folder, split, reads)
        self.lengths = {**self.lengths, "tgt_pieces": np.broadcast_to(np.int32(0), len(self))}  # takes no memory
        if shards := self.shards:
            self.shards = replace(shards, count=lambda first, last: shards.count(first, last).without_targets())
