"""Reading of chosen parts of a memory-mapped file, and of nothing around them.

Where a page of a map is not in memory, Linux reads many pages around it: up to 8 MB on some disks. A reader of a few bytes of
every record batch then reads the whole file. Pages that were asked for are in memory, and a read of them reads no others.
"""

import os
from pathlib import Path

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
