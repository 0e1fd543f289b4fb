"""Records of many shards in little memory: a few hundred bytes each, where the object takes up to 6 kB."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from treeproc.shards.records import ShardRecord


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

    __hash__ = None  # type: ignore[assignment]


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
