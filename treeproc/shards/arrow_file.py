"""Checks of untrusted Arrow files before any value is read.

Arrow builds an extension type while it reads a schema, and so runs code of the library that registered it; Ray registers
types whose values are pickles. So the schema is read from a copy of the file's footer first, in which no such type is named,
and must be the known one. Buffers must be uncompressed and no larger than the file, offsets must stay inside them.
The layout is that of Arrow's File.fbs and Message.fbs; flatbuffers are read as flatbuffers.dev/internals describes.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

_AT_ONCE = 1 << 17  # Linux cuts longer requests, at a limit of the disk that is no lower than this


class ReadAhead:
    """Asks the system for parts of a file, whose map is `memory`. It reads them while this process goes on."""

    def __init__(self, path: Path, memory: pa.Buffer):
        self._memory = memory
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def ask(self, start: int, size: int) -> None:
        """Ask for these bytes, as far as the file has them."""
        end = min(start + size, self._memory.size)
        for first in range(max(start, 0), end, _AT_ONCE):
            os.posix_fadvise(self._file, first, min(_AT_ONCE, end - first), os.POSIX_FADV_WILLNEED)

    def ask_for(self, buffer: pa.Buffer) -> None:
        """Ask for a part of the map."""
        self.ask(buffer.address - self._memory.address, buffer.size)

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


_MAGIC = b"ARROW1"
_END = struct.Struct("<i6s")  # length of the footer, magic
_MOST_FOOTER_BYTES = 64 << 20  # 24 bytes a record batch
_EXTENSION, _HIDDEN = b"ARROW:extension:", b"arrow:extension:"
_BLOCK = struct.Struct("<qi12x")  # where a message begins, the bytes before its body; its body's bytes
_OLD_COMPRESSION = b"ARROW:experimental_compression"  # a key of messages of Arrow 0.17, which is still understood
# Numbers of fields: of Footer, of Message, of DictionaryBatch, of RecordBatch.
_DICTIONARIES, _RECORD_BATCHES, _HEADER, _DICTIONARY_DATA, _COMPRESSION = 2, 3, 2, 1, 3
# What Arrow and the readers of this file raise for damaged bytes.
_DAMAGE = (OSError, EOFError, ValueError, pa.ArrowException, struct.error, AttributeError, OverflowError)


class BadArrowFile(Exception):
    """The reason why a file is refused, in one line."""


def read_arrow(
    source: pa.NativeFile, known: Sequence[pa.Schema], ahead: ReadAhead | None = None
) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Read schema and record batches of an Arrow IPC file, whose columns are those of one of the `known` schemas or some of them.

    `ahead` is asked for what is read here, if all columns are numbers or dictionaries. Numbers are not read.
    Raises BadArrowFile for any other file, and for one that is damaged.
    """
    try:
        footer, schema = _read_schema(source, known)
        if ahead is not None:
            for start, size, _ in _messages(footer):
                ahead.ask(start, size)
        if any(_compressed(source, footer)):
            raise BadArrowFile("is compressed, but data sets are not")
        reader = pa.ipc.open_file(source)
        if reader.schema != schema:
            raise BadArrowFile("has two different schemas")
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # the rows of two columns may differ in batches, and agree in the table
        table = pa.Table.from_batches(batches, schema)
        if ahead is not None:
            _ask_for_codes(ahead, table)
        taken = _check_values(table)
    except _DAMAGE as error:
        raise BadArrowFile(f"is damaged ({' '.join(str(error).split())[:200]})") from None
    if taken > source.size():
        raise BadArrowFile(f"says that it holds {taken:,} bytes, more than it has")
    return schema, batches


def _read_schema(source: pa.NativeFile, known: Sequence[pa.Schema]) -> tuple[bytes, pa.Schema]:
    """Read the footer, and the columns, which are those of a known schema."""
    footer = _footer(source)
    schema = _check_schema(_schema_of(footer), known)
    if _EXTENSION in footer:
        raise BadArrowFile("names an extension type, but no column may have one")
    return footer, schema


def _footer(source: pa.NativeFile) -> bytes:
    size = source.size()
    if size < len(_MAGIC) + _END.size:
        raise BadArrowFile("is too short for an Arrow file")
    length, magic = _END.unpack(source.read_at(_END.size, size - _END.size))
    if magic != _MAGIC or not 0 < length <= min(size - _END.size, _MOST_FOOTER_BYTES):
        raise BadArrowFile("is not an Arrow file, or was cut off")
    return source.read_at(length, size - _END.size - length)


def _schema_of(footer: bytes) -> pa.Schema:
    """Return the schema as it is stored. Fields of extension types have their storage's type, and the name in their metadata."""
    hidden = footer.replace(_EXTENSION, _HIDDEN)
    return pa.ipc.open_file(pa.py_buffer(_MAGIC + b"\0\0" + hidden + _END.pack(len(hidden), _MAGIC))).schema


def _check_schema(found: pa.Schema, known: Sequence[pa.Schema]) -> pa.Schema:
    """Return the known schema of these columns. Raises BadArrowFile that names the wrong column."""
    full = max(known, key=lambda schema: sum(field in schema for field in found))
    for field in found:
        name = _short(field.name)
        if field.name not in full.names:
            raise BadArrowFile(f"has a column {name} that no data set has")
        if field.type != full.field(field.name).type or _extensions(field):
            there = _extensions(field) or _short(str(field.type))
            raise BadArrowFile(f"column {name} must be {full.field(field.name).type}, but is {there}")
    expected = pa.schema([field for field in full if field.name in found.names])
    if found != expected:
        raise BadArrowFile(f"its columns must be {', '.join(expected.names)}, in this order, none nullable")
    return expected


