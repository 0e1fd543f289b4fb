"""Shards read through memory maps: rows as zero-copy NumPy views. The names of a vocabulary."""

import errno
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from treeproc.common.cache import drop_damaged, find_changed, local_copy
from treeproc.common.errors import UserError
from treeproc.common.storage import AnyPath, RemotePath, inside
from treeproc.shards.arrow_file import BadArrowFile, read_arrow
from treeproc.shards.rows import batch_views, pick
from treeproc.shards.schema import NEEDED_COLUMNS, ROWS_PER_RECORD_BATCH, STAGE_SCHEMAS, line_end_in
from treeproc.shards.store import Index, ShardRecord, content_fingerprint, read_index, stage_folder, vocabulary_files

_AGAIN = "run tree-attention preprocess again"
HELD_SHARDS = 64  # shards of a split that is read row by row


class Shard:
    """Memory-mapped shard with rows as zero-copy NumPy views.

    Raises UserError when the file is missing, was cut off, or does not fit its index record.
    """

    def __init__(self, folder: AnyPath, record: ShardRecord):
        path = inside(folder, record.name)
        local = check_size(folder, record)
        known = [STAGE_SCHEMAS[folder.name]] if folder.name in STAGE_SCHEMAS else list(STAGE_SCHEMAS.values())
        try:
            with pa.memory_map(str(local)) as source:  # which closes the file; what was read keeps its memory map
                self.schema, batches = read_arrow(source, known)
        except (OSError, BadArrowFile) as error:
            raise UserError(lacks(error, path) or f"{path} {error}; run tree-attention preprocess again") from None
        if missing := [name for name in NEEDED_COLUMNS.get(folder.name, ()) if name not in self.schema.names]:
            raise UserError(f"{path}: column {missing[0]} is missing; run tree-attention preprocess again")
        rows = [ROWS_PER_RECORD_BATCH] * (record.rows // ROWS_PER_RECORD_BATCH)
        rows += [record.rows % ROWS_PER_RECORD_BATCH] * bool(record.rows % ROWS_PER_RECORD_BATCH)
        if list(map(len, batches)) != rows:
            raise UserError(f"{path} has another number of rows than index.json names; run tree-attention preprocess again")
        self.record = record
        self._batches = batches
        self.columns = [batch_views(batch) for batch in batches]

    def __len__(self) -> int:
        return self.record.rows

    def row(self, index: int) -> dict:
        """Return one example: scalars, NumPy arrays (list columns) and dicts of arrays (lists of structs)."""
        batch, offset = divmod(index, ROWS_PER_RECORD_BATCH)
        return {name: pick(views, offset) for name, views in self.columns[batch].items()}

    def rows(self) -> Iterator[dict]:
        return (self.row(i) for i in range(len(self)))

    def find(self, example_id: int, place: int) -> dict | None:
        """Return the row of an example; None if it is not here. `place` is its row in the encoded stage, which may lack some."""
        if place < len(self) and (row := self.row(place))["example_id"] == example_id:
            return row
        place = int(np.searchsorted(self.ids, example_id))
        return self.row(place) if place < len(self) and self.ids[place] == example_id else None

    @cached_property
    def ids(self) -> np.ndarray:
        """Return the `example_id` of every row."""
        return np.concatenate([np.zeros(0, np.int64), *(views["example_id"] for views in self.columns)])

    def some_columns(self, rows: np.ndarray) -> Iterator[dict]:
        """Yield what `columns` would be of a shard with only these rows."""
        table = self.table()
        for start in range(0, len(rows), ROWS_PER_RECORD_BATCH):
            part = table.take(pa.array(rows[start : start + ROWS_PER_RECORD_BATCH])).combine_chunks()
            (batch,) = part.to_batches()
            yield batch_views(batch)

    def table(self) -> pa.Table:
        """Return all rows, with nested columns; memory-mapped."""
        return pa.Table.from_batches(self._batches, self.schema)


def check_size(folder: AnyPath, record: ShardRecord, hint: str = _AGAIN) -> Path:
    """Return the local file of a shard. Raises UserError, which ends in `hint`, when it is missing or of another size."""
    path = inside(folder, record.name)
    try:
        local = local_copy(path, record.sha256)
        size = local.stat().st_size
        if size != record.bytes and isinstance(path, RemotePath):  # after a power cut, a copy may lack its end
            size = local_copy(path, record.sha256, anew=True).stat().st_size
    except OSError as error:
        raise UserError(lacks(error, path) or f"{path} is missing; {hint}") from None
    if size != record.bytes:
        raise UserError(f"{path} must have {record.bytes} bytes, but has {size}; {hint}")
    return local


def lacks(error: Exception, path: AnyPath) -> str:
    """Return the message if this process may open no more files; empty if the file is to blame."""
    limit = {
        errno.ENOMEM: "memory maps left: raise vm.max_map_count (sysctl)",
        errno.EMFILE: "file descriptors left: raise ulimit -n",
        errno.ENFILE: "file descriptors left on this machine: raise fs.file-max (sysctl)",
    }.get(getattr(error, "errno", None) or 0)
    return f"{path} is not damaged, but this process has no {limit}" if limit else ""


def split_records(folder: AnyPath, split: str) -> Sequence[ShardRecord]:
    """Return the records of the shards of one split, in order. Raises UserError when the split is not there."""
    index = read_index(folder)
    records = index.records(split)
    if not records:
        raise _no_split(folder, split, index["totals"])
    return records


def _no_split(folder: AnyPath, split: str, there: Collection[str]) -> UserError:
    """Return the error for a split that is not among those of a data set; an exported run has a vocabulary without examples."""
    if there:
        return UserError(f"{folder / 'index.json'} has no split {split!r}; there are: {', '.join(there)}")
    return UserError(f"{folder.parent} holds a vocabulary without examples; give a data set: data=DATA")


class SplitShards:
    """The shards of one split, in order. A shard is opened when it is asked for, and the last few are held.

    Raises UserError when the split is not there. Asking for a shard raises UserError when it is damaged.
    """

    def __init__(self, folder: AnyPath, split: str):
        self.folder, self._split, self.records = folder, split, split_records(folder, split)
        self._columns = read_index(folder).get("columns")
        self._held: dict[int, Shard] = {}

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Shard]:
        return (self[place] for place in range(len(self)))

    def __getitem__(self, place: int) -> Shard:
        number = range(len(self))[place]
        if number not in self._held:
            shard = Shard(self.folder, self.records[number])
            check_names(self.folder, shard, self._columns)
            self._held = {**dict(list(self._held.items())[1 - HELD_SHARDS :]), number: shard}
        return self._held[number]

    def __reduce__(self) -> tuple:
        """Let another process read the index and map the files anew."""
        return SplitShards, (self.folder, self._split)

    def by_index(self) -> dict[int, int]:
        """Return the place of every shard by the number that `lengths.arrow` has for it."""
        return {record.index: place for place, record in enumerate(self.records)}


