"""Files that are whole or absent: atomic writes, locks, hashes, JSON."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treeproc.errors import UserError

TEMPORARY_PREFIX = ".tmp-"


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def atomic_write(path: Path, content: bytes) -> None:
    """Write a whole file or nothing: temporary file beside it, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path}: {error.strerror}; free space or choose another --out, then run the same command again"
        ) from None
    sync_folder(path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes; the lock goes with the process.

    Raises UserError when another one has it.
    """
    with open(folder / ".lock", "w") as file:
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


def read_json(path: Path, mend: str = "run workflows/preprocess.py to the end") -> dict:
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