def _extensions(field: pa.Field) -> str:
    """Return the extension type that a field or one inside it names; empty for none."""
    for key, value in (field.metadata or {}).items():
        if key == _HIDDEN + b"name":
            return f"the extension type {_short(value.decode(errors='replace'))}"
    return next(filter(None, (_extensions(field.type.field(i)) for i in range(field.type.num_fields))), "")


def _short(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)[:80]


def _ask_for_codes(ahead: ReadAhead, table: pa.Table) -> None:
    """Ask for the codes of dictionaries, which are checked one by one."""
    for column in table.columns:
        for chunk in column.chunks if pa.types.is_dictionary(column.type) else ():
            if codes := chunk.indices.buffers()[1]:
                ahead.ask_for(codes)


def _check_values(table: pa.Table) -> int:
    """Return the bytes of a table without its dictionaries, which all batches share; other bytes that batches share count for
    each of them. Raises BadArrowFile and as Arrow.
    """
    for column in table.columns:
        if pa.types.is_dictionary(column.type):
            for chunk in column.chunks:
                _check_codes(chunk)
        else:
            column.validate(full=True)
        if column.null_count or (not pa.types.is_primitive(column.type) and any(map(_has_nulls, column.chunks))):
            raise BadArrowFile("has empty values, but no column may have any")
        if any(buffer and buffer.address % 8 for chunk in column.chunks for buffer in chunk.buffers()):
            raise BadArrowFile("is damaged (its values do not begin at multiples of 8 bytes)")
    columns = [column for column in table.columns if not pa.types.is_dictionary(column.type)]
    codes = [chunk.indices for column in table.columns if pa.types.is_dictionary(column.type) for chunk in column.chunks]
    return sum(one.nbytes for one in (*columns, *codes))


def _check_codes(array: pa.DictionaryArray) -> None:
    """Check codes as `array.validate(full=True)` does, at a tenth of its time: lengths have a code for each of a billion rows."""
    array.validate()
    array.dictionary.validate(full=True)
    width = array.indices.type.byte_width
    codes = np.frombuffer(array.indices.buffers()[1] or b"", f"u{width}")[array.offset : array.offset + len(array)]
    if len(codes) and int(codes.max()) >= len(array.dictionary):  # a code below 0 is a high one here
        raise ValueError(f"a code is outside of its dictionary of {len(array.dictionary)} values")


def _has_nulls(array: pa.Array) -> bool:
    if array.null_count:
        return True
    if pa.types.is_list(array.type):
        return _has_nulls(array.values)
    if pa.types.is_struct(array.type):
        return any(_has_nulls(array.field(i)) for i in range(array.type.num_fields))
    return pa.types.is_dictionary(array.type) and _has_nulls(array.dictionary)


@dataclass(frozen=True)
class _Table:
    """A table of a flatbuffer at byte `place` of `data`."""

    data: bytes
    place: int

    def table(self, number: int) -> "_Table":
        """Return the table in field `number`. Raises ValueError if it has none."""
        at = self._field(number)
        if not at:
            raise ValueError("a message without its header")
        return _Table(self.data, at + self._u32(at))

    def has(self, number: int) -> bool:
        """Return whether there is anything in field `number`."""
        return bool(self._field(number))

    def vector(self, number: int) -> tuple[int, int]:
        """Return the place of the first item, and number of items, of the vector in field `number`."""
        at = self._field(number)
        if not at:
            return 0, 0
        start = at + self._u32(at)
        return start + 4, self._u32(start)

    def _field(self, number: int) -> int:
        vtable = self.place - struct.unpack_from("<i", self.data, self.place)[0]
        size, at = struct.unpack_from("<H", self.data, vtable)[0], 4 + 2 * number
        offset = struct.unpack_from("<H", self.data, vtable + at)[0] if at < size else 0
        return self.place + offset if offset else 0

    def _u32(self, at: int) -> int:
        return struct.unpack_from("<I", self.data, at)[0]


def _messages(footer: bytes) -> Iterator[tuple[int, int, bool]]:
    """Yield for every message that the footer names where it begins, the bytes before its body, whether it is a dictionary."""
    root = _Table(footer, struct.unpack_from("<I", footer)[0])
    for number, is_dictionary in ((_DICTIONARIES, True), (_RECORD_BATCHES, False)):
        start, count = root.vector(number)
        for i in range(count):
            yield *_BLOCK.unpack_from(footer, start + i * _BLOCK.size), is_dictionary


def _compressed(source: pa.NativeFile, footer: bytes) -> Iterator[bool]:
    """Yield whether buffers are compressed, for every message that the footer names, also for those of dictionaries."""
    for start, _, is_dictionary in _messages(footer):
        source.seek(start)
        message = pa.ipc.read_message(source).metadata.to_pybytes()
        header = _Table(message, struct.unpack_from("<I", message)[0]).table(_HEADER)
        batch = header.table(_DICTIONARY_DATA) if is_dictionary else header
        yield batch.has(_COMPRESSION) or _OLD_COMPRESSION in message
