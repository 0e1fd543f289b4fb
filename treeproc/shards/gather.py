"""Many rows of many shards at once.

The rows of a shuffled batch lie in about as many record batches of as many shards. Shards are opened when a row of theirs is
asked for first, and are read by address. No address can be wrong: when a shard is opened, the edges of all lists are checked
against the arrays that they cut.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from treeproc.common.store_requests import in_parallel
from treeproc.shards.lengths import memory_of, place_of
from treeproc.shards.rows import edges_of, ranges

# Shards that are open at once. A window of rows in the smallest shards of the default, 2,000 rows, has 4,194 of them, and a batch
# has rows of most: a lower limit would open shards anew for every batch. Linux allows a process 65,530 memory maps.
MOST_OPEN = 8192

Columns = Mapping[str, Any]  # of a record batch, as `Shard.columns` has them
Key = tuple[str, str | None]  # a column, and a field of it where its items are structs
_EDGES = "edges of lists"  # no field is called so


class Gather:
    """The rows of shards of `sizes` [shards] rows, counted through all of them.

    `open_shard(number)` gives the record batches of a shard, each of `batch_rows` rows but the last. What it raises is raised
    where a row of the shard is asked for. With `at_once` above 1, threads open so many shards at a time.
    """

    def __init__(
        self,
        sizes: Sequence[int] | np.ndarray,
        open_shard: Callable[[int], Sequence[Columns]],
        batch_rows: int,
        most_open: int = MOST_OPEN,
        at_once: int = 1,
    ):
        self._at_once = at_once
        self._edges, self._open_shard, self._batch_rows = edges_of(np.asarray(sizes, dtype=np.int64)), open_shard, batch_rows
        self._most_open, self._lock, self._clock = most_open, Lock(), 0
        self._open: dict[int, Sequence[Columns]] = {}
        self._used = np.zeros(len(sizes), dtype=np.int64)  # the clock when a shard was asked for last
        self._first = np.full(len(sizes), -1, dtype=np.int64)  # number of its first record batch among the open ones
        self._table = _Places({}, np.zeros((0, 0), dtype=np.int64), 0)

    def __contains__(self, column: str) -> bool:
        """Return whether there are rows, and their shards have this column."""
        return bool(len(self)) and column in self.pick([0])

    def __len__(self) -> int:
        return int(self._edges[-1])

    def pick(self, rows: Sequence[int] | np.ndarray) -> "PickedRows":
        """Pick these rows, in this order. Opens the shards that they are in."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"rows must be from 0 to {len(self) - 1}, but some are outside")
        shard = self._shard_of(rows)
        batch, row = np.divmod(rows - self._edges[shard], self._batch_rows)
        with self._lock:  # a thread makes batches while another tries the largest
            self._clock += 1
            needed = np.unique(shard) if len(shard) or not len(self) else self._shard_of(np.zeros(1))  # for the types of columns
            self._used[needed] = self._clock
            missing = needed[self._first[needed] < 0].tolist()
            many = self._at_once > 1 and len(missing) > 1
            opened = in_parallel(self._open_shard, missing, self._at_once) if many else map(self._open_shard, missing)
            for number, batches in zip(missing, opened, strict=True):
                self._add(number, batches)
            shards = [self._open[number] for number in needed.tolist()]
            picked = PickedRows(shards, self._table, self._first[shard] + batch, row)
            if len(self._open) > self._most_open:
                self._close()
        return picked

    def _shard_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._edges, rows, side="right") - 1

    def _add(self, number: int, batches: Sequence[Columns]) -> None:
        self._table, self._first[number] = self._table.add(batches), self._table.size
        self._open[number] = batches

    def _close(self) -> None:
        """Close the half of the shards that were used longest ago. Picked rows keep their shards."""
        kept = sorted(self._open, key=lambda number: int(self._used[number]))[-max(1, self._most_open // 2) :]
        shards = {number: self._open[number] for number in kept}
        self._open, self._table = {}, _Places({}, np.zeros((0, 0), dtype=np.int64), 0)
        self._first[:] = -1
        for number, batches in shards.items():
            self._add(number, batches)


@dataclass(frozen=True)
class _Places:
    """Where in memory the columns of record batches begin."""

    columns: Mapping[Key, tuple[int, np.dtype]]  # row of `places`, and the type
    places: np.ndarray  # [columns, room for record batches], items of `memory_of` the column's type
    size: int  # record batches

    def add(self, batches: Sequence[Columns]) -> "_Places":
        """Return the places with the record batches of another shard, too. Raises ValueError if they are unlike those here."""
        arrays: dict[Key, list[np.ndarray]] = {}
        for columns in batches:
            for key, array in _arrays(columns):
                arrays.setdefault(key, []).append(array)
        known = self.columns or {key: (i, found[0].dtype) for i, (key, found) in enumerate(arrays.items())}
        if batches and known.keys() != arrays.keys():
            raise ValueError("all shards must have the same columns")
        size, places = self.size + len(batches), self.places
        if size > places.shape[1]:
            places = np.zeros((len(known), 2 * size), dtype=np.int64)  # those who read the old one keep it
            places[: len(self.places), : self.size] = self.places[:, : self.size]
        for key, found in arrays.items():
            row, dtype = known[key]
            if any(array.dtype != dtype for array in found):
                raise ValueError("arrays of a column must be of one type")
            places[row, self.size : size] = [place_of(array) for array in found]
        return _Places(known, places, size)


@dataclass(frozen=True)
class PickedRows:
    """Rows of a `Gather`, whose shards stay open as long as this is there."""

    shards: list[Sequence[Columns]]
    table: _Places
    batch: np.ndarray  # [rows] number of each row's record batch in `table`
    row: np.ndarray  # [rows] of its record batch

    def __len__(self) -> int:
        return len(self.row)

    def __contains__(self, column: str) -> bool:
        return (column, None) in self.table.columns or (column, _EDGES) in self.table.columns

    def values(self, column: str) -> np.ndarray:
        """Return [rows] of a column of numbers."""
        memory, start = self._start((column, None))
        return memory[start + self.row]

    def items(self, column: str, part: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return items of the lists of all rows, one after the other, and lengths [rows]; of one field if items are structs."""
        memory, first = self._start((column, _EDGES))
        start = memory[first + self.row].astype(np.int64)
        lengths = memory[first + self.row + 1] - start
        memory, first = self._start((column, part))
        return memory[ranges(first + start, lengths)], lengths

    def _start(self, key: Key) -> tuple[np.ndarray, np.ndarray]:
        """Return the memory that a column is in, and where in it the record batch [rows] of each row begins."""
        place, dtype = self.table.columns[key]
        return memory_of(dtype), self.table.places[place, self.batch]


def _arrays(columns: Columns) -> Iterator[tuple[Key, np.ndarray]]:
    """Yield the arrays of a record batch. Raises ValueError if one does not hold what its rows refer to."""
    size = len(columns["example_id"])
    for name, views in columns.items():
        if isinstance(views, tuple):
            edges, flat = views
            parts = flat.items() if isinstance(flat, Mapping) else [(None, flat)]
            most = min((len(array) for _, array in parts), default=0)
            if len(edges) != size + 1 or edges[0] < 0 or edges[-1] > most or (np.diff(edges) < 0).any():
                raise ValueError("edges of lists must ascend within their items")
            yield (name, _EDGES), edges
            yield from (((name, part), array) for part, array in parts)
        elif len(views) != size:
            raise ValueError("a column must have a number for each row")
        else:
            yield (name, None), views