def check_names(folder: AnyPath, shard: Shard, columns: Sequence[str] | None) -> None:
    """Raise UserError if the columns of a shard are not the `columns` of its index. An index without names allows all."""
    if columns and shard.schema.names != columns:
        raise UserError(
            f"{folder / shard.record.name}: its columns are {', '.join(shard.schema.names)}, but index.json names "
            f"{', '.join(columns)[:200]}; run tree-attention preprocess again"
        )


def tables(folder: AnyPath, split: str) -> dict[str, pa.Table]:
    """Return flat Arrow tables `leaves`, `nodes` and `spans` with `example_id`, for DuckDB, pandas or polars."""
    parts: dict[str, list[pa.Table]] = {"leaves": [], "nodes": [], "spans": []}
    for shard in SplitShards(folder, split):
        for views in shard.columns:
            for name, tables_ in parts.items():
                offsets, flat = views[name]
                example_id = np.repeat(views["example_id"], np.diff(offsets))
                tables_.append(pa.table({"example_id": example_id, **flat}))
    return {name: pa.concat_tables(tables_) for name, tables_ in parts.items()}


def check_hashes(folder: AnyPath, *splits: str) -> None:
    """Check the shards of these splits, and what the index names beside them, and open the first shard of each split.

    Files are hashed, but for those that were found right before and have not changed since (`common/cache.py`). Objects must be
    there in their size: each is hashed when it is copied here, and copies that are here are hashed as files are. Raises UserError
    for the first file that is missing, cut off, or whose bytes are not what the index says.
    """
    index = read_index(folder)
    records = {split: index.records(split) for split in splits}
    hashes = dict(index.get("files", {}))
    sizes = {}
    for split, of_split in records.items():
        if not of_split:
            raise _no_split(folder, split, index["totals"])
        for record in of_split:
            hashes[record.name], sizes[record.name] = record.sha256, record.bytes
    for name in hashes:
        inside(folder, name)
    if isinstance(folder, RemotePath):
        _check_objects(folder, hashes, sizes)
        check_vocabulary_files(folder, index)
    else:
        _check_files(folder, hashes)
    for of_split in records.values():
        check_names(folder, Shard(folder, of_split[0]), index.get("columns"))


