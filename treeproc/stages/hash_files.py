"""Hashes of many files, by tasks that each read some of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from treeproc.common.hash_cache import HashFiles, hash_here, sha256_of
from treeproc.common.storage import AnyPath
from treeproc.common.store_requests import in_parallel
from treeproc.stages.run_jobs import Jobs, Run, in_number_order

# Below, Ray takes longer to start than the threads of one process to hash.
LEAST_BYTES = 8 << 30
# Bytes of a job: a task of a second or two, where the storage gives as much as a core hashes.
JOB_BYTES = 1 << 30
_FILES_AT_ONCE = 4


def hasher(run: Run) -> HashFiles:
    """Return what hashes many bytes by jobs that `run` runs, and few by threads of this process."""

    def hash_files(folder: AnyPath, sizes: Mapping[str, int]) -> Iterable[str | None]:
        if sum(sizes.values()) < LEAST_BYTES:
            return hash_here(folder, sizes)
        results = run(HashNames, {"folder": folder}, Jobs(list(_groups(sizes)), lambda names: {"names": names}))
        return (sha256 for some in in_number_order(results) for sha256 in some)

    return hash_files


class HashNames:
    """Hashes files of a folder."""

    def __init__(self, folder: AnyPath):
        self._folder = folder

    def __call__(self, names: Sequence[str]) -> list[str | None]:
        """Return the sha256 of each file; None for one that cannot be read."""
        return list(in_parallel(lambda name: sha256_of(self._folder / name), names, _FILES_AT_ONCE))


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the names in groups of neighbours that have JOB_BYTES or little more together."""
    group, left = list[str](), JOB_BYTES
    for name, size in sizes.items():
        group.append(name)
        left -= size
        if left <= 0:
            yield group
            group, left = [], JOB_BYTES
    if group:
        yield group
