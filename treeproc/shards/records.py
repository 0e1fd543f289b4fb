"""Records of shards: one sidecar file each, merged in `index.json`, or in parts of the index where they are many."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field, Strict, StringConstraints, TypeAdapter, ValidationError

from treeproc.common.errors import UserError
from treeproc.common.files import atomic_write, damaged_file, file_size
from treeproc.common.storage import AnyPath, inside
from treeproc.shards.schema import SCHEMA_VERSION

Int = Annotated[int, Strict()]  # in JSON, neither a string nor true
Count = Annotated[int, Strict(), Field(ge=0)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]  # names a file in the cache
_ShardName = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00.][^/\\\x00]*\.arrow$", max_length=200)]
_PartName = Annotated[str, StringConstraints(pattern=r"^index-[0-9]{5,9}\.json$")]

# A record of the parsed stage has 1 to 3 kB as JSON, and 6 kB of memory.
_SHARDS_A_PART = 1024
_MOST_PART_BYTES = 64 << 20


@dataclass(frozen=True)
class ShardRecord:
    """The record of a shard, which its sidecar file holds. `counts` are summed over shards; `longest` are maxima."""

    name: _ShardName
    split: str
    index: Count
    rows: Count
    bytes: Count
    sha256: Sha256
    fingerprint: str
    schema_version: Int = SCHEMA_VERSION
    counts: dict[str, Int] = field(default_factory=dict)
    longest: dict[str, Int] = field(default_factory=dict)

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class IndexPart:
    """A file of records that `index.json` names: consecutive shards of one split."""

    name: _PartName
    sha256: Sha256
    bytes: Annotated[int, Strict(), Field(ge=0, le=_MOST_PART_BYTES)]
    split: str
    shards: Annotated[int, Strict(), Field(ge=1, le=_SHARDS_A_PART)]
    rows: Count

    __pydantic_config__ = ConfigDict(extra="forbid")


_RECORDS = TypeAdapter(list[ShardRecord])


def write_parts(folder: AnyPath, records: Sequence[ShardRecord]) -> list[dict]:
    """Write the records, which are in the order of the index, as parts; returns what `index.json` says of them."""
    return [_write_part(folder, f"index-{number:05d}.json", chunk) for number, chunk in enumerate(_chunks(records))]


def _chunks(records: Iterable[ShardRecord]) -> Iterator[list[ShardRecord]]:
    """Yield the records of each part."""
    chunk: list[ShardRecord] = []
    for record in records:
        if chunk and (len(chunk) == _SHARDS_A_PART or chunk[0].split != record.split):
            yield chunk
            chunk = []
        chunk.append(record)
    if chunk:
        yield chunk


def _write_part(folder: AnyPath, name: str, records: Sequence[ShardRecord]) -> dict:
    lines = ",\n".join(json.dumps(vars(record), ensure_ascii=False) for record in records)
    content = f"[{lines}]\n".encode()
    atomic_write(folder / name, content)
    rows = sum(record.rows for record in records)
    sha256 = hashlib.sha256(content).hexdigest()
    return asdict(IndexPart(name, sha256, len(content), records[0].split, len(records), rows))


def read_part(folder: AnyPath, part: IndexPart) -> list[ShardRecord]:
    """Read the records of a part. Raises UserError if it is missing or not as the index says."""
    path = inside(folder, part.name)
    hint = "run tree-attention preprocess again"
    try:
        if file_size(path) != part.bytes:
            raise UserError(f"{path} must have {part.bytes} bytes, but has {file_size(path)}; {hint}")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or 'it is missing'}; {hint}") from None
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise UserError(f"{path} is damaged: its hash is not the one in index.json; {hint}")
    try:
        records = _RECORDS.validate_json(content)
    except ValidationError as error:
        raise damaged_file(path, error, hint) from None
    sums = (len(records), sum(record.rows for record in records), {record.split for record in records})
    if sums != (part.shards, part.rows, {part.split}):
        raise UserError(f"{path} is damaged: its shards, rows or split differ from those of index.json; {hint}")
    return records
