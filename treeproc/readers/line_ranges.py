"""Ranges of the examples of plain files and objects. The start of example n is known without reading all examples before it.

A first pass counts the ends of examples in every chunk of a file. The reader of a range seeks to the chunk in which the range
begins, and skips the ends before it. `read_range` of lines returns the same as `read_lines`, with the same messages. Objects are
read in large chunks. A process holds the last few.
"""

import functools
import io
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np

from treeproc.common.errors import UserError
from treeproc.common.files import cannot_read
from treeproc.common.storage import AnyPath, RemotePath, as_path, open_seekable
from treeproc.readers.example_ends import ENDS
from treeproc.readers.numbered_lines import UTF8_BOM, decoded_lines, whole_lines

# Neighbours of a range often lie in the same chunk. Both sides of a text have one at a time, 32 MiB of a process together.
_CHUNK_BYTES = 8 << 20
_CHUNKS_HELD = 4

CHUNK_BYTES = 4 << 20
_READ_BYTES = 1 << 20

Item = TypeVar("Item")


class Stamp(NamedTuple):
    """Size and time of change of a file or object. They show whether it was changed."""

    size: int
    mtime_ns: int


class ObjectChanged(UserError):
    """The object is not the one of the stamp any more."""


class ChunkedObject(io.RawIOBase):
    """The bytes of the object of this stamp, as a file that is read at any place. Reading raises ObjectChanged for another."""

    def __init__(self, path: RemotePath, stamp: Stamp):
        self._path, self._stamp, self._place = path, stamp, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._stamp.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        number, begin = divmod(self._place, _CHUNK_BYTES)
        if self._place >= self._stamp.size:
            return 0
        content = memoryview(_chunk(self._path, self._stamp, number))[begin : begin + len(buffer)]
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


@functools.lru_cache(_CHUNKS_HELD)
def _chunk(path: RemotePath, stamp: Stamp, number: int) -> bytes:
    """Read a chunk of an object. The stamp is looked at after the reading, so that the chunk is of that object."""
    start = number * _CHUNK_BYTES
    size = min(_CHUNK_BYTES, stamp.size - start)
    try:
        with path.open_seekable() as file:
            file.seek(start)
            content = file.read(size)
        changed = path.stamp() != stamp or len(content or b"") != size
    except FileNotFoundError:
        changed = True
    if changed:
        raise ObjectChanged(f"{path} changed while it was read; run the same command again")
    return content or b""


class FilesChanged(UserError):
    """A file has changed or disappeared since its line ends were counted."""


def stamp_of(path: AnyPath) -> Stamp:
    """Return the stamp of a file. Raises UserError if there is no such file."""
    try:
        if isinstance(path, RemotePath):
            return Stamp(*path.stamp())
        facts = path.stat()
    except OSError as error:
        raise cannot_read(path, error) from None
    return Stamp(facts.st_size, facts.st_mtime_ns)


def look_at_ends(path: AnyPath, kind: str, start: int, stop: int, chunk: int) -> list:
    """Look at the ends of examples in every chunk of bytes [start, stop) of a file. Raises UserError if it cannot be read."""
    try:
        with path.open("rb") if isinstance(path, Path) else buffered(path.open_seekable()) as file:
            return ENDS[kind].look(file, start, stop, chunk)
    except OSError as error:
        raise cannot_read(path, error) from None


@dataclass(frozen=True)
class Piece:
    """A range of the examples of one file, for a task."""

    path: str  # of the bytes
    name: str  # in messages
    offset: int  # byte at which the reading begins
    skip: int  # ends from there to the first example
    first: int  # number of the first example, from 1
    count: int  # examples
    stamp: Stamp
    kind: str = "lines"  # of `ENDS`
    state: int = 0  # of these ends at the offset
    to_end: bool = False  # whether the last example of the file is in it


@dataclass(frozen=True)
class CutFile:
    """A file, the number of ends before each of its chunks [chunks + 1], and the state at the start of each chunk."""

    path: AnyPath
    name: str
    stamp: Stamp
    kind: str
    before: np.ndarray
    states: Sequence[int]
    chunk: int
    lines: int  # examples: of text, its lines

    def piece(self, start: int, stop: int) -> Piece:
        """Return examples [start, stop), counted from 0."""
        # Example n begins after end n.
        at = int(np.searchsorted(self.before, start)) - 1 if start else 0
        skip = start - int(self.before[at])
        how = self.kind, self.states[at] if start else 0, stop == self.lines
        return Piece(str(self.path), self.name, at * self.chunk, skip, start + 1, stop - start, self.stamp, *how)


