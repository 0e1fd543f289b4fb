"""Compressed files, tar and zip archives. Each is read to its end, and everything that it gives to check is checked.

gzip, bzip2, xz and zip have a checksum of their content. Tar has one for each header, but none for data, so damage to the data
of a plain `.tar` stays unseen. `tarfile` and the file objects of `gzip`, `bz2` and `lzma` take some damage for the end of a file.
"""

import bz2
import io
import logging
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import PurePath, PurePosixPath
from typing import IO, Any, Protocol

from treeproc.common.errors import UserError, quoted
from treeproc.common.files import cannot_read
from treeproc.common.storage import AnyPath

logger = logging.getLogger(__name__)

MOST_ARCHIVE_BYTES = 1 << 30  # unpacked text of an archive, which is held in memory
_MOST_NAME_BYTES = 1 << 20  # a name or a pax header
_READ_BYTES = 1 << 16
_XZ_MEMORY = 256 << 20  # `xz -9` needs 65 MiB
_TAR_BLOCK = 512
_ZEROS = bytes(_TAR_BLOCK)
# Types of headers whose data belongs to the next header, or to all of them.
_LONG_NAME, _LONG_LINK, _PAX, _PAX_OF_ALL = b"L", b"K", (b"x", b"X"), b"g"
_PAX_LENGTH = re.compile(rb"([1-9][0-9]{0,8}) ")


class Damaged(OSError):
    """A compressed file or archive is not what its name says, or is damaged. The text is the reason and what to do."""


class _Decompressor(Protocol):
    """One stream of a compressed file, as in `bz2` and `lzma`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _GzipMember:
    """zlib's reader of a gzip member, which compares checksum and length, as a `_Decompressor`."""

    def __init__(self) -> None:
        self._stream, self._left = zlib.decompressobj(wbits=31), b""

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._left

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        content = self._stream.decompress(self._left + data, max_length)
        self._left = self._stream.unconsumed_tail
        return content


@dataclass(frozen=True)
class _Packing:
    name: str
    magic: bytes
    stream: Callable[[], _Decompressor]


