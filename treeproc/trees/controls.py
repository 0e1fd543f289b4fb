"""Control trees: trees over the words of a sentence that keep only a part of what a parser says. They are baselines.

Trees without a parser (`control_spans`) have one label at all nodes. The others are made of the parser's trees: without their
labels, with permuted labels, or with the labels on another shape.

Shapes: T trees, N nodes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from treeproc.common.errors import check_choice
from treeproc.shards.rows import edges_of, hash_ids
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNANALYSED
from treeproc.trees.flat_trees import BINARY_PREFIX, FlatTrees

ControlTree = Literal["balanced", "left", "right", "flat", "random"]


def control_spans(kind: str, lengths: np.ndarray, ids: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
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
    return hash_ids(hash_ids(np.full(len(ids), seed % 2**64, dtype=np.uint64)) + ids.astype(np.uint64))


def _middles(kind: str, keys: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the cut positions of spans of two words or more. A single word has no node, and its value is ignored."""
    if kind == "balanced":
        return (start + end) // 2
    if kind == "left":
        return end - 1
    if kind == "right":
        return start + 1
    draw = hash_ids(keys + (start.astype(np.uint64) << np.uint64(32)) + end.astype(np.uint64)) >> np.uint64(32)
    choices = np.maximum(end - start - 1, 0).astype(np.uint64)
    return start + 1 + (draw * choices >> np.uint64(32)).astype(np.int64)


def hide_labels(trees: FlatTrees) -> FlatTrees:
    """Return the trees with the label X at all nodes except the roots of split words, and nodes that binarise these."""
    return replace(trees, names=hidden_names(trees.names))


def hidden_names(names: Sequence[str]) -> list[str]:
    """Return the labels that `hide_labels` puts in the place of these."""
    return [name if name.removeprefix(BINARY_PREFIX).startswith(SPLIT_WORD_PREFIX) else UNANALYSED for name in names]


def permute_labels(trees: FlatTrees, keys: np.ndarray) -> FlatTrees:
    """Return the trees with the labels of every tree permuted among its nodes except the root, by uniform `keys` [N]."""
    is_root = trees.parents() < 0
    tree, inner = np.cumsum(is_root), np.flatnonzero(~is_root)
    labels = trees.labels.copy()
    labels[inner] = trees.labels[inner[np.lexsort((keys[inner], tree[inner]))]]
    return replace(trees, labels=labels)


def put_labels(trees: FlatTrees, shapes: FlatTrees, keys: np.ndarray) -> FlatTrees:
    """Return the shapes with the labels of `trees` in pre-order.

    Both have T trees with one root each. A shape has at least as many nodes as its tree. It loses the surplus ones: the nodes of
    the smallest uniform `keys` [N of shapes], never the root. Children of a lost node become children of its parent.
    """
    is_root = shapes.parents() < 0
    tree = np.cumsum(is_root) - 1  # the number of the tree of every node [N]
    surplus = np.bincount(tree) - np.bincount(np.cumsum(trees.parents() < 0) - 1)
    if surplus.any():
        order = np.lexsort((keys, is_root, tree))
        rank = np.arange(len(order)) - edges_of(np.bincount(tree))[tree]  # `order` has the trees one after the other, as `tree`
        kept = np.ones(len(order), dtype=bool)
        kept[order[rank < surplus[tree]]] = False
        shapes = shapes.keep(kept)
    return replace(shapes, labels=trees.labels, names=trees.names)


def hash_parts(ids: np.ndarray, edges: np.ndarray, seed: int) -> np.ndarray:
    """Return a pseudo-random 64-bit number for every part of an example, from the seed, the example id and the part's place.

    Example r has parts [edges[r], edges[r + 1]).
    """
    counts = np.diff(edges)
    place = np.arange(edges[-1]) - np.repeat(edges[:-1], counts)
    return hash_ids(np.repeat(hash_examples(ids, seed), counts) + place.astype(np.uint64))
