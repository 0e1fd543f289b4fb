"""Streams of Arrow's file systems as those of Python, whose errors are one line about the store."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow

from treeproc.common.errors import UserError

_UPLOADS_BYTES = 64 << 20  # Arrow sends in the background, and would hold whatever the store has not taken yet


class StoreRefuses(UserError):
    """The store does not answer as it should. That says nothing about the content of an object."""


@contextmanager
def told(path: object) -> Iterator[None]:
    """Turns what the store answers into one line; a missing object stays a FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = " ".join(str(error).split())[:300]
        raise StoreRefuses(
            f"{path}: the object store refuses: {reason}; check the bucket, your rights and the environment (AWS_ENDPOINT_URL, "
            "AWS_REGION, AWS_PROFILE or keys; GOOGLE_APPLICATION_CREDENTIALS), then run the same command again"
        ) from None


class InputStream(io.RawIOBase):
    """A stream of Arrow as one of Python, so that errors in the middle of an object are reported, too."""

    def __init__(self, path: object, stream: pyarrow.NativeFile):
        self._path, self._stream = path, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with told(self._path):
            return self._stream.readinto(buffer)

    def readall(self) -> bytes:
        with told(self._path):
            return self._stream.read()

    def close(self) -> None:
        self._stream.close()
        super().close()


class SeekableStream(InputStream):
    """A file of Arrow that is read at any place."""

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with told(self._path):
            return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()


class OutputStream(io.RawIOBase):
    """An output stream of Arrow as one of Python. It waits for the store from time to time."""

    def __init__(self, path: object, stream: pyarrow.NativeFile):
        self._path, self._stream, self._waiting = path, stream, 0

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        with told(self._path):
            written = self._stream.write(content)
            self._waiting += written
            if self._waiting >= _UPLOADS_BYTES:
                self._stream.flush()
                self._waiting = 0
        return written

    def close(self) -> None:
        if not self.closed:
            with told(self._path):
                self._stream.close()
        super().close()
