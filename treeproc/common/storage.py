"""Paths that are files or objects: a local `Path`, or a `RemotePath` such as `s3://bucket/data`.

Code that reads and writes data sets uses what the two have in common. An object store knows no folders and no renames:
`mkdir` does nothing, and an object appears complete when its upload ends.

Endpoint, region and credentials come from the environment alone. They are never part of a path, a configuration or an index.
The variables are those of `store_requests.VARIABLES`.
"""

import errno
import fnmatch
import functools
import io
import mmap
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, cast

import pyarrow
import pyarrow.fs
from pydantic import PlainSerializer, PlainValidator

from treeproc.common.errors import UserError, quoted
from treeproc.common.store_requests import AT_ONCE, Answer, InputStream, OutputStream, SeekableStream, ask, part_repeats

_URI = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_SCHEMES = ("s3", "gs", "az")
_TIMEOUT_S = 60
_AS_IT_IS = None  # else, Arrow packs and unpacks objects whose names end like those of packed files
_REQUEST_BYTES = 8 << 20  # every read of a stream is a request of its own
_ONE_REQUEST_BYTES = 4 << 20  # a smaller object is uploaded by one request
_ONCE = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=1)


class _S3(pyarrow.fs.S3FileSystem):
    """A copy in another process is that of `in_parts` there. A copy of Arrow's own kind forgets its strategy."""

    def __reduce__(self) -> tuple:
        return _file_system, ("s3", True)


@functools.cache
def _file_system(scheme: str, in_parts: bool = False) -> pyarrow.fs.FileSystem:
    """Connect to a store, once per process and where it is used: Ray's workers have their own connections.

    Uploads `in_parts` begin when they are opened. An upload that begins later, and whose beginning fails, would replace the
    object by an empty one. The requests of their parts are repeated by Arrow.
    """
    pyarrow.set_io_thread_count(max(AT_ONCE, pyarrow.io_thread_count()))  # which upload
    if scheme == "s3":
        # Arrow itself does not look for the endpoint in the environment.
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        protocol, _, host = endpoint.rpartition("://")
        return _S3(
            endpoint_override=host or None,
            scheme=protocol or "https",
            connect_timeout=10,
            request_timeout=_TIMEOUT_S,
            allow_delayed_open=not in_parts,  # a small object is one request
            retry_strategy=pyarrow.fs.AwsDefaultS3RetryStrategy(max_attempts=part_repeats()) if in_parts else _ONCE,
        )
    if scheme == "az":
        return _azure()
    return pyarrow.fs.GcsFileSystem(retry_time_limit=timedelta(seconds=_TIMEOUT_S))


