"""Objects that are read range by range, in large chunks. A process holds the last few chunks."""

import functools
import io
from typing import Any

from treeproc.common.errors import UserError
from treeproc.common.storage import RemotePath

# Neighbours of a range often lie in the same chunk. Both sides of a text have one at a time, 32 MiB of a process together.
_CHUNK_BYTES = 8 << 20
_CHUNKS_HELD = 4

ObjectStamp = tuple[int, int]  # bytes, time of change in nanoseconds


class ObjectChanged(UserError):
    """The object is not the one of the stamp any more."""


class ChunkedObject(io.RawIOBase):
    """The bytes of the object of this stamp, as a file that is read at any place. Reading raises ObjectChanged for another."""

    def __init__(self, path: RemotePath, stamp: ObjectStamp):
        self._path, self._stamp, self._place = path, stamp, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._stamp[0]}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        number, begin = divmod(self._place, _CHUNK_BYTES)
        if self._place >= self._stamp[0]:
            return 0
        content = memoryview(_chunk(self._path, self._stamp, number))[begin : begin + len(buffer)]
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


@functools.lru_cache(_CHUNKS_HELD)
def _chunk(path: RemotePath, stamp: ObjectStamp, number: int) -> bytes:
    """Read a chunk of an object. The stamp is looked at after the reading, so that the chunk is of that object."""
    start = number * _CHUNK_BYTES
    size = min(_CHUNK_BYTES, stamp[0] - start)
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
