"""The ends of examples in files, which tasks need to find theirs. Compressed files are unpacked first."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO

from treeproc.common.files import atomic_output, atomic_write, json_bytes
from treeproc.common.storage import AnyPath, RemotePath, as_path
from treeproc.readers.example_ends import NotCut
from treeproc.readers.line_ranges import look_at_ends
from treeproc.readers.packed_files import open_input

_READ_BYTES = 1 << 20


class CountEnds:
    """Looks at the ends of examples in every chunk of a range of bytes of a file. Returns nothing if the file cannot be cut."""

    def __init__(self, chunk: int):
        self._chunk = chunk

    def __call__(self, path: str, kind: str, start: int, stop: int) -> list | None:
        try:
            return look_at_ends(as_path(path), kind, start, stop, self._chunk)
        except NotCut:
            return None


class Unpack:
    """Unpacks a compressed file from front to back. Returns whether it could read the file to its end; if not, it leaves no file.

    It writes `mark_of` the file last. Raises UserError when the disk or the store refuses.
    """

    def __call__(self, path: str, to: str) -> bool:
        target, size = as_path(to), 0
        try:
            with _output(target) as file:
                for content in _unpacked(as_path(path)):
                    size += file.write(content)
        except _Unreadable:
            return False
        atomic_write(mark_of(target), json_bytes({"bytes": size}))
        return True


def mark_of(path: AnyPath) -> AnyPath:
    """Return the file that says of another file of a work folder that it is complete."""
    return path.parent / f"{path.name}.json"


def _output(path: AnyPath) -> AbstractContextManager[IO[bytes]]:
    """Open a stream to a file or object. Unpacked text may be larger than the disk of a node, so no local file holds it first."""
    return path.open_output() if isinstance(path, RemotePath) else atomic_output(path)


class _Unreadable(Exception):
    """The packed file cannot be read. An error of the disk while writing is not this error."""


def _unpacked(path: AnyPath) -> Iterator[bytes]:
    try:
        with open_input(path) as packed:
            while content := packed.read(_READ_BYTES):
                yield content
    except OSError as error:
        raise _Unreadable from error
