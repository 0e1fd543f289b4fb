"""Ranges of the lines of plain files and objects. The start of line n is known without reading all lines before it.

A first pass counts the line ends of every chunk of a file. The reader of a range seeks to the chunk in which the range begins,
and skips the line ends before it. `read_range` returns the same lines as `read_lines`, with the same messages.
"""

import io
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from treeproc.common.object_chunks import ChunkedObject, ObjectChanged
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath, as_path, open_seekable
from treeproc.readers.numbered_lines import UTF8_BOM, decoded_lines, whole_lines

CHUNK_BYTES = 4 << 20
_READ_BYTES = 1 << 20
_LINE_END = ord("\n")


class FilesChanged(UserError):
    """A file has changed or disappeared since its line ends were counted."""


@dataclass(frozen=True)
class Stamp:
    """Size and modification time of a file. They show whether the file was changed."""

    size: int
    mtime_ns: int


def stamp_of(path: AnyPath) -> Stamp:
    """Return the stamp of a file. Raises UserError if there is no such file."""
    try:
        if isinstance(path, RemotePath):
            return Stamp(*path.stamp())
        facts = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    return Stamp(facts.st_size, facts.st_mtime_ns)


def count_line_ends(path: AnyPath, start: int, stop: int, chunk: int) -> list[int]:
    """Count line ends in every chunk of bytes [start, stop) of a file. Raises UserError if it cannot be read."""
    counts = []
    try:
        with open_seekable(path) as file:
            file.seek(start)
            for begin in range(start, stop, chunk):
                codes = np.frombuffer(file.read(min(chunk, stop - begin)), np.uint8)
                counts.append(int(np.count_nonzero(codes == _LINE_END)))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    return counts


@dataclass(frozen=True)
class Piece:
    """A range of the lines of one file, for a task."""

    path: str  # of the bytes
    name: str  # in messages
    offset: int  # byte at which the reading begins
    skip: int  # line ends from there to the first line
    first: int  # number of the first line, from 1
    count: int  # lines
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class CutFile:
    """A file and the number of line ends before each of its chunks [chunks + 1]."""

    path: AnyPath
    name: str
    stamp: Stamp
    before: np.ndarray
    chunk: int
    lines: int

    def piece(self, start: int, stop: int) -> Piece:
        """Return lines [start, stop), counted from 0."""
        # Line n begins after line end n.
        at = int(np.searchsorted(self.before, start)) - 1 if start else 0
        skip = start - int(self.before[at])
        place = self.stamp.size, self.stamp.mtime_ns
        return Piece(str(self.path), self.name, at * self.chunk, skip, start + 1, stop - start, *place)


def cut_file(path: AnyPath, name: str, stamp: Stamp, counts: Sequence[int], chunk: int) -> CutFile:
    """Return a file with the line ends of all its chunks. Raises UserError if it cannot be read."""
    before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    try:
        with open_seekable(path) as file:
            head = file.read(len(UTF8_BOM) + 1)
            file.seek(max(0, stamp.size - 1))
            # The last line may have no end. A file that is only a byte order mark has no line.
            unended = stamp.size > 0 and file.read(1) != b"\n" and head != UTF8_BOM
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    return CutFile(path, name, stamp, before, chunk, int(before[-1]) + unended)


@dataclass(frozen=True)
class CutSide:
    """The lines of several files, one after the other."""

    files: tuple[CutFile, ...]

    @property
    def lines(self) -> int:
        return sum(file.lines for file in self.files)

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return lines [start, stop) of the side, counted from 0, file by file."""
        pieces, first = [], 0
        for file in self.files:
            begin, end = max(start, first), min(stop, first + file.lines)
            if begin < end:
                pieces.append(file.piece(begin - first, end - first))
            first += file.lines
        return pieces


def read_range(pieces: Sequence[Piece]) -> Iterator[str]:
    """Read the lines of the pieces. Raises UserError as `read_lines` does, and FilesChanged for a changed file."""
    for piece in pieces:
        left, path = piece.count, as_path(piece.path)
        try:
            for line in islice(_read_piece(path, piece), piece.count):
                left -= 1
                yield line
        except ObjectChanged:
            raise _changed(piece) from None
        # Of an object, every chunk was compared with the stamp when it was read.
        if left or (isinstance(path, Path) and stamp_of(path) != _stamp(piece)):
            raise _changed(piece)


def _stamp(piece: Piece) -> Stamp:
    return Stamp(piece.size, piece.mtime_ns)


def _read_piece(path: AnyPath, piece: Piece) -> Iterator[str]:
    with _open(path, piece) as file:
        file.seek(piece.offset + _bytes_to_skip(file, piece))
        yield from decoded_lines(whole_lines(file, piece.name), piece.name, piece.first)


def _open(path: AnyPath, piece: Piece) -> IO[bytes]:
    if isinstance(path, RemotePath):
        return io.BufferedReader(ChunkedObject(path, (piece.size, piece.mtime_ns)), _READ_BYTES)
    try:
        file = path.open("rb")
    except OSError as error:  # it was readable when its line ends were counted
        raise FilesChanged(
            f"cannot read {piece.name} on {platform.node()}: {error.strerror or error}; put input files on storage that all "
            "nodes share"
        ) from None
    if stamp_of(path) != _stamp(piece):
        file.close()
        raise _changed(piece)
    return file


def _bytes_to_skip(file: IO[bytes], piece: Piece) -> int:
    """Return the number of bytes from the offset of a piece to its first line."""
    left, passed = piece.skip, 0
    file.seek(piece.offset)
    while left:
        codes = np.frombuffer(file.read(_READ_BYTES), np.uint8)
        if not len(codes):
            raise _changed(piece)
        ends = np.flatnonzero(codes == _LINE_END)
        if len(ends) >= left:
            return passed + int(ends[left - 1]) + 1
        left -= len(ends)
        passed += len(codes)
    return passed


def _changed(piece: Piece) -> FilesChanged:
    return FilesChanged(f"{piece.name} changed while it was read; run the same command again")
