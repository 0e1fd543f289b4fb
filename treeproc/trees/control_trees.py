"""Control trees: trees over the same words that do not come from a parser. They are baselines for claims about syntax.

All nonterminals have one label, so a control differs from a parse only in the tree. All trees of a batch are cut at once, with
one step of numpy per level.
"""

from typing import Literal

import numpy as np

from treeproc.common.arguments import check_choice
from treeproc.shards.ragged import edges_of

ControlTree = Literal["balanced", "left", "right", "flat", "random"]


def control_spans(kind: ControlTree, lengths: np.ndarray, ids: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends [N] of the nodes of one tree per row, in pre-order, over the words of all rows side by side.

    balanced, left, right and random are binary: n - 1 nodes over n words, one node over one word, no node over no word. A random
    tree draws every split point uniformly. The draw depends only on `seed`, the row's id in `ids` [rows] and the span. Raises
    UserError for another kind.
    """
    check_choice("kind", kind, ControlTree)
    edges = edges_of(lengths)
    first, keys = edges[:-1], hash_examples(ids, seed)
    row = np.flatnonzero(lengths)
    start, end = np.zeros(len(row), dtype=np.int64), lengths[row].astype(np.int64)
    levels: list[np.ndarray] = [np.zeros((2, 0), dtype=np.int64)]
    while len(row):
        levels.append(np.stack([first[row] + start, first[row] + end]))
        if kind == "flat":
            break
        middle = _middles(kind, keys[row], start, end)
        row, start, end = np.tile(row, 2), np.concatenate([start, middle]), np.concatenate([middle, end])
        wide = end - start > 1
        row, start, end = row[wide], start[wide], end[wide]
    starts, ends = np.concatenate(levels, axis=1)
    order = np.lexsort((-ends, starts))
    return starts[order], ends[order]


def hash_examples(ids: np.ndarray, seed: int) -> np.ndarray:
    """Return a pseudo-random 64-bit number for every example id and the seed."""
    return _mixed(_mixed(np.full(len(ids), seed % 2**64, dtype=np.uint64)) + ids.astype(np.uint64))


def _middles(kind: ControlTree, keys: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the cut positions of spans of two words or more. A single word has no node, and its value is ignored."""
    if kind == "balanced":
        return (start + end) // 2
    if kind == "left":
        return end - 1
    if kind == "right":
        return start + 1
    draw = _mixed(keys + (start.astype(np.uint64) << np.uint64(32)) + end.astype(np.uint64)) >> np.uint64(32)
    choices = np.maximum(end - start - 1, 0).astype(np.uint64)
    return start + 1 + (draw * choices >> np.uint64(32)).astype(np.int64)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of every number: the output function of SplitMix64, which gives pseudo-random 64 bits."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
