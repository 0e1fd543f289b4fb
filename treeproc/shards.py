"""Arrow shards on disk: atomic writer, sidecars, `index.json`, memory-mapped reader.

A shard counts as written when its sidecar `.json` is there: the shard is written to a temporary
file, synced, renamed, and only then its sidecar the same way. `index.json` merges the sidecars of
a finished stage. A process killed at any moment leaves finished shards and temporary files behind,
never half a shard.
"""

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute

from treeproc.schema import LENGTHS_SCHEMA, ROWS_PER_RECORD_BATCH, SCHEMA_VERSION, SPLITS
from treeproc.settings import UserError

TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True)
class ShardRecord:
    """What a sidecar says of its shard. `counts` add up over shards; `longest` are maxima."""

    name: str
    split: str
    index: int
    rows: int
    bytes: int
    sha256: str
    fingerprint: str
    schema_version: int = SCHEMA_VERSION
    counts: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)


def fingerprint(*parts: object) -> str:
    """Short stable hash of JSON-serialisable parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def atomic_write(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: temporary file beside it, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path}: {error.strerror}; free space or choose another --out, then run the same command again"
        ) from None
    sync_folder(path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes; the lock goes with the process.

    Raises UserError when another one has it.
    """
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing to {folder}; wait for it, or choose another --out") from None
        yield


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def write_shard(
    folder: Path,
    name: str,
    rows: Sequence[dict],
    schema: pa.Schema,
    *,
    split: str,
    index: int,
    fingerprint: str,
    counts: Counter | None = None,
    longest: dict[str, int] | None = None,
) -> ShardRecord:
    """Write one shard and then its sidecar. Raises UserError when the disk refuses."""
    content = ipc_bytes(rows, schema)
    record = ShardRecord(
        name=name,
        split=split,
        index=index,
        rows=len(rows),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        fingerprint=fingerprint,
        counts=dict(sorted((counts or Counter()).items())),
        longest=dict(sorted((longest or {}).items())),
    )
    atomic_write(folder / name, content)
    atomic_write(sidecar_path(folder / name), json_bytes(asdict(record)))
    return record


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def sidecar_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def read_json(path: Path, mend: str = "run workflows/preprocess.py to the end") -> dict:
    """A JSON object. Raises UserError, which ends in `mend`, when the file is missing or holds no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {mend}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; {mend}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, but holds a {type(value).__name__}; {mend}")
    return value


def finished_shard(folder: Path, name: str, fingerprint: str) -> ShardRecord | None:
    """The record of a shard that is whole, hash included, and of this fingerprint; else None."""
    try:
        record = ShardRecord(**json.loads(sidecar_path(folder / name).read_bytes()))
        whole = record.fingerprint == fingerprint and record.sha256 == file_sha256(folder / name)
    except (OSError, ValueError, TypeError):
        return None
    return record if whole else None


def write_index(folder: Path, records: Iterable[ShardRecord], **facts: object) -> dict:
    """Merge sidecars into `index.json`, the mark of a finished stage.

    `facts` go into the index as they are: the fingerprint of the stage, what was dropped, which
    parser ran.
    """
    ordered = sorted(records, key=lambda record: (SPLITS.index(record.split), record.index))
    totals: dict[str, Counter] = {}
    for record in ordered:
        totals.setdefault(record.split, Counter()).update({"rows": record.rows, "bytes": record.bytes, **record.counts})
    index = {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "totals": {split: dict(sorted(total.items())) for split, total in totals.items()},
        "shards": [asdict(record) for record in ordered],
    }
    atomic_write(folder / "index.json", json_bytes(index))
    return index


def read_index(folder: Path) -> dict:
    """The index of a finished stage. Raises UserError when it is missing or of another version."""
    index = read_json(folder / "index.json")
    if index.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{folder / 'index.json'}: schema version must be {SCHEMA_VERSION}, but is {index.get('schema_version')}; "
            "run workflows/preprocess.py into a new folder"
        )
    if not {"shards", "totals"} <= set(index):
        raise UserError(f"{folder / 'index.json'} is damaged: it names no shards; run workflows/preprocess.py again")
    return index


def check_hashes(folder: Path, *splits: str) -> None:
    """Read the shards of these splits, and what the index names beside them, once.

    Raises UserError for the first file that is missing, cut off, or whose bytes are not what the index says.
    """
    shards = [shard for split in splits for shard in open_shards(folder, split)]
    hashes = {shard.record.name: shard.record.sha256 for shard in shards}
    for name, sha256 in {**read_index(folder).get("files", {}), **hashes}.items():
        path = folder / name
        if not path.exists() or file_sha256(path) != sha256:
            raise UserError(f"{path} is damaged: its hash is not the one in index.json; run workflows/preprocess.py again")


class Shard:
    """Memory-mapped shard with rows as zero-copy NumPy views.

    Raises UserError when the file is missing, was cut off, or does not fit its index record.
    """

    def __init__(self, folder: Path, record: ShardRecord):
        path = folder / record.name
        try:
            size = path.stat().st_size
        except OSError:
            raise UserError(f"{path} is missing; run workflows/preprocess.py again to restore it") from None
        if size != record.bytes:
            raise UserError(
                f"{path} must have {record.bytes} bytes, but has {size}; run workflows/preprocess.py again to restore it"
            )
        try:
            with pa.memory_map(str(path)) as source:
                reader = pa.ipc.open_file(source)
                batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} is damaged ({error}); run workflows/preprocess.py again to restore it") from None
        self.record = record
        self.schema = reader.schema
        self.columns = [{name: _views(batch.column(name)) for name in batch.schema.names} for batch in batches]

    def __len__(self) -> int:
        return self.record.rows

    def row(self, index: int) -> dict:
        """One example: scalars, NumPy arrays (list columns) and dicts of arrays (lists of structs)."""
        batch, offset = divmod(index, ROWS_PER_RECORD_BATCH)
        return {name: _pick(views, offset) for name, views in self.columns[batch].items()}

    def rows(self) -> Iterator[dict]:
        return (self.row(i) for i in range(len(self)))


def _views(array: pa.Array):
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


def _pick(views, offset: int):
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


def open_shards(folder: Path, split: str) -> list[Shard]:
    """The shards of one split, in order. Raises UserError when the split is not there."""
    index = read_index(folder)
    records = [ShardRecord(**shard) for shard in index["shards"] if shard["split"] == split]
    if not records:
        raise UserError(f"{folder / 'index.json'} has no split {split!r}; there are: {', '.join(index['totals'])}")
    return [Shard(folder, record) for record in records]


def read_lengths(folder: Path, split: str) -> dict[str, np.ndarray]:
    """Columns of `lengths.arrow` for one split: shard, row, example_id, leaves, nodes, tgt_pieces."""
    path = folder / "lengths.arrow"
    try:
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_file(source).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} cannot be read ({error}); run workflows/preprocess.py again") from None
    chosen = table.filter(pa.compute.equal(table["split"].cast(pa.string()), split))
    return {name: chosen[name].to_numpy() for name in LENGTHS_SCHEMA.names if name != "split"}


def tables(folder: Path, split: str) -> dict[str, pa.Table]:
    """Flat Arrow tables `leaves`, `nodes` and `spans` with `example_id`, for DuckDB, pandas or polars."""
    parts: dict[str, list[pa.Table]] = {"leaves": [], "nodes": [], "spans": []}
    for shard in open_shards(folder, split):
        for views in shard.columns:
            for name, tables_ in parts.items():
                offsets, flat = views[name]
                example_id = np.repeat(views["example_id"], np.diff(offsets))
                tables_.append(pa.table({"example_id": example_id, **flat}))
    return {name: pa.concat_tables(tables_) for name, tables_ in parts.items()}
