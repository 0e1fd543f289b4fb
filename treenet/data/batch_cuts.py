"""Costs of examples, and where a list of ascending costs is cut into batches within a budget."""

from collections.abc import Mapping

import numpy as np

from treeproc.common.errors import check_choice
from treeproc.shards.lengths import Column


def example_costs(lengths: Mapping[str, np.ndarray | Column], budget_counts: str = "leaves") -> np.ndarray:
    """Return the padded positions of one row [n]: the longer of the source and the target with BOS or EOS."""
    check_choice("budget_counts", budget_counts, ("leaves", "leaves_and_nodes"))
    source = np.asarray(lengths["leaves"])
    if budget_counts == "leaves_and_nodes":
        source = source + np.asarray(lengths["nodes"])
    return np.maximum(source, np.asarray(lengths["tgt_pieces"]) + 1)


def cut_batches(sorted_costs: np.ndarray, max_tokens: int) -> np.ndarray:
    """Return the starts of batches [num_batches + 1] over ascending costs: width * count <= max_tokens.

    An example that is longer than the budget gets a batch alone.
    """
    begins = np.flatnonzero(np.diff(sorted_costs, prepend=sorted_costs[:1] - 1)) if len(sorted_costs) else np.zeros(0, np.int64)
    return cut_runs(sorted_costs[begins], np.diff(begins, append=len(sorted_costs)), max_tokens)


def cut_runs(costs: np.ndarray, counts: np.ndarray, max_tokens: int) -> np.ndarray:
    """Run `cut_batches` on costs [k] that ascend and occur `counts` [k] times each. The time does not grow with the counts."""
    starts, end, in_batch = [np.zeros(1, dtype=np.int64)], 0, 0  # `in_batch` rows so far are in the last batch
    for cost, count in zip(costs.tolist(), counts.tolist(), strict=True):
        most = max(1, max_tokens // max(1, cost))  # rows of a batch whose widest row has this cost
        if in_batch:
            taken = min(count, max(0, most - in_batch))
            in_batch, end, count = in_batch + taken, end + taken, count - taken
            if count:
                starts.append(np.array([end]))
        if count:
            full = (count - 1) // most  # the last batch may go on with the next cost
            starts.append(end + most * np.arange(1, full + 1))
            in_batch, end = count - full * most, end + count
    if end:
        starts.append(np.array([end]))
    return np.concatenate(starts).astype(np.int64)


def batch_widths(costs: np.ndarray, counts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the highest cost [num_batches] in each batch of `cut_runs`."""
    return costs[np.searchsorted(np.cumsum(counts), starts[1:] - 1, side="right")].astype(np.int64)