def check_vocabulary_files(folder: AnyPath, index: Index, hint: str = _AGAIN) -> None:
    """Check what a model reads of the encoded stage `folder` beside shards. Raises UserError for a file that has changed."""
    files = index.get("files", {})
    _check_files(folder, {name: files[name] for name in vocabulary_files(folder) if name in files}, hint)


def check_stage(data: AnyPath, stage: str, split: str = "") -> AnyPath:
    """Return the folder of the stage `text` or `parsed` of a data set. Shards of `split` on this machine are hashed.

    Raises UserError if the encoded stage was made of another one, or if a shard is missing or damaged.
    """
    folder, encoded = stage_folder(data, stage), read_index(data / "encoded")
    index = read_index(folder)
    least = encoded.get("min_parse_score") if stage == "text" else None
    if encoded.get(f"{stage}_fingerprint") != content_fingerprint(index.records(), least):
        again = "restore it, or run tree-attention preprocess with another --out"
        raise UserError(f"{folder} is not the stage that {data / 'encoded'} was made of; {again}")
    if isinstance(folder, Path):
        _check_files(folder, {record.name: record.sha256 for record in index.records(split)} if split else {})
    return folder


def _check_files(folder: AnyPath, hashes: dict[str, str], hint: str = _AGAIN) -> None:
    for name in find_changed(folder, hashes):
        raise UserError(f"{folder / name} is damaged: its hash is not the one in index.json; {hint}")


def _check_objects(folder: RemotePath, hashes: dict[str, str], sizes: dict[str, int]) -> None:
    there = folder.objects()
    for name in hashes:
        if name not in there:
            raise UserError(f"{folder / name} is missing; run tree-attention preprocess again")
        if (size := there[name]) != sizes.get(name, size):
            raise UserError(f"{folder / name} must have {sizes[name]} bytes, but has {size}; run tree-attention preprocess again")
    drop_damaged(hashes.values())


MOST_NAMES = 1 << 15  # their ids are int16


def names_bytes(names: Sequence[str]) -> bytes:
    """Encode a file of labels, tags or relations, for `read_names`. Raises UserError for too many, and for a line end in one."""
    if len(names) > MOST_NAMES:
        raise UserError(
            f"the trees have {len(names):,} labels, tags or relations of one kind, but at most {MOST_NAMES:,} are possible; join "
            "some in the input, or choose another parser"
        )
    if wrong := line_end_in(names):
        raise UserError(f"the trees have the label, tag or relation {wrong}; remove it from the input, or choose another parser")
    return "".join(f"{name}\n" for name in names).encode()


def read_names(path: AnyPath) -> list[str]:
    """Read labels, tags or relations by id, as `names_bytes` wrote them. Raises UserError for a missing or damaged file."""
    try:
        names = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {_AGAIN}") from None
    if not names[-1]:
        names.pop()
    if wrong := line_end_in(names):
        raise UserError(f"{path} is damaged: it has the name {wrong}; {_AGAIN}")
    return names
