"""The cache folder of the user: local copies of objects, and notes of files that were read and had their hash.

Data sets in an object store are read by memory map like those on disk, from a copy. It is named by the hash of its content, so it
is never out of date, and the same shard under two names is one copy. The folder (`TREE_ATTENTION_CACHE`, else
~/.cache/tree-attention) may be deleted whenever no process begins to read from it. When there are more bytes than
`TREE_ATTENTION_CACHE_GB`, the copies that were used longest ago are removed.

A copy stays if it was asked for within the last minute: a process is about to open it. A copy that a process of this machine has
mapped stays too, since its removal would free no byte. In a container whose processes are not seen here such a copy may go. Its
reader loses nothing: on Linux a mapped or open file lives until it is closed.

With a note, the next command need not read a file again. It holds for a file of the same name, size, time of change and, on a
disk, the same inode. It trusts the disk: a bit that rots without a new time is found by `tree-attention verify` alone, which
reads everything. A data set keeps its bytes, may be read-only, and a copy of it brings no notes of somebody else.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from treeproc.common.errors import UserError, quoted
from treeproc.common.files import (
    OTHER_CACHE,
    TEMPORARY_PREFIX,
    atomic_write,
    cache_folder,
    create,
    file_lock,
    file_sha256,
    private_folder,
)
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.common.store_requests import AT_ONCE, give_up_when, in_parallel

logger = logging.getLogger(__name__)

# Times of files have steps: a file that changed just now may change again and keep its time.
SETTLED_NS = 2_000_000_000

Stamp = tuple[int, int, int]  # bytes, time of change in nanoseconds, inode
# Yields the sha256 of each file of a folder, given with its bytes, in order; None for one that cannot be read.
HashFiles = Callable[[AnyPath, Mapping[str, int]], Iterable[str | None]]


def stamps(folder: AnyPath, names: Iterable[str]) -> dict[str, Stamp]:
    """Return the stamps of those files that are there. Objects are listed, in one go, and have inode 0."""
    if isinstance(folder, RemotePath):
        listed = folder.listing()
        return {name: (*listed[name], 0) for name in names if name in listed}
    found = {}
    for name in names:
        with suppress(OSError):
            status = (folder / name).stat()
            found[name] = status.st_size, status.st_mtime_ns, status.st_ino
    return found


class KnownHashes:
    """The notes about the files of one folder. Notes that cannot be read are none; those that cannot be written are a warning."""

    def __init__(self, folder: AnyPath):
        self._folder = str(folder.resolve())
        self._notes = self._read()
        self._changed = False

    def has(self, name: str, sha256: str, stamp: Stamp) -> bool:
        """Return whether this file, as it is now, had this hash."""
        return self._notes.get(name) == [*stamp, sha256]

    def add(self, name: str, sha256: str, stamp: Stamp) -> None:
        """Note a file that was read; `stamp` was taken before. One that changed within the last two seconds is not noted."""
        if stamp[1] < time.time_ns() - SETTLED_NS:
            self._notes[name] = [*stamp, sha256]
            self._changed = True

    def save(self) -> None:
        """Write what is new, for the commands to come. If two processes do, the later one counts."""
        if not self._changed:
            return
        try:
            atomic_write(self._place(), json.dumps({"folder": self._folder, "files": self._notes}).encode())
        except UserError as error:
            logger.warning("warning: cannot record which hashes were checked, so the next command checks them again: %s", error)
        self._changed = False

    def _place(self) -> Path:
        return private_folder("hashes") / f"{hashlib.sha256(self._folder.encode()).hexdigest()[:32]}.json"

    def _read(self) -> dict[str, list]:
        try:
            notes = json.loads(self._place().read_bytes())
            return dict(notes["files"]) if notes["folder"] == self._folder else {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError, UserError):
            return {}


def hash_here(folder: AnyPath, sizes: Mapping[str, int]) -> Iterator[str | None]:
    """Yield the sha256 of each file, by threads of this process; None for one that cannot be read. `sizes` are bytes by name."""
    return in_parallel(lambda name: sha256_of(folder / name), sizes)


def find_changed(folder: AnyPath, hashes: Mapping[str, str], hash_files: HashFiles = hash_here) -> list[str]:
    """Return the names of the files of `folder` that are missing or have not got their sha256, in order.

    Files that are known by a note are not read. `hash_files` reads the others, and they are noted.
    """
    known, there = KnownHashes(folder), stamps(folder, hashes)
    unread = [name for name, sha256 in hashes.items() if name in there and not known.has(name, sha256, there[name])]
    logger.debug("hashes of %s: %d known, %d files read", folder, len(there) - len(unread), len(unread))
    right = there.keys() - set(unread)
    for name, found in zip(unread, hash_files(folder, {name: there[name][0] for name in unread}), strict=True):
        if found == hashes[name]:
            right.add(name)
            known.add(name, found, there[name])
    known.save()
    return [name for name in hashes if name not in right]


def sha256_of(path: AnyPath) -> str | None:
    """Return the sha256 of a file; None if it cannot be read."""
    try:
        return file_sha256(path)
    except OSError:
        return None


LIMIT = "TREE_ATTENTION_CACHE_GB"
_COPY = re.compile("[0-9a-f]{64}")
_MAPPED = re.compile(rb"/([0-9a-f]{64})(?: \(deleted\))?$", re.MULTILINE)
# The folder is looked through whenever a process has added this share of the limit, which it may exceed by so much.
_LOOK_EVERY = 1 / 64
_TEMPORARY_S = 3600.0
_JUST_USED_NS = 60 * 10**9


class _Copy(NamedTuple):
    used_ns: int
    size: int
    path: Path


class Evictor:
    """Keeps the cache below its limit; one for each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._added = math.inf  # what others left is looked through first
        self._limit = 0
        self._told = False

    def loaded(self, copy: Path) -> None:
        """Count a new copy. Raises UserError if the limit is not a number."""
        with self._lock:
            self._added += copy.stat().st_size
            if self._added < _LOOK_EVERY * self._limit:
                return
            self._added = 0
            found = _copies()
            self._limit = cache_limit(sum(one.size for one in found))
            left = _evict(found, self._limit)
            if left > self._limit and not self._told:
                self._told = True
                logger.warning(
                    "warning: the cache %s is too small: processes read %.1f GB within a minute, but its limit is %.1f GB (%s)",
                    cache_folder(), left / 1e9, self._limit / 1e9, LIMIT,
                )  # fmt: skip

    def make_room(self) -> None:
        """Remove the older half of the copies: the disk is full."""
        with self._lock:
            found = _copies()
            _evict(found, sum(one.size for one in found) // 2)


def cache_limit(held_bytes: int) -> int:
    """Return the bytes that the cache may hold: `TREE_ATTENTION_CACHE_GB`, else half of its disk's free and of its `held_bytes`.

    Raises UserError if the variable is not a number above 0.
    """
    value = os.environ.get(LIMIT)
    if not value:
        disk = os.statvfs(cache_folder())
        return (disk.f_bavail * disk.f_frsize + held_bytes) // 2
    try:
        limit = float(value) * 1e9
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise UserError(f"{LIMIT} must be a number of gigabytes above 0, but is {quoted(value)}")
    return int(limit)


def _copies() -> list[_Copy]:
    """Return the copies that are there. Removes unfinished copies that dead processes left an hour ago."""
    found = []
    for folder in cache_folder().glob("[0-9a-f][0-9a-f]"):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if _COPY.fullmatch(entry.name):
                        found.append(_Copy(status.st_atime_ns, status.st_size, Path(entry.path)))
                    elif entry.name.startswith(TEMPORARY_PREFIX) and status.st_mtime < time.time() - _TEMPORARY_S:
                        _remove_temporary(Path(entry.path))
    return found


def _remove_temporary(path: Path) -> None:
    with suppress(BlockingIOError), file_lock(path.parent / ".lock", wait=False):  # who holds it may be writing the file
        path.unlink(missing_ok=True)


def _evict(found: list[_Copy], limit: int) -> int:
    """Remove copies, the one used longest ago first, until `limit` bytes are left; returns the bytes that are left."""
    left = sum(copy.size for copy in found)
    if left <= limit:
        return left
    mapped, now = _mapped(), time.time_ns()
    for copy in sorted(found):
        if left <= limit:
            break
        if copy.path.name in mapped:
            continue
        with suppress(FileNotFoundError):  # another process has removed it
            # It may have been asked for since it was found. A clock that was set back leaves uses in the future.
            if abs(now - copy.path.stat().st_atime_ns) <= _JUST_USED_NS:
                continue
            copy.path.unlink()
        left -= copy.size
    return left


def _mapped() -> set[str]:
    """Return the names of the copies that processes of this user have mapped, as far as they are seen."""
    names: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            names.update(name.decode() for name in _MAPPED.findall((process / "maps").read_bytes()))
    return names


_CHUNK = 1 << 20

_evictor = Evictor()


class DamagedObject(UserError):
    """The bytes of an object are not those of its hash."""


def local_copy(path: AnyPath, sha256: str, *, anew: bool = False) -> Path:
    """Return the file itself, or a copy of the object, whose hash is checked while it is loaded.

    Processes of one machine that want the same object load it once. With `anew` it is loaded even where a copy is
    there, so that the object is known to be right. The copy stays for a minute at least, for the caller to open it.
    Raises FileNotFoundError, and DamagedObject when the object's bytes are not those of `sha256`.
    """
    if isinstance(path, Path):
        return path
    copy = _place(sha256)
    if not anew and _is_used(copy):
        return copy
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(copy.parent / ".lock"):
            if anew or not copy.exists():
                _load_with_room(path, sha256, copy)
                _evictor.loaded(copy)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot write to the cache {copy.parent}: {error.strerror}; {OTHER_CACHE}") from None
    return copy


class CopiesAhead:
    """Copies objects that will be wanted, at most 16 at a time. The reader of an object tries again where that failed."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(AT_ONCE, "prefetch", initializer=give_up_when, initargs=(self._closed,))

    def begin(self, objects: Iterable[tuple[AnyPath, str]]) -> list[Future]:
        """Begin to copy objects, given as (path, sha256); returns at once."""
        return [self._pool.submit(_fetch, path, sha256) for path, sha256 in objects if isinstance(path, RemotePath)]

    def close(self) -> None:
        """Wait for the copies that are under way. What waits for its turn is not copied, and no request is repeated."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._closed.set()
        self._pool.shutdown()


def drop_damaged(hashes: Iterable[str]) -> None:
    """Remove those of these copies whose bytes have changed. Copies that are known to be right are not read."""
    known = {f"{sha256[:2]}/{sha256}": sha256 for sha256 in hashes}
    there = {name: sha256 for name, sha256 in known.items() if (cache_folder() / name).exists()}
    for name in find_changed(cache_folder(), there) if there else ():
        (cache_folder() / name).unlink(missing_ok=True)


def _place(sha256: str) -> Path:
    return cache_folder() / sha256[:2] / sha256


def _is_used(copy: Path) -> bool:
    """Return whether the copy is there, which now counts as used. Its time of change stays that of its content."""
    try:
        os.utime(copy, ns=(time.time_ns(), copy.stat().st_mtime_ns))
    except OSError:
        return copy.exists()  # that of somebody else, which cannot be touched
    return True


def _fetch(path: RemotePath, sha256: str) -> None:
    with suppress(UserError, FileNotFoundError):
        local_copy(path, sha256)


def _load_with_room(path: RemotePath, sha256: str, copy: Path) -> None:
    """Load a copy. If the disk is full, remove older copies, once."""
    try:
        _load(path, sha256, copy)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _evictor.make_room()
        _load(path, sha256, copy)


def _load(path: RemotePath, sha256: str, copy: Path) -> None:
    """Load a copy under the lock, and overwrite what an earlier process left half-done."""
    temporary = copy.with_name(TEMPORARY_PREFIX + copy.name)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as source, create(temporary) as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
        if digest.hexdigest() != sha256:
            raise DamagedObject(f"{path} is damaged: its hash is not the one in index.json; run tree-attention preprocess again")
        os.replace(temporary, copy)
    finally:
        temporary.unlink(missing_ok=True)