def cut_file(path: AnyPath, name: str, stamp: Stamp, found: Sequence, chunk: int, kind: str = "lines") -> CutFile:
    """Return a file with what `look_at_ends` found in all its chunks. Raises UserError if it cannot be read or cut."""
    joined = ENDS[kind].join(found)
    before = np.concatenate([[0], np.cumsum(joined.ends, dtype=np.int64)])
    unended = joined.unended
    try:
        with open_seekable(path) as file:
            head = file.read(len(UTF8_BOM) + 1)
            file.seek(max(0, stamp.size - 1))
            # The last line may have no end. A file that is only a byte order mark has no line.
            unended |= kind == "lines" and stamp.size > 0 and file.read(1) != b"\n" and head != UTF8_BOM
    except OSError as error:
        raise cannot_read(path, error) from None
    return CutFile(path, name, stamp, kind, before, joined.states, chunk, int(before[-1]) + unended)


@dataclass(frozen=True)
class CutSide:
    """The examples of several files, one after the other."""

    files: tuple[CutFile, ...]

    @property
    def lines(self) -> int:
        return sum(file.lines for file in self.files)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return examples [start, stop) of the side, counted from 0, file by file."""
        pieces, first = [], 0
        for file in self.files:
            begin, end = max(start, first), min(stop, first + file.lines)
            if begin < end:
                pieces.append(file.piece(begin - first, end - first))
            first += file.lines
        return pieces


def read_range(pieces: Sequence[Piece]) -> Iterator[str]:
    """Read the lines of the pieces. Raises UserError as `read_lines` does, and FilesChanged for a changed file."""
    return read_examples(pieces, lambda lines, name: lines)


def read_examples(pieces: Sequence[Piece], read: Callable[[Iterator[str], str], Iterator[Item]]) -> Iterator[Item]:
    """Read the examples of the pieces. `read` gives those in lines of a file of this name.

    Raises UserError as `read` does, with numbers of lines that count from the piece, and FilesChanged for a changed file.
    """
    for piece in pieces:
        left, path = piece.count, as_path(piece.path)
        try:
            examples = read(_read_piece(path, piece), piece.name)
            for example in islice(examples, piece.count):
                left -= 1
                yield example
            # What follows the last example may be bad.
            if piece.kind != "lines" and piece.to_end and next(examples, None) is not None:
                raise _changed(piece)
        except ObjectChanged:
            raise _changed(piece) from None
        # Every chunk of an object was compared with the stamp when it was read.
        if left or (isinstance(path, Path) and stamp_of(path) != piece.stamp):
            raise _changed(piece)


def _read_piece(path: AnyPath, piece: Piece) -> Iterator[str]:
    with _open(path, piece) as file:
        start = ENDS[piece.kind].find(file, piece.offset, piece.state, piece.skip) if piece.skip else piece.offset
        if start is None:
            raise _changed(piece)
        file.seek(start)
        yield from decoded_lines(whole_lines(file, piece.name), piece.name, piece.first)


def _open(path: AnyPath, piece: Piece) -> IO[bytes]:
    if isinstance(path, RemotePath):
        return buffered(ChunkedObject(path, piece.stamp))
    try:
        file = path.open("rb")
    except OSError as error:  # it was readable when its line ends were counted
        raise FilesChanged(
            f"cannot read {piece.name} on {platform.node()}: {error.strerror or error}; put input files on storage that all "
            "nodes share"
        ) from None
    if stamp_of(path) != piece.stamp:
        file.close()
        raise _changed(piece)
    return file


def buffered(file: io.RawIOBase) -> IO[bytes]:
    """Return a file whose reads are few and large."""
    return io.BufferedReader(file, _READ_BYTES)


def _changed(piece: Piece) -> FilesChanged:
    return FilesChanged(f"{piece.name} changed while it was read; run the same command again")
