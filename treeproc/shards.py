"""Arrow shards on disk or in an object store: atomic writer, sidecars, `index.json`, memory-mapped reader.

A shard counts as written when its sidecar `.json` is there: the shard is written to a temporary
file, synced, renamed, and only then its sidecar the same way. `index.json` merges the sidecars of
a finished stage. A process killed at any moment leaves finished shards and temporary files behind,
never half a shard. Objects are read through a local copy (`treeproc.cache`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute

from treeproc.arrow import Batches, column_views, ipc_bytes, pick
from treeproc.cache import local_copy
from treeproc.errors import UserError
from treeproc.files import atomic_write, file_sha256, json_bytes, read_json
from treeproc.schema import LENGTHS_SCHEMA, ROWS_PER_RECORD_BATCH, SCHEMA_VERSION, in_order
from treeproc.storage import AnyPath, as_path

# Hashing leaves the interpreter free, and an object store answers slowly: many shards are looked at together.
_THREADS = 8
_STAGES = ("text", "parsed", "encoded")


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


def write_shard(
    folder: AnyPath,
    name: str,
    rows: Sequence[dict] | Batches,
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


def sidecar_path(shard: AnyPath) -> AnyPath:
    return shard.with_suffix(".json")


def finished_shard(folder: AnyPath, name: str, fingerprint: str) -> ShardRecord | None:
    """The record of a shard that is whole, hash included, and of this fingerprint; else None."""
    try:
        record = ShardRecord(**json.loads(sidecar_path(folder / name).read_bytes()))
        whole = record.fingerprint == fingerprint and record.sha256 == file_sha256(folder / name)
    except (OSError, ValueError, TypeError):
        return None
    return record if whole else None


def write_index(folder: AnyPath, records: Iterable[ShardRecord], **facts: object) -> dict:
    """Merge sidecars into `index.json`, the mark of a finished stage.

    `facts` go into the index as they are: the fingerprint of the stage, what was dropped, which
    parser ran.
    """
    by_split: dict[str, list[ShardRecord]] = {}
    for record in records:
        by_split.setdefault(record.split, []).append(record)
    ordered = [record for split in in_order(by_split) for record in sorted(by_split[split], key=lambda record: record.index)]
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


def read_index(folder: AnyPath) -> dict:
    """The index of a finished stage. Raises UserError when it is missing or of another version."""
    above = folder.parent
    if above.name in _STAGES and not (folder / "index.json").exists() and (above / "index.json").exists():
        raise UserError(f"{above} is one stage of a data set; give the folder above it: {above.parent}")
    index = read_json(folder / "index.json")
    if index.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{folder / 'index.json'}: schema version must be {SCHEMA_VERSION}, but is {index.get('schema_version')}; "
            "run workflows/preprocess.py into a new folder"
        )
    if not {"shards", "totals"} <= set(index):
        raise UserError(f"{folder / 'index.json'} is damaged: it names no shards; run workflows/preprocess.py again")
    return index


def stage_folder(data: AnyPath, stage: str) -> AnyPath:
    """Folder of a stage, `text`, `parsed` or `encoded`, of the data set `data`.

    Text and parsed stage may be those of another data set, which the index of the encoded stage names.
    """
    place = stage if stage == "encoded" else read_index(data / "encoded").get("stages", {}).get(stage, stage)
    # A neighbour's place begins with ../ and is found without it: object stores have no such step.
    if place.startswith("../"):
        return data.parent / place.removeprefix("../")
    path = as_path(place)
    return path if path.is_absolute() else data / place


def check_hashes(folder: AnyPath, *splits: str) -> None:
    """Read the shards of these splits, and what the index names beside them, once.

    Of objects, the local copies are read, which are loaded where they are missing or damaged. Raises UserError for the
    first file that is missing, cut off, or whose bytes are not what the index says.
    """
    shards = [shard for split in splits for shard in open_shards(folder, split)]
    hashes = {shard.record.name: shard.record.sha256 for shard in shards}
    for name, sha256 in {**read_index(folder).get("files", {}), **hashes}.items():
        path = folder / name
        try:
            whole = file_sha256(local_copy(path, sha256, recheck=True)) == sha256
        except FileNotFoundError:
            whole = False
        if not whole:
            raise UserError(f"{path} is damaged: its hash is not the one in index.json; run workflows/preprocess.py again")


class Shard:
    """Memory-mapped shard with rows as zero-copy NumPy views.

    Raises UserError when the file is missing, was cut off, or does not fit its index record.
    """

    def __init__(self, folder: AnyPath, record: ShardRecord):
        path = folder / record.name
        try:
            local = local_copy(path, record.sha256)
            size = local.stat().st_size
        except OSError:
            raise UserError(f"{path} is missing; run workflows/preprocess.py again to restore it") from None
        if size != record.bytes:
            raise UserError(
                f"{path} must have {record.bytes} bytes, but has {size}; run workflows/preprocess.py again to restore it"
            )
        try:
            with pa.memory_map(str(local)) as source:
                reader = pa.ipc.open_file(source)
                batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{path} is damaged ({error}); run workflows/preprocess.py again to restore it") from None
        self.record = record
        self.schema = reader.schema
        self.columns = [{name: column_views(batch.column(name)) for name in batch.schema.names} for batch in batches]

    def __len__(self) -> int:
        return self.record.rows

    def row(self, index: int) -> dict:
        """One example: scalars, NumPy arrays (list columns) and dicts of arrays (lists of structs)."""
        batch, offset = divmod(index, ROWS_PER_RECORD_BATCH)
        return {name: pick(views, offset) for name, views in self.columns[batch].items()}

    def rows(self) -> Iterator[dict]:
        return (self.row(i) for i in range(len(self)))


def open_shards(folder: AnyPath, split: str) -> list[Shard]:
    """The shards of one split, in order. Raises UserError when the split is not there."""
    index = read_index(folder)
    records = [ShardRecord(**shard) for shard in index["shards"] if shard["split"] == split]
    if not records:
        raise UserError(f"{folder / 'index.json'} has no split {split!r}; there are: {', '.join(index['totals'])}")
    return [Shard(folder, record) for record in records]


def read_lengths(folder: AnyPath, split: str) -> dict[str, np.ndarray]:
    """Columns of `lengths.arrow` for one split: shard, row, example_id, leaves, nodes, tgt_pieces."""
    path = folder / "lengths.arrow"
    try:
        local = path if isinstance(path, Path) else local_copy(path, read_index(folder)["files"]["lengths.arrow"])
        with pa.memory_map(str(local)) as source:
            table = pa.ipc.open_file(source).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} cannot be read ({error}); run workflows/preprocess.py again") from None
    chosen = table.filter(pa.compute.equal(table["split"].cast(pa.string()), split))
    return {name: chosen[name].to_numpy() for name in LENGTHS_SCHEMA.names if name != "split"}


def tables(folder: AnyPath, split: str) -> dict[str, pa.Table]:
    """Flat Arrow tables `leaves`, `nodes` and `spans` with `example_id`, for DuckDB, pandas or polars."""
    parts: dict[str, list[pa.Table]] = {"leaves": [], "nodes": [], "spans": []}
    for shard in open_shards(folder, split):
        for views in shard.columns:
            for name, tables_ in parts.items():
                offsets, flat = views[name]
                example_id = np.repeat(views["example_id"], np.diff(offsets))
                tables_.append(pa.table({"example_id": example_id, **flat}))
    return {name: pa.concat_tables(tables_) for name, tables_ in parts.items()}


def finished_shards(folder: AnyPath, names: Sequence[str], marks: Sequence[str]) -> list[ShardRecord | None]:
    """For every shard its record where it is whole and up to date, else None."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(partial(finished_shard, folder), names, marks))
