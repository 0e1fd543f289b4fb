"""Duplicates by hash partition: equal keys lie in one partition, so that each partition is sorted by itself."""

from collections.abc import Sequence
from typing import IO

import numpy as np

from treeproc.stages.example_keys import KEY_BYTES

# Keys of a partition, on average: about 300 MiB of a task while they are sorted.
_PARTITION_KEYS = 4 << 20
# Fewer keys have smaller partitions, so that several tasks sort them.
_FEW_PARTITIONS, _LEAST_KEYS = 8, 1 << 19


def later_duplicates(keys: bytes | bytearray | np.ndarray) -> np.ndarray:
    """Return for every key of 16 bytes whether an earlier one is equal. 10 million take about half a GB for a moment."""
    halves = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal keys stay in the order of the input
    duplicate = np.zeros(len(order), dtype=bool)
    equal = (halves[order[1:], 0] == halves[order[:-1], 0]) & (halves[order[1:], 1] == halves[order[:-1], 1])
    duplicate[order[1:][equal]] = True
    return duplicate


def number_of_partitions(keys: int) -> int:
    """Return the number of partitions of so many keys."""
    return max(1, -(-keys // _PARTITION_KEYS), min(_FEW_PARTITIONS, keys // _LEAST_KEYS))


def write_parts(file: IO[bytes], keys: bytes | bytearray, partitions: int) -> None:
    """Write keys of a block by partition, in the order of the block: edges [partitions + 1], keys, their numbers in the block."""
    halves = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
    partition = ((halves[:, 0] >> np.uint64(32)) * np.uint64(partitions)) >> np.uint64(32)
    order = np.argsort(partition.astype(np.uint32), kind="stable")
    edges = np.zeros(partitions + 1, dtype=np.int64)
    np.cumsum(np.bincount(partition.astype(np.int64), minlength=partitions), out=edges[1:])
    for array in (edges, halves[order], order.astype(np.uint32)):
        file.write(array.tobytes())


def read_part(file: IO[bytes], partition: int, partitions: int) -> tuple[np.ndarray, np.ndarray]:
    """Read keys [n, 2] of one partition of a block, and their numbers in the block [n]."""
    edges = _read(file, 0, np.int64, partitions + 1)
    start, stop, begin = int(edges[partition]), int(edges[partition + 1]), edges.nbytes
    keys = _read(file, begin + KEY_BYTES * start, np.uint64, 2 * (stop - start)).reshape(-1, 2)
    return keys, _read(file, begin + KEY_BYTES * int(edges[-1]) + 4 * start, np.uint32, stop - start)


def _read(file: IO[bytes], offset: int, dtype: type, count: int) -> np.ndarray:
    file.seek(offset)
    return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype, count)


def duplicates_of(parts: Sequence[tuple[np.ndarray, np.ndarray]], first_ids: Sequence[int]) -> np.ndarray:
    """Return ascending ids of the examples of one partition that an earlier one equals; `parts` are the blocks' in order."""
    if not parts:
        return np.zeros(0, dtype=np.int64)
    ids = np.concatenate([first + rows.astype(np.int64) for (_, rows), first in zip(parts, first_ids, strict=True)])
    return np.sort(ids[later_duplicates(np.ascontiguousarray(np.concatenate([keys for keys, _ in parts])))])
