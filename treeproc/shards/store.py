"""Arrow shards on disk or in an object store: atomic writer, sidecars, `index.json`, memory-mapped reader.

A shard counts as written when its sidecar `.json` is there: the shard is written to a temporary
file, synced, renamed, and only then its sidecar the same way. `index.json` merges the sidecars of
a finished stage. A process killed at any moment leaves finished shards and temporary files behind,
never half a shard. Objects are read through a local copy (`treeproc.common.cache`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute
from pydantic import BaseModel, ConfigDict, Field, Strict, StringConstraints, TypeAdapter, ValidationError

from treeproc.common.cache import local_copy
from treeproc.common.errors import UserError
from treeproc.common.files import atomic_write, file_sha256, json_bytes, read_json
from treeproc.common.storage import AnyPath, as_path, inside
from treeproc.shards.arrow_file import BadArrowFile, read_arrow
from treeproc.shards.rows import Batches, column_views, ipc_bytes, pick
from treeproc.shards.schema import LENGTHS_SCHEMA, NEEDED_COLUMNS, ROWS_PER_RECORD_BATCH, SCHEMA_VERSION, STAGE_SCHEMAS, in_order

# Hashing leaves the interpreter free, and an object store answers slowly: many shards are looked at together.
_THREADS = 8

_Int = Annotated[int, Strict()]  # in JSON, neither a string nor true
_Count = Annotated[int, Strict(), Field(ge=0)]
_ShardName = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00.][^/\\\x00]*\.arrow$", max_length=200)]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # names a file in the cache


@dataclass(frozen=True)
class ShardRecord:
    """The record of a shard, which its sidecar file holds. `counts` are summed over shards; `longest` are maxima."""

    name: _ShardName
    split: str
    index: _Count
    rows: _Count
    bytes: _Count
    sha256: _Sha256
    fingerprint: str
    schema_version: _Int = SCHEMA_VERSION
    counts: dict[str, _Int] = field(default_factory=dict)
    longest: dict[str, _Int] = field(default_factory=dict)

    __pydantic_config__ = ConfigDict(extra="forbid")


class _Index(BaseModel):
    """The fields of an `index.json` that readers use, with their types; all others are free."""

    model_config = ConfigDict(extra="allow")

    shards: list[ShardRecord]
    totals: dict[str, dict[str, _Int]]
    columns: list[str] = []
    files: dict[str, _Sha256] = {}
    stages: dict[str, str] = {}
    dropped: dict[str, dict[str, _Int]] = {}
    fingerprint: str = ""
    text_fingerprint: str = ""
    tree_fingerprint: str = ""
    vocab_fingerprint: str = ""
    tree_source: str = ""
    parser: dict | None = None
    parser_settings: dict = {}
    tree_settings: dict = {}
    num_pieces: _Count = 0
    num_labels: _Count = 0
    num_classes: _Count = 0


_RECORD = TypeAdapter(ShardRecord)


def fingerprint_of(*parts: object) -> str:
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
    """The record of a shard that is complete, hash included, and of this fingerprint; else None."""
    try:
        record = _RECORD.validate_json(sidecar_path(folder / name).read_bytes())
        complete = (record.name, record.fingerprint) == (name, fingerprint) and record.sha256 == file_sha256(folder / name)
    except (OSError, ValueError):
        return None
    return record if complete else None


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


class Index(dict):
    """An `index.json`. A key that is asked for and is not there is a UserError that names the file."""

    def __init__(self, values: Mapping, path: AnyPath):
        super().__init__(values)
        self._path = path

    def __missing__(self, key: str) -> NoReturn:
        raise UserError(f"{self._path} is damaged: it has no {key}; run workflows/preprocess.py again")


def read_index(folder: AnyPath) -> Index:
    """The index of a finished stage.

    Raises UserError when it is missing, of another version, not of the form of an index, or names files outside of `folder`.
    """
    above = folder.parent
    if above.name in STAGE_SCHEMAS and not (folder / "index.json").exists() and (above / "index.json").exists():
        raise UserError(f"{above} is one stage of a data set; give the folder above it: {above.parent}")
    index = read_json(folder / "index.json")
    if index.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{folder / 'index.json'}: schema version must be {SCHEMA_VERSION}, but is {index.get('schema_version')}; "
            "run workflows/preprocess.py into a new folder"
        )
    if not {"shards", "totals"} <= set(index):
        raise UserError(f"{folder / 'index.json'} is damaged: it names no shards; run workflows/preprocess.py again")
    try:
        _Index.model_validate(index)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        raise UserError(f"{folder / 'index.json'}: {where}: {first['msg']}; run workflows/preprocess.py again") from None
    for name in index.get("files", ()):
        inside(folder, name)
    return Index(index, folder / "index.json")


def describe_trees(index: dict) -> str:
    """`tree.tree_source` of a data set, with the form of phrases that are made of arcs."""
    settings = index.get("tree_settings", {})
    form = [f"{name}={settings[name]}" for name in ("phrases", "phrase_labels") if name in settings]
    return f"{index['tree_source']} ({', '.join(form)})" if form else index["tree_source"]


def stage_folder(data: AnyPath, stage: str) -> AnyPath:
    """Folder of a stage, `text`, `parsed` or `encoded`, of the data set `data`.

    Text and parsed stage may be those of another data set, which the index of the encoded stage names: ../NEIGHBOUR/STAGE,
    or an absolute path or URI that ends with /STAGE. Raises UserError for any other place.
    """
    place = stage if stage == "encoded" else read_index(data / "encoded").get("stages", {}).get(stage, stage)
    if place == stage:
        return data / stage
    first, *rest = place.split("/")
    if ".." not in rest and rest[-1:] == [stage] and "\0" not in place:
        # A neighbour's place begins with ../ and is found without it: object stores have no such step.
        if first == ".." and len(rest) == 2:
            return data.parent / rest[0] / stage
        if first != ".." and as_path(place).is_absolute():
            return as_path(place)
    raise UserError(
        f"{data / 'encoded' / 'index.json'}: stages.{stage} must be ../NEIGHBOUR/{stage} or an absolute path that ends with "
        f"/{stage}, but is {place[:200]!r}"
    )


def check_hashes(folder: AnyPath, *splits: str) -> None:
    """Read the shards of these splits, and what the index names beside them, once.

    Of objects, the local copies are read, which are loaded where they are missing or damaged. Raises UserError for the
    first file that is missing, cut off, or whose bytes are not what the index says.
    """
    shards = [shard for split in splits for shard in open_shards(folder, split)]
    hashes = {shard.record.name: shard.record.sha256 for shard in shards}
    for name, sha256 in {**read_index(folder).get("files", {}), **hashes}.items():
        path = inside(folder, name)
        try:
            complete = file_sha256(local_copy(path, sha256, recheck=True)) == sha256
        except FileNotFoundError:
            complete = False
        if not complete:
            raise UserError(f"{path} is damaged: its hash is not the one in index.json; run workflows/preprocess.py again")


class Shard:
    """Memory-mapped shard with rows as zero-copy NumPy views.

    Raises UserError when the file is missing, was cut off, or does not fit its index record.
    """

    def __init__(self, folder: AnyPath, record: ShardRecord):
        path = inside(folder, record.name)
        try:
            local = local_copy(path, record.sha256)
            size = local.stat().st_size
        except OSError:
            raise UserError(f"{path} is missing; run workflows/preprocess.py again to restore it") from None
        if size != record.bytes:
            raise UserError(
                f"{path} must have {record.bytes} bytes, but has {size}; run workflows/preprocess.py again to restore it"
            )
        known = [STAGE_SCHEMAS[folder.name]] if folder.name in STAGE_SCHEMAS else list(STAGE_SCHEMAS.values())
        try:
            with pa.memory_map(str(local)) as source:
                self.schema, batches = read_arrow(source, known)
        except (OSError, BadArrowFile) as error:
            raise UserError(f"{path} {error}; run workflows/preprocess.py again to restore it") from None
        if missing := [name for name in NEEDED_COLUMNS.get(folder.name, ()) if name not in self.schema.names]:
            raise UserError(f"{path}: column {missing[0]} is missing; run workflows/preprocess.py again")
        rows = [ROWS_PER_RECORD_BATCH] * (record.rows // ROWS_PER_RECORD_BATCH)
        rows += [record.rows % ROWS_PER_RECORD_BATCH] * bool(record.rows % ROWS_PER_RECORD_BATCH)
        if list(map(len, batches)) != rows:
            raise UserError(f"{path}: its number of rows is not the one in index.json; run workflows/preprocess.py again")
        self.record = record
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
    shards = [Shard(folder, record) for record in records]
    columns = index.get("columns")
    if columns and (other := next((shard for shard in shards if shard.schema.names != columns), None)):
        raise UserError(
            f"{folder / other.record.name}: its columns are {', '.join(other.schema.names)}, but index.json names "
            f"{', '.join(columns)[:200]}; run workflows/preprocess.py again"
        )
    return shards


def read_lengths(folder: AnyPath, split: str) -> dict[str, np.ndarray]:
    """Columns of `lengths.arrow` for one split: shard, row, example_id, leaves, nodes, tgt_pieces."""
    path = folder / "lengths.arrow"
    try:
        local = path
        if not isinstance(path, Path):
            if "lengths.arrow" not in (files := read_index(folder).get("files", {})):
                raise BadArrowFile("is not in index.json")
            local = local_copy(path, files["lengths.arrow"])
        with pa.memory_map(str(local)) as source:
            schema, batches = read_arrow(source, [LENGTHS_SCHEMA])
        if schema != LENGTHS_SCHEMA:
            raise BadArrowFile(f"must have the columns {', '.join(LENGTHS_SCHEMA.names)}")
    except (OSError, BadArrowFile) as error:
        raise UserError(f"{path} {error}; run workflows/preprocess.py again") from None
    table = pa.Table.from_batches(batches, LENGTHS_SCHEMA)
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


def finished_shards(folder: AnyPath, names: Sequence[str], fingerprints: Sequence[str]) -> list[ShardRecord | None]:
    """The record of every shard that is complete and up to date; None for the others."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(partial(finished_shard, folder), names, fingerprints))
