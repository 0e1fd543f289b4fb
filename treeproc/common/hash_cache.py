"""Notes of files that were read and had their hash, so that the next command need not read them again.

A note holds for a file of the same name, size, time of change and, on a disk, the same inode. It trusts the disk: a bit that rots
without a new time is found by `python -m treeproc.verify` alone, which reads everything. Notes lie in the cache folder of the
user. A data set keeps its bytes, may be read-only, and a copy of it brings no notes of somebody else.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from treeproc.common.errors import UserError
from treeproc.common.files import atomic_write, file_sha256, private_folder
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.common.store_requests import in_parallel

logger = logging.getLogger(__name__)

# Times of files have steps: a file that changed just now may change again and keep its time.
SETTLED_NS = 2_000_000_000

Stamp = tuple[int, int, int]  # bytes, time of change in nanoseconds, inode
# Yields the sha256 of each file of a folder, given with its bytes, in order; None for one that cannot be read.
HashFiles = Callable[[AnyPath, Mapping[str, int]], Iterable[str | None]]


def file_stamp(path: Path) -> Stamp:
    """Return the stamp of a file. Raises FileNotFoundError."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def stamps(folder: AnyPath, names: Iterable[str]) -> dict[str, Stamp]:
    """Return the stamps of those files that are there. Objects are listed, in one go, and have inode 0."""
    if isinstance(folder, RemotePath):
        listed = folder.listing()
        return {name: (*listed[name], 0) for name in names if name in listed}
    found = {}
    for name in names:
        try:
            found[name] = file_stamp(folder / name)
        except OSError:
            continue
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
            logger.warning("cannot record which hashes were checked, so the next command checks them again: %s", error)
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
