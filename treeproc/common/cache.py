"""Local copies of objects: data sets in an object store are read by memory map like those on disk.

A copy is named by the hash of its content, so it is never out of date, and the same shard under two names is one copy.
The folder (`TREE_ATTENTION_CACHE`, else ~/.cache/tree-attention) may be deleted whenever no process begins to read from it. When
there are more bytes than `TREE_ATTENTION_CACHE_GB`, the copies that were used longest ago are removed (`cache_eviction`).
"""

import errno
import functools
import hashlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from treeproc.common.cache_eviction import Evictor
from treeproc.common.errors import UserError
from treeproc.common.files import TEMPORARY_PREFIX, cache_folder, create, file_lock
from treeproc.common.hash_cache import find_changed
from treeproc.common.parallel import AT_ONCE
from treeproc.common.storage import AnyPath, RemotePath

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