_GZIP = _Packing("gzip", b"\x1f\x8b", _GzipMember)
_BZIP2 = _Packing("bzip2", b"BZh", bz2.BZ2Decompressor)
_XZ = _Packing("xz", b"\xfd7zXZ\0", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY))
_PACKINGS = {".gz": _GZIP, ".tgz": _GZIP, ".bz2": _BZIP2, ".tbz2": _BZIP2, ".xz": _XZ, ".txz": _XZ}
_STDIN = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
_ZIP, _ZIP_END, _MOST_IN_ZIP_END = ".zip", b"PK\x05\x06", 0xFFFF
_ARCHIVES = (_ZIP, ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


def is_packed(name: str) -> bool:
    """Return whether the name is that of a compressed file."""
    return PurePosixPath(name).suffix in _PACKINGS


def plain_name(name: str) -> str:
    """Return the name without the suffix of a compressed file."""
    return name.removesuffix(PurePosixPath(name).suffix) if is_packed(name) else name


def is_archive(path: AnyPath) -> bool:
    """Return whether a path is a tar or zip archive, by its name."""
    return path.name.endswith(_ARCHIVES) and path.is_file()


def open_input(path: AnyPath) -> IO[bytes]:
    """Open a file. A compressed one, by its name, is unpacked.

    Raises OSError if it cannot be opened. Reading raises OSError too: `Damaged` if it is not the compressed file that its name
    promises. Standard input that a file gives is read from where it stands: the shell may have taken its first lines.
    """
    file = path.open("rb")
    if str(path) in _STDIN and file.seekable():
        file.seek(os.lseek(0, 0, os.SEEK_CUR))
    return unpacked(file, path.name)


def unpacked(file: IO[bytes], name: str) -> IO[bytes]:
    """Return the content of an open file, unpacked if its name says that it is compressed."""
    packing = _PACKINGS.get(PurePosixPath(name).suffix)
    return file if packing is None else io.BufferedReader(_Content(file, packing), _READ_BYTES)


class _Content(io.RawIOBase):
    """The unpacked content of a file."""

    def __init__(self, file: IO[bytes], packing: _Packing):
        self._file, self._blocks, self._block = file, _blocks(file, packing), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._block or next(self._blocks, b"")
        count = min(len(block), len(buffer))
        buffer[:count], self._block = block[:count], block[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _blocks(file: IO[bytes], packing: _Packing) -> Iterator[bytes]:
    """Yield the content of all streams of a compressed file. Zeros may follow a stream. Raises Damaged."""
    stream: _Decompressor | None = None
    while True:
        if stream is not None and not stream.eof:
            data = file.read(_READ_BYTES) if stream.needs_input else b""
            is_end = not data and stream.needs_input
        else:
            data = file.read(_READ_BYTES) if stream is None else _after_zeros(file, stream.unused_data)
            if stream is not None and not data:
                return
            if not data.startswith(packing.magic[: len(data) or 1]):
                what = "other bytes follow its end" if stream else f"it is not a {packing.name} file, but its name says so"
                raise Damaged(f"{what}; copy it again, or rename it")
            stream, is_end = packing.stream(), False
        try:
            content = stream.decompress(data, _READ_BYTES)
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if "Memory usage limit" in str(error):
                raise Damaged(
                    f"it needs more than {_XZ_MEMORY >> 20} MiB of memory to unpack; pack it again with xz -9"
                ) from None
            raise Damaged(f"its {packing.name} data is damaged ({error}); copy it again") from None
        if content:
            yield content
        elif is_end and not stream.eof:
            raise Damaged(f"it ends inside its {packing.name} data; copy it again")


def _after_zeros(file: IO[bytes], rest: bytes) -> bytes:
    """Return the bytes from the next one that is not zero, or none at the end of the file."""
    while not (found := rest.lstrip(b"\0")) and (rest := file.read(_READ_BYTES)):
        pass
    return found


def members(archive: AnyPath, folder: str) -> list[tuple[str, bytes]]:
    """Return names and contents of the files below `folder` of an archive, sorted by name. `.` is the whole archive.

    Compressed files are unpacked. A warning counts what is left out: links, devices, hidden files. Raises UserError for an
    archive that is damaged or too large, or has two files of one name, a name with `..`, or a sparse file.
    """
    found: dict[str, bytes] = {}
    left_out: Counter[str] = Counter()
    left = MOST_ARCHIVE_BYTES
    try:
        with open_input(archive) as file:
            for given, kind, blocks in (_zipped if archive.name.endswith(_ZIP) else _taped)(file):
                name = str(PurePosixPath(given.lstrip("/")))  # one spelling for a/b, ./a/b and a//b
                if not (folder == "." or name == folder or name.startswith(f"{folder}/")):
                    continue
                if kind := kind or ("hidden files" if is_hidden(PurePosixPath(name).relative_to(folder)) else ""):
                    left_out[kind] += 1
                    continue
                if name in found:
                    raise Damaged(f"two of its files have the name {quoted(name)}; pack it again")
                if ".." in PurePosixPath(name).parts:
                    raise Damaged(f"the name {quoted(name)} of a file leads out of it; pack it again")
                packed = io.BytesIO(_joined(blocks(), left))
                found[name] = _joined(iter(partial(unpacked(packed, name).read, _READ_BYTES), b""), left)
                left -= len(found[name])
    except OSError as error:
        raise cannot_read(archive, error) from None
    if not found:
        raise UserError(f"{archive} holds no files below {folder}; paths in an archive start at its top folder")
    say_left_out(archive, left_out)
    if not is_packed(archive.name) and not archive.name.endswith(_ZIP):
        warn_once(f"{archive} has no checksum of its data, so damage there stays unseen; a .tar.gz has one")
    names = sorted(found, key=lambda name: PurePosixPath(name).parts)  # as files of a folder: a/x comes before a-b
    return [(f"{archive}/{name}", found[name]) for name in names]


def _joined(blocks: Iterable[bytes], most: int) -> bytes:
    """Return the blocks as one. Raises Damaged if they have more bytes than `most`."""
    found = []
    for block in blocks:
        found.append(block)
        most -= len(block)
        if most < 0:
            raise Damaged(f"its files have more than {MOST_ARCHIVE_BYTES >> 20} MiB; unpack it, and give the folder")
    return b"".join(found)


_Entry = tuple[str, str, Callable[[], Iterable[bytes]]]  # name, the kind of what is left out or nothing, content in blocks


def _taped(file: IO[bytes]) -> Iterator[_Entry]:
    """Yield the entries of a tar archive without its folders."""
    tape = _Tape(file)
    for member, size in _headers(tape):
        kind = "links" if member.islnk() or member.issym() else "" if member.isreg() else "devices or pipes"
        if not member.isdir():
            yield member.name, kind, partial(tape.blocks, size)


def _zipped(file: IO[bytes]) -> Iterator[_Entry]:
    """Yield the entries of a zip archive without its folders. Raises Damaged, also while they are read."""
    content = file.read()
    with _zip_damage("it is not a zip archive, or is damaged"):
        archive = zipfile.ZipFile(io.BytesIO(content))
    end = content.rfind(_ZIP_END)  # zipfile does not compare the number of entries there; large archives have the most
    if (count := int.from_bytes(content[end + 10 : end + 12], "little")) not in (len(archive.infolist()), _MOST_IN_ZIP_END):
        raise Damaged(f"it has {len(archive.infolist()):,} entries, but must have {count:,}; copy it again")
    for one in archive.infolist():
        if not one.is_dir():
            yield one.filename, "links" if stat.S_ISLNK(one.external_attr >> 16) else "", partial(_zip_blocks, archive, one)


def _zip_blocks(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    with _zip_damage(f"cannot unpack {quoted(entry.filename)}"), archive.open(entry) as file:
        yield from iter(partial(file.read, _READ_BYTES), b"")


@contextmanager
def _zip_damage(what: str) -> Iterator[None]:
    """Raise Damaged for what zipfile raises if an archive is damaged, encrypted, or packed in a way that Python lacks."""
    try:
        yield
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise Damaged(f"{what} ({error}); copy it again, or pack it again") from None


def is_hidden(path: PurePath) -> bool:
    """Return whether a file is hidden, or lies in a hidden folder, such as the copies in `.ipynb_checkpoints`."""
    return any(part.startswith(".") and part != ".." for part in path.parts)


def say_left_out(path: AnyPath, counts: Mapping[str, int]) -> None:
    """Warn about files below a folder or in an archive that are not read, by their kind."""
    if found := ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items()) if count):
        warn_once(f"{path} has entries that are left out ({found})")


@cache
def warn_once(message: str) -> None:
    """Warn once, although a command reads its input more than once."""
    logger.warning("warning: %s", message)


class _Tape:
    """The bytes of a tar archive, from front to back."""

    def __init__(self, file: IO[bytes]):
        self._file, self.place = file, 0

    def read(self, size: int) -> bytes:
        """Return so many bytes. Raises Damaged if the archive ends before."""
        content = self._file.read(size)
        self.place += len(content)
        if len(content) < size:
            raise Damaged("it has no end mark, so it was cut off; copy it again")
        return content

    def blocks(self, size: int) -> Iterator[bytes]:
        """Yield so many bytes, a part at a time."""
        for start in range(0, size, _READ_BYTES):
            yield self.read(min(_READ_BYTES, size - start))

    def check_end(self) -> None:
        """Raise Damaged if the second block of the end mark is missing, or something other than zeros follows it."""
        block = self.read(_TAR_BLOCK)
        while block:
            if block.strip(b"\0"):
                raise Damaged(f"it goes on after its end mark, before byte {self.place}; copy it again, or pack it again")
            block = self._file.read(_READ_BYTES)
            self.place += len(block)


def _headers(tape: _Tape) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield each member with the bytes of its data, which may be read then. Raises Damaged unless the archive is complete."""
    common: dict[str, str] = {}
    own: dict[str, str] = {}
    while (block := tape.read(_TAR_BLOCK)) != _ZEROS:
        try:
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            where = "it is not a tar archive, or is damaged" if tape.place == _TAR_BLOCK else "it is damaged"
            raise Damaged(f"{where}: {error} in the header at byte {tape.place - _TAR_BLOCK}; copy it again") from None
        is_note = member.type in (_LONG_NAME, _LONG_LINK, *_PAX, _PAX_OF_ALL)
        if not is_note:
            values = common | own
            member.name, size = values.get("path", member.name), values.get("size", str(member.size))
            own = {}
            if member.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in values):
                raise Damaged(f"the file {quoted(member.name)} is sparse; pack it again without --sparse")
            if not (size.isascii() and size.isdigit() and len(size) < 19):
                raise Damaged(f"the size of {quoted(member.name)} is {quoted(size)}; copy it again")
            has_data = not (member.isdir() or member.islnk() or member.issym() or member.isdev())
            end = tape.place + -(-int(size) // _TAR_BLOCK) * _TAR_BLOCK * has_data
            yield member, int(size)
            deque(tape.blocks(end - tape.place), maxlen=0)
            continue
        if not 0 <= member.size <= _MOST_NAME_BYTES:
            raise Damaged(f"a name in it has {member.size} bytes; copy it again")
        note = tape.read(-(-member.size // _TAR_BLOCK) * _TAR_BLOCK)[: member.size]
        if member.type == _LONG_NAME:
            own["path"] = note.split(b"\0")[0].decode("utf-8", "surrogateescape").rstrip("/")
        elif member.type != _LONG_LINK:
            (common if member.type == _PAX_OF_ALL else own).update(_pax_values(note))
    if own:
        raise Damaged("it ends after the name of a file; copy it again")
    tape.check_end()


def _pax_values(note: bytes) -> dict[str, str]:
    """Return the values of a pax header: each record has its length, a blank, a key, `=`, a value, a line end."""
    values = {}
    while note:
        match = _PAX_LENGTH.match(note)
        record = note[match.end() : int(match[1])] if match else b""
        key, is_there, value = record.partition(b"=")
        if not match or len(note) < int(match[1]) or not is_there or not value.endswith(b"\n"):
            raise Damaged("a pax header is damaged; copy it again")
        values[key.decode("utf-8", "surrogateescape")] = value[:-1].decode("utf-8", "surrogateescape")
        note = note[int(match[1]) :]
    return values
