"""Files and objects that are complete or absent: atomic writes, locks, hashes, JSON, archives of PyTorch.

PyTorch's files may come from untrusted sources. Nothing in them is executed, and damage is reported in one line.
"""

import errno
import fcntl
import functools
import glob
import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from treeproc.common.errors import UserError, one_line, quoted
from treeproc.common.storage import AnyPath, RemotePath, as_path

TEMPORARY_PREFIX = ".tmp-"
# `temporary_beside`, and files by which nodes find a folder.
_LEFTOVER = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}(?:[0-9a-f]+|shared)-.")
LOCK = ".lock"  # of a locked folder
OTHER_CACHE = "set TREE_ATTENTION_CACHE to another folder"
MADE_AGAIN = "remove it and run the same command again"  # hint of `read_json` for what a command notes for itself
_MESSAGE_CHARS = 150
# Errors about the name of a path.
_OF_NAMES = {errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.EEXIST}
# Errors of file systems that cannot lock: Lustre without its option, NFS without its daemon.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_OF_RIGHTS = {errno.EACCES, errno.EPERM, errno.EROFS}


def file_sha256(path: AnyPath) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_size(path: AnyPath) -> int:
    """Return the size in bytes. Raises FileNotFoundError."""
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


def atomic_write(path: AnyPath, content: bytes | bytearray) -> None:
    """Write a complete file or nothing; see `atomic_output`."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with atomic_output(path) as file:
        file.write(content)


def way_out(error: OSError) -> str:
    """Return what a user can do if the file system refuses a path or a write."""
    if error.errno in _OF_NAMES:
        return "check the name of the path"
    return f"{'make its folder writable' if error.errno in _OF_RIGHTS else 'free space'}, or write to another place"


def temporary_beside(path: Path) -> Path:
    """Return a name beside `path` for what will be renamed to it.

    No other process has it, also none of another container or machine, where process ids repeat.
    """
    return path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:12]}-{path.name}")


@contextmanager
def atomic_output(path: AnyPath) -> Iterator[IO[bytes]]:
    """Open a file that appears complete or not at all: a temporary file beside it, fsync, rename, fsync of the folder.

    An object is written to a local file first and needs no more than its upload. Raises UserError when the disk or the
    store refuses.
    """
    if isinstance(path, RemotePath):
        with tempfile.TemporaryFile() as file:
            yield file
            file.flush()
            path.write_file(file)
        return
    temporary = temporary_beside(path)
    try:
        with create(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)  # before the file is closed, which ends its lock
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; {way_out(error)}, then run the same command again") from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_leftovers(folder: AnyPath, name: str | None = None) -> None:
    """Remove temporary files and folders right below `folder` that commands left when they were killed.

    With `name`, it removes only those that were to get this name. What a process still writes is locked, and stays. A store has
    no locks: there, the caller holds the folder. Names of other programs, such as `.tmp-download`, stay.
    """
    found = folder.glob(f"{TEMPORARY_PREFIX}*" if name is None else f"{TEMPORARY_PREFIX}*-{glob.escape(name)}")
    for path in (path for path in found if _LEFTOVER.match(path.name)):
        if isinstance(path, RemotePath):
            path.unlink(missing_ok=True)
            continue
        with suppress(OSError):  # it is locked, or has just gone
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(descriptor)


@contextmanager
def locked_entry(path: Path) -> Iterator[None]:
    """Hold a temporary folder that is being filled, so that `remove_leftovers` leaves it alone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock_entry(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock_entry(descriptor: int) -> None:
    with suppress(OSError):  # some file systems have no such locks, and then `remove_leftovers` removes nothing
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def cannot_read(path: AnyPath | str, error: OSError) -> UserError:
    """Return the error of an input. For a relative path that is missing, which a configuration may give, it names the start."""
    why = error.strerror or str(error)
    if error.errno == errno.ENOENT and not as_path(str(path)).is_absolute():
        why += f" in the working folder {Path.cwd()}"
    return UserError(f"cannot read {path}: {why}")


@contextmanager
def locked(folder: AnyPath, *, shared: bool = False, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a folder against other processes, or with those that hold it `shared` too; the lock goes with the process.

    An object store has no such locks: there it holds against processes of this machine alone, and two machines that
    write the same data set write the same bytes. Raises UserError when another one still has it after `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(file_lock(lock_place(folder / LOCK), wait=False, shared=shared))
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(f"another process is writing to {folder}; wait for it, or choose another folder") from None
            time.sleep(0.5)
        yield


def lock_place(lock: AnyPath) -> Path:
    """Return the file to hold for a lock. A lock in an object store holds against processes of this machine alone."""
    if isinstance(lock, Path):
        return lock
    return private_folder("locks") / f"{hashlib.sha256(str(lock).encode()).hexdigest()[:16]}.lock"


@contextmanager
def file_lock(lock: Path, *, wait: bool = True, shared: bool = False) -> Iterator[None]:
    """Hold a lock file, alone or with others that hold it `shared`. Makes a missing file, and never writes to it.

    Raises BlockingIOError if another process has it and `wait` is false. Raises UserError if `lock` is a link or not a
    regular file: opening that would reach a place that another user chose. Also if the file system has no locks.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _no_lock(lock) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _no_lock(lock)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise UserError(
                f"{lock.parent} is on a file system without locks ({error.strerror}); choose a folder on another one, or mount "
                "this one with locks (Lustre: -o flock)"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _no_lock(lock: Path) -> UserError:
    return UserError(f"{lock} must be a lock file, but is a link or not a regular file; remove it and run the same command again")


def cache_folder() -> Path:
    """Return the folder of this user for copies of objects: TREE_ATTENTION_CACHE, else ~/.cache/tree-attention."""
    return Path(os.environ.get("TREE_ATTENTION_CACHE") or Path.home() / ".cache" / "tree-attention")


def private_folder(name: str) -> Path:
    """Make a folder in the cache that only this user can write to. Raises UserError if it is another user's or a link."""
    folder = cache_folder() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
            raise UserError(f"{folder} must be a folder that belongs to you; {OTHER_CACHE}")
        folder.chmod(0o700)
    except OSError as error:
        raise UserError(f"cannot write to the cache {folder}: {error.strerror}; {OTHER_CACHE}") from None
    return folder


def create(path: Path) -> IO[bytes]:
    """Create a new file to write to, which is locked until it is closed: see `remove_leftovers`.

    What is in its place is removed first, so that nothing is written through a link.
    """
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    _lock_entry(descriptor)
    return os.fdopen(descriptor, "wb")


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_bytes(value: object, form: type | None = None) -> bytes:
    """Return JSON. Raises ValueError for content that `read_json` refuses with this `form`: the file would be of no use."""
    content = (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
    if form is not None:
        _adapter(form).validate_python(json.loads(content), strict=True)
    return content


def repeated_key(pairs: Sequence[tuple[str, object]]) -> str | None:
    """Return the key that a JSON object, as pairs, has most often; None if it has each once. Readers keep one in silence."""
    if len(dict(pairs)) == len(pairs):
        return None
    return Counter(key for key, _ in pairs).most_common(1)[0][0]


def is_plausible(number: float) -> bool:
    """Return whether a command may have written this measurement. Some are not finite, but larger ones make sums overflow."""
    return not 1e100 < abs(number) < math.inf


def read_json(path: AnyPath, hint: str = "restore it", form: type | None = None, needed: Iterable[str] = ()) -> Any:
    """Read a JSON object. Raises UserError, which ends in `hint`, when the file is missing or holds no object.

    So too when it lacks a `needed` key, or does not have the `form`: a TypedDict of keys and types, which lets others through.
    """
    try:
        content = path.read_bytes()
        value = json.loads(content)
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False).encode()  # half a character can be neither a name nor printed
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {hint}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error}; {hint}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, but holds a {type(value).__name__}; {hint}")
    if form is not None:
        check_form(value, form, path, hint)
    if missing := [name for name in needed if name not in value]:
        raise UserError(f"{path} is damaged: it has no {', '.join(missing)}; {hint}")
    return value


def check_form(value: dict, form: type, path: AnyPath, hint: str) -> None:
    """Raise UserError if the content of a file does not have the `form` of a TypedDict."""
    try:
        _adapter(form).validate_python(value, strict=True)
    except ValidationError as error:
        raise damaged_file(path, error, hint) from None


def damaged_file(path: AnyPath, error: ValidationError, hint: str) -> UserError:
    """Return the error of a file whose content pydantic refuses, with the first mistake; it ends in `hint`."""
    first = error.errors(include_url=False)[0]
    place = ".".join(one_line(str(part), 80) for part in first["loc"])
    found = "" if first["type"] == "missing" else f", but is {quoted(first['input'])}"
    return UserError(f"{path} is damaged: {place}: {first['msg']}{found}; {hint}")


@functools.cache
def _adapter(form: type) -> TypeAdapter:
    return TypeAdapter(form)


def read_text(path: AnyPath, hint: str) -> str:
    """Read a small file in UTF-8. Raises UserError, which ends in `hint`, when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {hint}") from None


def check_archive(path: Path, hint: str) -> None:
    """Compare a file with its own checksums, where it has some: PyTorch's older form has none.

    Raises UserError, which ends in `hint`, for a file that is cut off or changed, or whose parts are larger than the file.
    """
    try:
        with open(path, "rb") as file:
            begin = file.read(2)
        if begin == b"\x80\x02":  # a pickle, as PyTorch wrote them before 1.6 and some still do
            return
        if begin != b"PK":
            raise UserError(f"{path} is {'not a PyTorch file' if begin else 'empty'}; {hint}")
        with zipfile.ZipFile(path) as archive:
            # PyTorch compresses nothing: what unpacks to more than there is was made to fill the memory.
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise UserError(f"{path} is not a PyTorch file: its parts are compressed; {hint}")
            damaged = archive.testzip()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; {hint}") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise UserError(f"{path} is damaged ({one_line(str(error), _MESSAGE_CHARS)}); {hint}") from None
    if damaged:
        raise UserError(f"{path} is damaged: {one_line(damaged, _MESSAGE_CHARS)} has the wrong checksum; {hint}")


def load_archive(path: Path, hint: str) -> Any:
    """Load tensors and plain values that `torch.save` wrote. Raises UserError, which ends in `hint`, for anything else."""
    import torch

    check_archive(path, hint)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch and pickle raise any kind on damaged files
        message = one_line(f"{type(error).__name__}: {error}", _MESSAGE_CHARS)
        raise UserError(f"{path} is damaged, or does not hold tensors ({message}); {hint}") from None
