"""The ends of lines in files, which tasks need to find their lines. `.gz` files are unpacked first."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from treeproc.common.files import atomic_output
from treeproc.readers.line_ranges import count_line_ends

_READ_BYTES = 1 << 20


class CountLines:
    """Counts the line ends in every chunk of a range of bytes of a file."""

    def __init__(self, chunk: int):
        self._chunk = chunk

    def __call__(self, path: str, start: int, stop: int) -> list[int]:
        return count_line_ends(Path(path), start, stop, self._chunk)


class Unpack:
    """Unpacks a `.gz` file from front to back. Returns whether it could read the file to its end; if not, it leaves no file.

    Raises UserError when the disk refuses.
    """

    def __call__(self, path: str, to: str) -> bool:
        try:
            with atomic_output(Path(to)) as file:
                for content in _unpacked(path):
                    file.write(content)
        except _Unreadable:
            return False
        return True


class _Unreadable(Exception):
    """The packed file cannot be read. An error of the disk while writing is not this error."""


def _unpacked(path: str) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as packed:
            while content := packed.read(_READ_BYTES):
                yield content
    except (OSError, EOFError, zlib.error) as error:
        raise _Unreadable from error
