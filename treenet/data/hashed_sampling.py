"""Draws that depend on ids alone: hashes of examples, and shares of a data set that nest."""

import numpy as np

from treeproc.shards.lengths import SizeCounts

_AT_ONCE = 1 << 20  # ids that are hashed together: temporary arrays are several times as large


def hash_ids(example_ids: np.ndarray) -> np.ndarray:
    """Compute splitmix64 of the ids as uint64 [n]: spread evenly, the same on every machine and in every run."""
    with np.errstate(over="ignore"):
        mixed = example_ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def choose_fraction(example_ids: np.ndarray, fraction: float, seed: int | None = None) -> np.ndarray:
    """Choose about `fraction` of the examples [n]; a smaller fraction chooses a subset of a larger one with the same `seed`.

    Two seeds draw independently of each other; None draws the same for all runs.
    """
    if fraction >= 1:
        return np.ones(len(example_ids), dtype=bool)
    return _seeded(example_ids, seed) < np.uint64(int(fraction * 2**64))


def share_of_cells(counts: SizeCounts, fraction: float, window: int, seed: int | None = None) -> np.ndarray:
    """Return the rows [cells] that a share of a window takes of each size: floor(fraction * rows + u), u of a hash in [0, 1).

    So the batches of a share are known from the counts alone. Smaller fractions take at most as many of each.
    """
    if fraction >= 1:
        return counts.rows
    sizes = hash_ids(counts.leaves << 32 | counts.tgt_pieces)
    hashes = _seeded(sizes ^ hash_ids(np.array([window])), seed)
    u = (hashes >> np.uint64(11)) / 2.0**53
    return np.floor(fraction * counts.rows + u).astype(np.int64)


def choose_in_cells(
    leaves: np.ndarray, tgt_pieces: np.ndarray, example_ids: np.ndarray, fraction: float, window: int, seed: int | None = None
) -> np.ndarray:
    """Choose the share [n] of the rows of a window: the rows with the smallest hashes of each size, `share_of_cells` many.

    A smaller fraction chooses a subset of a larger one with the same `seed`.
    """
    if fraction >= 1:
        return np.ones(len(leaves), dtype=bool)
    order = np.argsort(_seeded(example_ids, seed), kind="stable")
    width = int(tgt_pieces.max(initial=0)) + 1
    keys = leaves.astype(np.int64) * width + tgt_pieces
    if len(keys) and keys.max() <= np.iinfo(np.int32).max:
        keys = keys.astype(np.int32)  # half of the memory to sort
    order = order[np.argsort(keys[order], kind="stable")]  # by size, then by hash: the order of cells in SizeCounts
    counts = SizeCounts.of(leaves, tgt_pieces, np.zeros(len(leaves), dtype=np.int8))
    taken = share_of_cells(counts, fraction, window, seed)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts.rows) - counts.rows, counts.rows)  # of a row in its cell
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[place < np.repeat(taken, counts.rows)]] = True
    return chosen


def _seeded(ids: np.ndarray, seed: int | None) -> np.ndarray:
    out = np.empty(len(ids), dtype=np.uint64)
    for start in range(0, len(ids), _AT_ONCE):
        hashes = hash_ids(ids[start : start + _AT_ONCE])
        out[start : start + _AT_ONCE] = hashes if seed is None else hash_ids(hashes ^ hash_ids(np.array([seed])))
    return out


def keys_of_examples(example_ids: np.ndarray, *numbers: int) -> np.ndarray:
    """Make a key uint64 [n] for the draws of each example from its id and the numbers: seed, epoch, purpose of the draws."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = hash_ids(key ^ np.uint64(number))
    return hash_ids(hash_ids(example_ids) ^ key)


def keys_of_parts(keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Make a key uint64 for each part of examples with `counts` [n] parts, from their keys [n] and the part's number."""
    ends = np.cumsum(counts)
    numbers = np.arange(counts.sum()) - np.repeat(ends - counts, counts)
    return hash_ids(np.repeat(keys, counts) + numbers.astype(np.uint64))
