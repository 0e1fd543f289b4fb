"""Records of shards: one sidecar file each, merged in `index.json`, or in parts of the index where they are many."""

import hashlib
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Annotated, overload

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
_PARTS_HELD = 2  # neighbours: whoever goes through the records in order reads every part once


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


class PartedRecords(Sequence[ShardRecord]):
    """The records that parts of an index hold, in order. A part is read when one of its records is asked for.

    At most two parts are held, about 12 MB. Raises UserError for a part that is missing or not as the index says.
    """

    def __init__(self, folder: AnyPath, parts: Iterable[IndexPart]):
        self._folder, self._parts = folder, list(parts)
        self._ends = list(accumulate(part.shards for part in self._parts))
        self._held: dict[int, list[ShardRecord]] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, place: int) -> ShardRecord: ...
    @overload
    def __getitem__(self, place: slice) -> list[ShardRecord]: ...
    def __getitem__(self, place: int | slice) -> ShardRecord | list[ShardRecord]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        number = bisect_right(self._ends, place)
        return self._part(number)[place - self._ends[number] + self._parts[number].shards]

    def __iter__(self) -> Iterator[ShardRecord]:
        for number in range(len(self._parts)):
            yield from self._part(number)

    def _part(self, number: int) -> list[ShardRecord]:
        records = self._held.get(number)
        if records is None:
            records = _read_part(self._folder, self._parts[number])
            held = list(self._held.items())[1 - _PARTS_HELD :]
            self._held = dict([*held, (number, records)])  # replaced as a whole: threads may share it
        return records


def _read_part(folder: AnyPath, part: IndexPart) -> list[ShardRecord]:
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


class _Packer:
    """Packs records that are alike: the first one is the dictionary of the compression of all."""

    def __init__(self) -> None:
        self._first = b""

    def pack(self, record: ShardRecord) -> bytes:
        content = json.dumps(vars(record), ensure_ascii=False).encode()
        self._first = self._first or content
        state = zlib.compressobj(level=1, zdict=self._first)
        return state.compress(content) + state.flush()

    def unpack(self, packed: bytes) -> ShardRecord:
        return ShardRecord(**json.loads(zlib.decompressobj(zdict=self._first).decompress(packed)))


class PackedRecords(Sequence[ShardRecord]):
    """Records in order. Each is made anew when it is asked for."""

    def __init__(self, records: Iterable[ShardRecord] = ()):
        self._packer, self._packed = _Packer(), list[bytes]()
        for record in records:
            self.append(record)

    def append(self, record: ShardRecord) -> None:
        """Add a record at the end."""
        self._packed.append(self._packer.pack(record))

    def take(self, places: Iterable[int]) -> "PackedRecords":
        """Return the records at these places. They share the memory of these here."""
        return _share(self._packer, [self._packed[place] for place in places])

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, place: int) -> ShardRecord: ...
    @overload
    def __getitem__(self, place: slice) -> "PackedRecords": ...
    def __getitem__(self, place: int | slice) -> "ShardRecord | PackedRecords":
        if isinstance(place, slice):
            return _share(self._packer, self._packed[place])
        return self._packer.unpack(self._packed[place])

    def __iter__(self) -> Iterator[ShardRecord]:
        return map(self._packer.unpack, self._packed)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))


class RecordSlots(Sequence[ShardRecord | None]):
    """Records by place, which come in any order. A place has None until its record comes."""

    def __init__(self, count: int):
        self._packer, self._packed = _Packer(), [b""] * count

    def put(self, place: int, record: ShardRecord | None) -> None:
        """Fill a place, or empty it."""
        self._packed[place] = b"" if record is None else self._packer.pack(record)

    def holds(self, place: int) -> bool:
        """Return whether a place has its record."""
        return bool(self._packed[place])

    def missing(self) -> list[int]:
        """Return the places without a record, in order."""
        return [place for place, packed in enumerate(self._packed) if not packed]

    def present(self) -> PackedRecords:
        """Return the records that are there, in the order of their places."""
        return _share(self._packer, [packed for packed in self._packed if packed])

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, place: int) -> ShardRecord | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[ShardRecord | None]: ...
    def __getitem__(self, place: int | slice) -> ShardRecord | list[ShardRecord | None] | None:
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        packed = self._packed[place]
        return self._packer.unpack(packed) if packed else None


def _share(packer: _Packer, packed: list[bytes]) -> PackedRecords:
    records = PackedRecords()
    records._packer, records._packed = packer, packed
    return records
