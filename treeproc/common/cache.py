"""Local copies of objects: data sets in an object store are read by memory map like those on disk.

A copy is named by the hash of its content, so it is never out of date, and the same shard under two names is one copy.
The folder (`TREE_ATTENTION_CACHE`, else ~/.cache/tree-attention) may be deleted whenever no process begins to read from it. When
there are more bytes than `TREE_ATTENTION_CACHE_GB`, the copies that were used longest ago are removed.

A copy stays if it was asked for within the last minute: a process is about to open it. A copy that a process of this machine has
mapped stays too, since its removal would free no byte. In a container whose processes are not seen here such a copy may go. Its
reader loses nothing: on Linux a mapped or open file lives until it is closed.
"""

import errno
import functools
import hashlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from treeproc.common.errors import UserError, quoted
from treeproc.common.files import TEMPORARY_PREFIX, cache_folder, create, file_lock
from treeproc.common.hash_cache import find_changed
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.common.store_requests import AT_ONCE

logger = logging.getLogger(__name__)

LIMIT = "TREE_ATTENTION_CACHE_GB"
_FOLDER = re.compile("[0-9a-f]{2}")
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
                    "the cache %s is too small: processes read %.1f GB within a minute, but its limit is %.1f GB (%s)",
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
    for folder in _folders():
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if _COPY.fullmatch(entry.name):
                        found.append(_Copy(status.st_atime_ns, status.st_size, Path(entry.path)))
                    elif entry.name.startswith(TEMPORARY_PREFIX) and status.st_mtime < time.time() - _TEMPORARY_S:
                        _remove_temporary(Path(entry.path))
    return found


def _folders() -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(cache_folder()) as entries:
        yield from (Path(entry.path) for entry in entries if _FOLDER.fullmatch(entry.name))


def _remove_temporary(path: Path) -> None:
    with (
        suppress(BlockingIOError),
        file_lock(path.parent / ".lock", wait=False),
    ):  # the process that holds it may be writing the file
        path.unlink(missing_ok=True)


def _evict(found: list[_Copy], limit: int) -> int:
    """Remove copies, the one used longest ago first, until `limit` bytes are left; returns the bytes that are left."""
    left = sum(copy.size for copy in found)
    if left <= limit:
        return left
    mapped, used_now = _mapped(), time.time_ns() - _JUST_USED_NS
    for copy in sorted(found):
        if left <= limit or copy.used_ns > used_now:
            break
        if copy.path.name not in mapped:
            copy.path.unlink(missing_ok=True)
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
        raise UserError(
            f"cannot write to the cache {copy.parent}: {error.strerror}; set TREE_ATTENTION_CACHE to another folder"
        ) from None
    return copy


def prefetch(objects: Iterable[tuple[AnyPath, str]]) -> list[Future]:
    """Begin to copy objects, given as (path, sha256), that will be wanted; returns at once.

    At most 16 are under way. An error is left to the reader of the object, which tries again and raises it. A future that is
    cancelled before its turn copies nothing.
    """
    return [_pool().submit(_fetch, path, sha256) for path, sha256 in objects if isinstance(path, RemotePath)]


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


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="prefetch")


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
            raise DamagedObject(f"{path} is damaged: its hash is not the one in index.json; run workflows/preprocess.py again")
        os.replace(temporary, copy)
    finally:
        temporary.unlink(missing_ok=True)
