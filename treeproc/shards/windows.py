"""Windows: runs of consecutive shards, in which rows are shuffled, batched, or exchanged."""

import numpy as np

from treeproc.shards.ragged import edges_of


def window_bounds(shard_rows: np.ndarray, window_rows: int) -> np.ndarray:
    """Return the first shards of windows, and the number of shards [windows + 1]. There is one window where all rows fit.

    The n rows have ceil(n / window_rows) windows of about the same size, which end where a shard ends: they may be larger
    by half a shard. A shard that is larger than a window is a window alone.
    """
    edges = edges_of(shard_rows)
    windows = max(1, -(-int(edges[-1]) // window_rows))
    wanted = edges[-1] * np.arange(1, windows) // windows
    after = np.searchsorted(edges, wanted)
    before = np.maximum(0, after - 1)
    nearest = np.where(wanted - edges[before] <= edges[after] - wanted, before, after)
    nearest = np.searchsorted(edges, edges[nearest])  # shards without rows make no difference
    inside = nearest[(edges[nearest] > 0) & (edges[nearest] < edges[-1])]
    return np.unique(np.concatenate([[0], inside, [len(shard_rows)]]))
