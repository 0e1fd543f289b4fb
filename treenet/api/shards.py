"""`read_shards`: a split of a data set for PyTorch, Ray, Hugging Face `datasets`, DuckDB and pandas."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from treeproc.common.errors import UserError, as_integer, check_choice, check_flag, check_string, from_python, quoted, require
from treeproc.common.storage import AnyPath, RemotePath, as_path
from treeproc.shards.shard import HELD_SHARDS, Shard, SplitShards, tables

if TYPE_CHECKING:
    import datasets
    import duckdb
    import pandas
    import ray.data

STAGES = ("encoded", "parsed", "text")
VIEWS = ("leaves", "nodes", "spans")


def given_path(name: str, path: AnyPath | str) -> AnyPath:
    """Return the path of a file or an object. Raises UserError for an empty path, and for other types."""
    if not isinstance(path, str | PathLike | RemotePath) or not str(path).strip():
        raise UserError(f"{name} must be the path of a folder, but is {quoted(path)}")
    return as_path(str(path))


class ShardDataset(IterableDataset):
    """The rows of a split as dictionaries of NumPy arrays; views of memory-mapped files.

    The workers of a `DataLoader` and the ranks of a training share the rows. Each has a run of them, as long as the others or
    one row shorter. No row comes twice. Batches: `DataLoader(dataset, batch_size=32, collate_fn=treenet.collate)`.

    With `shuffle`, the order follows from the seed and the epoch. All shards are shuffled, and then the rows of as many
    neighbours as may be open at a time, so that no process opens a shard twice.
    """

    def __init__(
        self,
        shards: SplitShards,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ):
        if (rank is None) != (world_size is None):
            raise UserError(f"rank and world_size must both be given, but are {rank} and {world_size}")
        if rank is not None:
            as_integer("rank", rank, 0, as_integer("world_size", world_size, 1) - 1)
        check_flag("shuffle", shuffle)
        self._place, self._shards, self._shuffle, self._seed = (rank, world_size), shards, shuffle, as_integer("seed", seed, 0)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # also for workers that a DataLoader keeps
        self._rows = sum(record.rows for record in shards.records)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process gets. A worker that is not a fork does not know the rank of its training."""
        known = {"_place": self._rank()} if dist.is_available() and dist.is_initialized() else {}
        return vars(self) | known

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of another epoch, on all ranks alike, before a loop begins."""
        self._epoch.fill_(as_integer("epoch", epoch, 0))

    def __len__(self) -> int:
        """Return the number of rows of this rank, of all its workers together."""
        first, last = self._share(*self._rank())
        return last - first

    def __iter__(self) -> Iterator[dict]:
        rank, world_size = self._rank()
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        share = rank * workers + number
        drawn = [self._seed, int(self._epoch)]
        places = np.arange(len(self._shards))
        if self._shuffle:
            places = np.random.default_rng(drawn).permutation(places)
        runs = self._runs(places.tolist(), *self._share(share, world_size * workers))
        of_rows = np.random.default_rng([*drawn, share, world_size * workers])
        for first in range(0, len(runs), HELD_SHARDS):
            group = runs[first : first + HELD_SHARDS]
            ends = list(accumulate(len(rows) for _, rows in group))
            for row in of_rows.permutation(ends[-1]) if self._shuffle else range(ends[-1]):
                number = bisect_right(ends, row)
                place, rows = group[number]
                with from_python():
                    shard = self._shards[place]
                yield shard.row(rows[int(row) - ends[number]])  # from the end of its rows

    def _runs(self, places: list[int], start: int, end: int) -> list[tuple[int, range]]:
        """Return the shards of rows [start, end) and their own rows, where shards follow each other as in `places`."""
        runs, before = [], 0
        for place in places:
            count = self._shards.records[place].rows
            rows = range(max(start - before, 0), min(end - before, count))
            if rows:  # other shards are not opened
                runs.append((place, rows))
            before += count
        return runs

    def _rank(self) -> tuple[int, int]:
        rank, world_size = self._place
        if rank is not None and world_size is not None:
            return rank, world_size
        return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)

    def _share(self, number: int, count: int) -> tuple[int, int]:
        return self._rows * number // count, self._rows * (number + 1) // count


class Shards:
    """One split of a stage of a data set: `encoded`, `parsed` or `text`."""

    def __init__(self, folder: AnyPath, split: str):
        self.folder, self.split = folder, split
        self._shards = SplitShards(folder, split)
        self._shards[0]  # a wrong data set is found here

    def __len__(self) -> int:
        return sum(record.rows for record in self._shards.records)

    def __iter__(self) -> Iterator[dict]:
        """Return the rows in order, as dictionaries of NumPy arrays; views of memory-mapped files."""
        for place in range(len(self._shards.records)):
            with from_python():
                shard = self._shards[place]
            yield from map(shard.row, range(len(shard)))

    @from_python()
    def __getitem__(self, row: int) -> dict:
        """Return one row. Raises IndexError for a row beyond the split."""
        number = range(len(self))[as_integer("a row", row)]
        for place, record in enumerate(self._shards.records):
            if number < record.rows:
                return self._shards[place].row(number)
            number -= record.rows
        raise AssertionError("unreachable: the number is below the sum of all rows")

    def __repr__(self) -> str:
        return f"Shards({str(self.folder)!r}, {self.split!r}: {len(self):,} rows in {len(self._shards):,} shards)"

    @from_python()
    def to_torch(
        self, rank: int | None = None, world_size: int | None = None, *, shuffle: bool = False, seed: int = 0
    ) -> ShardDataset:
        """Return an `IterableDataset` of rows. Ranks are those of `torch.distributed` unless they are given.

        With `shuffle`, call its `set_epoch` before each epoch: rows come in an order of seed, epoch, ranks and workers.
        """
        return ShardDataset(self._shards, rank, world_size, shuffle=shuffle, seed=seed)

    @from_python()
    def to_arrow(self) -> pa.Table:
        """Return all rows as one Arrow table with nested columns, memory-mapped."""
        return pa.concat_tables(shard.table() for shard in self._shards)

    @from_python()
    def to_ray(self) -> "ray.data.Dataset":
        """Return a Ray Dataset with nested columns; tasks read the shards, so the folder must be one that all nodes see.

        Raises UserError if Ray is not installed.
        """
        require("ray", "to_ray()")
        import ray.data

        folder, records = self.folder, {record.name: record for record in self._shards.records}

        def read(batch: dict[str, Any]) -> pa.Table:
            [name] = batch["shard"]
            return Shard(folder, records[str(name)]).table()

        names = ray.data.from_items([{"shard": name} for name in records])
        return names.map_batches(read, batch_size=1)

    @from_python()
    def to_datasets(self) -> "datasets.Dataset":
        """Return a Hugging Face `datasets.Dataset`. Raises UserError if that package is not installed."""
        require("datasets", "to_datasets()")
        import datasets
        from datasets.table import InMemoryTable

        return datasets.Dataset(InMemoryTable(self.to_arrow()))

    @from_python()
    def to_duckdb(self, connection: "duckdb.DuckDBPyConnection | None" = None) -> "duckdb.DuckDBPyConnection":
        """Return a DuckDB connection, given or new, with the views `leaves`, `nodes` and `spans` of an encoded stage.

        Raises UserError if DuckDB is not installed, for another stage, and if the connection has tables or views of these names.
        """
        require("duckdb", "to_duckdb()")
        import duckdb

        self._check_views("to_duckdb()")
        connection = connection or duckdb.connect()
        names = "select lower(table_name) from information_schema.tables where table_catalog in (current_database(), 'temp')"
        there = {name for (name,) in connection.execute(names).fetchall()}
        if taken := [name for name in VIEWS if name in there]:
            raise UserError(f"to_duckdb(): the connection already has {', '.join(taken)}; give another connection, or none")
        for name, table in tables(self.folder, self.split).items():
            connection.register(name, table)
        return connection

    @from_python()
    def to_pandas(self, view: str | None = None) -> "pandas.DataFrame":
        """Return a pandas frame with a row an example, or a row an item of a `view`: leaves, nodes or spans, with `example_id`.

        Columns of examples have Arrow types, for example lists of structs. Raises UserError if pandas is not installed, and for
        a view of another stage than encoded.
        """
        require("pandas", "to_pandas()")
        import pandas

        if view is None:
            return self.to_arrow().to_pandas(types_mapper=pandas.ArrowDtype)
        check_choice("view", view, VIEWS)
        self._check_views("to_pandas(view)")
        return tables(self.folder, self.split)[view].to_pandas()

    def _check_views(self, method: str) -> None:
        if self.folder.name != "encoded":
            raise UserError(f"{method} reads leaves, nodes and spans, but {self.folder} has none; read its stage encoded")


@from_python()
def read_shards(data: AnyPath | str, split: str = "train", stage: str = "encoded") -> Shards:
    """Return a split of the data set in folder `data`, local or in an object store.

    A shard is opened, and copied from an object store, when a row of it is read. Raises UserError when data set, stage or split
    are not there, or the first shard does not fit the index. Reading raises UserError for other shards that do not fit.
    """
    check_choice("stage", stage, STAGES)
    check_string("split", split)
    return Shards(given_path("data", data).absolute() / stage, split)