def _azure() -> pyarrow.fs.FileSystem:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise UserError("az://...: set AZURE_STORAGE_ACCOUNT_NAME to the storage account, on every node")
    protocol, _, host = os.environ.get("AZURE_STORAGE_ENDPOINT", "").rstrip("/").rpartition("://")
    place = {"storage_authority": host, "storage_scheme": protocol or "https"}
    server = {f"{kind}_{what}": value for kind in ("blob", "dfs") for what, value in place.items()}
    return pyarrow.fs.AzureFileSystem(
        account,
        account_key=os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"),
        sas_token=os.environ.get("AZURE_STORAGE_SAS_TOKEN"),
        **(server if host else {}),
    )


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object, or a prefix of objects, with the part of pathlib's interface that data sets need.

    A missing object raises FileNotFoundError as a file does. Any other refusal of the store raises UserError.
    """

    scheme: str
    key: str  # bucket/name/of/the/object

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __truediv__(self, other: str | PurePosixPath) -> "RemotePath":
        return RemotePath(self.scheme, str(PurePosixPath(self.key) / other))

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.scheme, str(PurePosixPath(self.key).parent))

    def with_suffix(self, suffix: str) -> "RemotePath":
        return RemotePath(self.scheme, str(PurePosixPath(self.key).with_suffix(suffix)))

    def is_absolute(self) -> bool:
        return True

    def absolute(self) -> "RemotePath":
        return self

    def resolve(self) -> "RemotePath":
        return self

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: an object store has no folders."""

    def exists(self) -> bool:
        return self._info().type != pyarrow.fs.FileType.NotFound

    def is_file(self) -> bool:
        return self._info().type == pyarrow.fs.FileType.File

    def is_dir(self) -> bool:
        return self._info().type == pyarrow.fs.FileType.Directory

    def size(self) -> int:
        """Return the bytes of the object."""
        return self.stamp()[0]

    def stamp(self) -> tuple[int, int]:
        """Return the bytes of the object, and its time of change in nanoseconds; most stores round the time to seconds."""
        info = self._info()
        if info.type != pyarrow.fs.FileType.File:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return info.size, info.mtime_ns or 0

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """Yield the objects right below this prefix whose name fits, in order."""
        return (self / name for name in self._below(pyarrow.fs.FileType.File) if fnmatch.fnmatchcase(name, pattern))

    def objects(self) -> dict[str, int]:
        """Return bytes of all objects below this prefix by relative name. Raises UserError for a name that leaves the prefix."""
        return {name: size for name, (size, _) in self.listing().items()}

    def listing(self) -> dict[str, tuple[int, int]]:
        """Return the same as `objects`, with the time of change in nanoseconds behind the bytes."""
        selector = pyarrow.fs.FileSelector(self.key, allow_not_found=True, recursive=True)
        infos = self._ask(lambda files: files.get_file_info(selector))
        files = (info for info in infos if info.type == pyarrow.fs.FileType.File)
        found = {str(PurePosixPath(info.path).relative_to(self.key)): (info.size, info.mtime_ns or 0) for info in files}
        for name in found:
            inside(self, name)
        return found

    def folders(self) -> list["RemotePath"]:
        """Return the prefixes right below this one, in order."""
        return [self / name for name in self._below(pyarrow.fs.FileType.Directory)]

    def remove_objects(self) -> None:
        """Remove all objects below this prefix."""
        with suppress(FileNotFoundError):
            self._ask(lambda files: files.delete_dir(self.key))

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the object as a buffered stream of bytes."""
        stream = self._ask(lambda files: files.open_input_stream(self.key, compression=_AS_IT_IS))
        return io.BufferedReader(InputStream(self, self._open_anywhere, stream), _REQUEST_BYTES)

    def open_seekable(self) -> io.RawIOBase:
        """Open the object as a file that is read at any place. It holds nothing: every read is a request."""
        return SeekableStream(self, self._open_anywhere)

    @contextmanager
    def open_output(self) -> Iterator[IO[bytes]]:
        """Open a stream that replaces the object when it ends, of any size; at most 64 MiB and a few parts wait for the store.

        If the block ends with an error, the object is removed. A process that is killed at that moment may leave a part of it, so
        a note beside the object must say that it is complete.
        """
        written = self._written()
        stream = self._ask(lambda files: files.open_output_stream(written.key, compression=_AS_IT_IS), in_parts=True)
        try:
            with io.BufferedWriter(OutputStream(self, stream), _REQUEST_BYTES) as file:
                yield file
        except BaseException:
            written.unlink(missing_ok=True)
            raise
        self._publish(written)

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes | bytearray | memoryview) -> None:
        """Replace the object. Readers see the old one or the new one, never a part."""

        written = self._written()

        def upload(files: pyarrow.fs.FileSystem) -> None:
            with files.open_output_stream(written.key, compression=_AS_IT_IS) as sink:
                sink.write(content)

        self._ask(upload, in_parts=len(content) >= _ONE_REQUEST_BYTES)
        self._publish(written)

    def write_file(self, file: IO[bytes]) -> None:
        """Replace the object by the content of an open file, of any size."""
        if not os.fstat(file.fileno()).st_size:  # nothing to map
            return self.write_bytes(b"")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            self.write_bytes(view)

    def unlink(self, missing_ok: bool = False) -> None:
        may_be_gone = missing_ok

        def remove(files: pyarrow.fs.FileSystem) -> None:
            nonlocal may_be_gone
            try:
                files.delete_file(self.key)
            except FileNotFoundError:
                if not may_be_gone:
                    raise
            except OSError:  # also if the store has removed it, and its answer was lost
                may_be_gone = True
                raise

        self._ask(remove)

    def _written(self) -> "RemotePath":
        """Return the object to write to. On Azure, an upload empties its object when it begins, so it writes to another one."""
        return self if self.scheme != "az" else self.parent / f".tmp-{uuid.uuid4().hex}-{self.name}"

    def _publish(self, written: "RemotePath") -> None:
        """Give a complete upload its name. Arrow cannot rename an object of Azure; a copy is complete or absent."""
        if written != self:
            self._ask(lambda files: files.copy_file(written.key, self.key))
            written.unlink(missing_ok=True)

    def _below(self, kind: pyarrow.fs.FileType) -> list[str]:
        """Return the names of this kind right below this prefix, in order."""
        selector = pyarrow.fs.FileSelector(self.key, allow_not_found=True)
        infos = self._ask(lambda files: files.get_file_info(selector))
        return sorted(info.base_name for info in infos if info.type == kind)

    def _info(self) -> pyarrow.fs.FileInfo:
        return self._ask(lambda files: files.get_file_info(self.key))

    def _open_anywhere(self) -> pyarrow.NativeFile:
        return _file_system(self.scheme).open_input_file(self.key)

    def _ask(self, request: Callable[[pyarrow.fs.FileSystem], Answer], in_parts: bool = False) -> Answer:
        """Send a request to the store: every one, except those of open streams."""
        return ask(self, lambda: request(_file_system(self.scheme, in_parts)))


AnyPath = Path | RemotePath


def open_seekable(path: AnyPath) -> IO[bytes]:
    """Open a file or an object that is read at any place. Every read of an object is a request."""
    # The stream has all that `IO[bytes]` has.
    return path.open("rb") if isinstance(path, Path) else cast(IO[bytes], path.open_seekable())


def place_for_libraries(path: AnyPath) -> tuple[str, pyarrow.fs.FileSystem | None]:
    """Return a place for a library that takes a path and a file system of Arrow, which repeats the requests of that library."""
    return (str(path), None) if isinstance(path, Path) else (path.key, _file_system(path.scheme, in_parts=True))


def scheme_of(value: object) -> str:
    """Return the scheme of a text that is a URI; empty for all else."""
    return match[1].lower() if isinstance(value, str) and (match := _URI.match(value)) else ""


def as_path(value: str | AnyPath) -> AnyPath:
    """Return a local path, or the RemotePath of a URI. Raises UserError for a URI of another kind or without a bucket."""
    if not isinstance(value, str):
        return value
    match = _URI.match(value)
    if not match:
        if slip := re.match(rf"(?:{'|'.join(_SCHEMES)})(?::|//)", value, re.IGNORECASE):
            raise UserError(f"{slip[0]}...: a URI must have a colon and two slashes, as s3://BUCKET/NAME")
        return Path(value)
    scheme, key = match[1].lower(), match[2].strip("/")
    if scheme not in _SCHEMES or not key or "@" in key.split("/")[0] or "?" in key:
        raise UserError(
            f"{scheme}://...: must be a local path, s3://BUCKET/NAME, gs://BUCKET/NAME or az://CONTAINER/NAME without keys or "
            "options; put those into the environment"
        )
    return RemotePath(scheme, str(PurePosixPath(key)))


def inside(root: AnyPath, name: str) -> AnyPath:
    """Return the place below `root` of a name that a data set, a run or an object store gives for one of its files.

    Raises UserError if the name would leave `root`: it is empty or absolute, or has a `..` or a NUL. It raises UserError too
    if a folder on the way is a link that leads out. If the file itself is a link, it is only read through, never written
    through.
    """
    parts = PurePosixPath(name).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
        raise UserError(
            f"{root}: the recorded name {name[:200]!r} does not name a file in that folder; the command does not open it"
        )
    if isinstance(root, Path) and len(parts) > 1 and not (root / name).parent.resolve().is_relative_to(root.resolve()):
        raise UserError(f"{root / name} is behind a link that leads out of {root}; the command does not open it")
    return root / name


def validate_path(value: object) -> AnyPath:
    """Return the path that a setting gives. Raises ValueError for anything else."""
    if value is None:
        raise ValueError("must be a path or a URI, but is empty")
    if value == [None]:
        raise ValueError("must be a path or a URI, but is -; write /dev/stdin or /dev/stdout")
    if not isinstance(value, str | Path | RemotePath):
        raise ValueError(f"must be a path or a URI, but is {quoted(value)}; write ./NAME for a name that is a number")
    try:
        return as_path(value)
    except UserError as error:
        raise ValueError(str(error)) from None


# The type of a path in settings.
DataPath = Annotated[AnyPath, PlainValidator(validate_path), PlainSerializer(str, return_type=str, when_used="json")]
