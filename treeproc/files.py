"""Files and objects that are whole or absent: atomic writes, locks, hashes, JSON."""

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from treeproc.errors import UserError
from treeproc.storage import AnyPath, RemotePath

TEMPORARY_PREFIX = ".tmp-"


def file_sha256(path: AnyPath) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_size(path: AnyPath) -> int:
    """Raises FileNotFoundError."""
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


def atomic_write(path: AnyPath, content: bytes) -> None:
    """Write a whole file or nothing; see `atomic_output`."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with atomic_output(path) as file:
        file.write(content)


@contextmanager
def atomic_output(path: AnyPath) -> Iterator[IO[bytes]]:
    """A file to write to that takes its place whole or not at all: temporary file beside it, fsync, rename, fsync of the folder.

    An object is written to a local file first and needs no more than its upload. Raises UserError when the disk or the
    store refuses.
    """
    if isinstance(path, RemotePath):
        with tempfile.TemporaryFile() as file:
            yield file
            file.flush()
            path.write_file(file)
        return
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; free space or choose another --out, then run the same command again"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def locked(folder: AnyPath) -> Iterator[None]:
    """Hold a folder against other processes; the lock goes with the process.

    An object store has no such locks: there it holds against processes of this machine alone, and two machines that
    write the same data set write the same bytes. Raises UserError when another one has it.
    """
    if isinstance(folder, RemotePath):
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        lock = Path(tempfile.gettempdir()) / f"tree-attention-{os.getuid()}-{name}.lock"
    else:
        lock = folder / ".lock"
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is writing to {folder}; wait for it, or choose another --out") from None
        yield


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def read_json(path: AnyPath, mend: str = "run workflows/preprocess.py to the end") -> dict:
    """A JSON object. Raises UserError, which ends in `mend`, when the file is missing or holds no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {mend}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; {mend}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, but holds a {type(value).__name__}; {mend}")
    return value
