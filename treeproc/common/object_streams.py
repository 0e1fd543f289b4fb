"""Streams of Arrow's file systems as those of Python. Requests behind them are those of `store_requests`."""

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow

from treeproc.common.store_requests import Answer, ask

_UPLOADS_BYTES = 64 << 20  # Arrow sends in the background, and would hold whatever the store has not taken yet


class InputStream(io.RawIOBase):
    """A stream of Arrow as one of Python. After an error of the store it is opened again, at the place where it was.

    `open_again` opens the object as a file that is read at any place; without `stream`, it opens it the first time, too.
    """

    def __init__(self, path: object, open_again: Callable[[], pyarrow.NativeFile], stream: pyarrow.NativeFile | None = None):
        self._path, self._open_again, self._place = path, open_again, 0
        self._stream: pyarrow.NativeFile | None = stream or ask(path, open_again)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self._ask(lambda stream: stream.readinto(buffer))
        self._place += read
        return read

    def readall(self) -> bytes:
        content = self._ask(lambda stream: stream.read())
        self._place += len(content)
        return content

    def close(self) -> None:
        self._drop()
        super().close()

    def _ask(self, read: Callable[[pyarrow.NativeFile], Answer]) -> Answer:
        def request() -> Answer:
            if self._stream is None:
                self._stream = self._open_again()
                self._stream.seek(self._place)
            try:
                return read(self._stream)
            except OSError:
                self._drop()
                raise

        return ask(self._path, request)

    def _drop(self) -> None:
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._stream = None


class SeekableStream(InputStream):
    """A file of Arrow that is read at any place."""

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: lambda: 0, io.SEEK_CUR: lambda: self._place, io.SEEK_END: lambda: self._ask(lambda s: s.size())}
        place = base[whence]() + offset
        self._ask(lambda stream: stream.seek(place))
        self._place = place
        return place

    def tell(self) -> int:
        return self._place


class OutputStream(io.RawIOBase):
    """An output stream of Arrow as one of Python. It waits for the store from time to time.

    Arrow repeats the request of a part. No request is repeated here, since the parts that were sent are not there any more.
    """

    def __init__(self, path: object, stream: pyarrow.NativeFile):
        self._path, self._stream, self._waiting = path, stream, 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        written = ask(self._path, lambda: self._stream.write(content), once=True)
        self._waiting += written
        if self._waiting >= _UPLOADS_BYTES:
            ask(self._path, self._stream.flush, once=True)
            self._waiting = 0
        return written

    def close(self) -> None:
        if not self.closed:
            ask(self._path, self._stream.close, once=True)
        super().close()
