"""Trees by level, for recursive cells. All nodes of a batch whose children are computed are computed at once.

Shapes: B batch, L leaves, N nodes, W words, S = L + N positions (leaves, then nodes in pre-order), M nodes of all trees. States
are in one table. Row 0 is zeros, the state of an absent child. The states of real positions follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.structure.base import SpanTable, Structure, expand, pad
from treeproc.common.errors import UserError


@dataclass
class TreeLevels(Structure):
    """Binary trees, by height. If a node has one child, it is the left one."""

    leaf: Tensor  # [leaves] flat position in [B, L] of every real leaf; leaf r has row 1 + r
    children: Tensor  # [M, 2] rows of the left and the right child of every node, in the order of levels; 0 means no child
    edges: list[int]  # first node of every level, and M
    row: Tensor  # [B, S] row of every position, 0 for padding
    root: Tensor  # [B, S] bool, True for roots: one position, or several for trees side by side
    num_leaves: int  # L

    @classmethod
    def build(cls, table: SpanTable) -> "TreeLevels":
        """Build the levels. Raises UserError for a node with more than two children."""
        batch, num_nodes = table.start.shape
        real = np.flatnonzero(~table.node_pad_mask)
        left, right = _binary_children(table, real)  # positions in [B, S]; -1 means no child
        positions = table.num_leaves + num_nodes
        tree, index = np.divmod(real, num_nodes)
        place = tree * positions + table.num_leaves + index
        height = np.zeros(batch * positions + 1, dtype=np.int64)  # the last place is for -1
        _raise_heights(height, np.concatenate([place, place]), np.concatenate([left, right]))
        order = np.argsort(height[place], kind="stable")
        leaf = np.flatnonzero(~table.leaf_pad_mask)
        row = np.zeros(batch * positions + 1, dtype=np.int64)
        row[leaf + leaf // table.num_leaves * num_nodes] = 1 + np.arange(len(leaf))
        row[place[order]] = 1 + len(leaf) + np.arange(len(order))
        children = row[np.stack([left, right], axis=1)[order]]
        edges = [0, *np.cumsum(np.bincount(height[place])[1:]).tolist()]
        row = row[:-1].reshape(batch, -1)
        is_root = np.ones(1 + len(leaf) + len(order), dtype=bool)
        is_root[0] = is_root[children.ravel()] = False
        return cls(
            leaf=torch.from_numpy(leaf),
            children=torch.from_numpy(children),
            edges=edges,
            row=torch.from_numpy(row),
            root=torch.from_numpy(is_root[row]),
            num_leaves=table.num_leaves,
        )


def _binary_children(table: SpanTable, real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat positions in [B, S] of the children of the nodes `real` (flat in [B, N]); -1 means no child."""
    start, end, subtree_end = (x.ravel() for x in (table.start, table.end, table.subtree_end))
    num_nodes = table.num_nodes
    tree, index = np.divmod(real, num_nodes)
    base = tree * num_nodes

    def child(first_leaf: np.ndarray, node: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the child that begins at a leaf: its position, and the ends of its span and subtree.

        `node` is the next node in pre-order.
        """
        within = node < subtree_end[real]
        at = np.where(within, base + node, real)
        is_node = within & (start[at] == first_leaf)
        place = np.where(is_node, table.num_leaves + node, first_leaf)
        stop, last = np.where(is_node, end[at], first_leaf + 1), np.where(is_node, subtree_end[at], node)
        return tree * (table.num_leaves + num_nodes) + place, stop, last

    left, middle, next_node = child(start[real], index + 1)
    right, stop, last = child(middle, next_node)
    single = middle == end[real]
    right = np.where(single, -1, right)
    stop, last = np.where(single, middle, stop), np.where(single, next_node, last)
    wrong = np.flatnonzero((stop != end[real]) | (last != subtree_end[real]))
    if len(wrong):
        raise UserError(
            f"tree {tree[wrong[0]]} of the batch, node {index[wrong[0]]}: must have at most two children for a binary Tree-LSTM; "
            "encode the data with tree.binarize: right (or left)"
        )
    return left, right


@dataclass
class ArcLevels(Structure):
    """Dependency trees of words, by height. If a text has several roots, one further node governs them all."""

    word: Tensor  # [B, L] flat position in [B, W + 1] of the word of every leaf; padding goes to the last place of its row
    pieces: Tensor  # [B, W + 1] leaves of every word, at least 1
    place: Tensor  # [M] flat position in [B, W + 1] of every node, in the order of levels; position W governs several roots
    child: Tensor  # [A] node, in that order, at the lower end of every arc
    governor: Tensor  # [A] and at the upper end, ascending
    edges: list[int]  # first node of every level, and M
    arc_edges: list[int]  # first arc of every level's governors, and A
    row: Tensor  # [B, W + 1] 1 + node of every place, 0 for padding
    root: Tensor  # [B] place of the root in [W + 1]
    span: Tensor  # [B, W + 1, 2] first leaf below a position and one past the last; 0, 0 if other leaves are between them

    @property
    def pad_mask(self) -> Tensor:
        """Return [B, W + 1], True = padding."""
        return self.row == 0

    @classmethod
    def build(cls, word_of_leaf: Sequence[np.ndarray], governors: Sequence[np.ndarray]) -> "ArcLevels":
        """Build from `word_of_leaf[b]` [L_b], ascending, and `governors[b]` [W_b], counted from 0 with -1 for roots.

        Raises UserError for a cycle of arcs, and ValueError for other numbers of trees.
        """
        batch, width = len(governors), max(1, *map(len, governors)) + 1
        if len(word_of_leaf) != batch:
            raise ValueError(f"words of leaves and governors need the same trees, but are of {len(word_of_leaf)} and {batch}")
        tree, word, _ = expand(np.array([len(row) for row in governors]))
        governor = np.concatenate(governors).astype(np.int64)
        is_root = governor < 0
        num_roots = np.bincount(tree[is_root], minlength=batch)
        place = tree * width + word
        joined = np.flatnonzero(num_roots != 1)
        root = np.full(batch, width - 1)
        alone = is_root & (num_roots == 1)[tree]
        root[tree[alone]] = word[alone]
        kept = ~alone
        upper = tree[kept] * width + np.where(is_root, width - 1, governor)[kept]
        lower = place[kept]
        height = np.zeros(batch * width, dtype=np.int64)
        _raise_heights(height, upper, lower)
        places = np.concatenate([place, joined * width + width - 1])
        order = np.argsort(height[places], kind="stable")
        places = places[order]
        row = np.zeros(batch * width, dtype=np.int64)
        row[places] = 1 + np.arange(len(places))
        by_governor = np.argsort(row[upper], kind="stable")
        upper, lower = upper[by_governor], lower[by_governor]
        sizes = np.bincount(height[places])
        arcs = np.bincount(height[upper], minlength=len(sizes))

        leaf_place = np.arange(batch)[:, None] * width + pad(word_of_leaf, width - 1)[0]
        span, pieces = _spans(word_of_leaf, width, upper, lower, height)
        return cls(
            word=torch.from_numpy(leaf_place),
            pieces=torch.from_numpy(pieces),
            place=torch.from_numpy(places),
            child=torch.from_numpy(row[lower] - 1),
            governor=torch.from_numpy(row[upper] - 1),
            edges=[0, *np.cumsum(sizes).tolist()],
            arc_edges=[0, *np.cumsum(arcs).tolist()],
            row=torch.from_numpy(row.reshape(batch, width)),
            root=torch.from_numpy(root),
            span=torch.from_numpy(span),
        )


def _spans(
    word_of_leaf: Sequence[np.ndarray], width: int, upper: np.ndarray, lower: np.ndarray, height: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the leaves below every position, [B, W + 1, 2], and the number of leaves at it, at least 1, [B, W + 1]."""
    batch = len(word_of_leaf)
    flat = np.concatenate([b * width + words for b, words in enumerate(word_of_leaf)]).astype(np.int64)
    leaf = np.concatenate([np.arange(len(words)) for words in word_of_leaf])
    own = np.bincount(flat, minlength=batch * width)
    count, far = own.copy(), len(leaf)
    first, last = np.full(batch * width, far), np.zeros(batch * width, dtype=np.int64)
    np.minimum.at(first, flat, leaf)
    np.maximum.at(last, flat, leaf + 1)
    for level in range(1, int(height.max(initial=0)) + 1):  # a position is done when all positions below it are done
        here = height[upper] == level
        np.minimum.at(first, upper[here], first[lower[here]])
        np.maximum.at(last, upper[here], last[lower[here]])
        np.add.at(count, upper[here], count[lower[here]])
    contiguous = (last - first == count) & (count > 0)
    span = np.where(contiguous[:, None], np.stack([first, last], axis=1), 0)
    return span.reshape(batch, width, 2), np.maximum(own, 1).reshape(batch, width)


def _raise_heights(height: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> None:
    """Raise the heights of upper ends of arcs [A] in place: each is one more than the highest below."""
    for _ in range(len(height) + 1):
        above = height[lower] + 1
        low = height[upper] < above
        if not low.any():
            return
        np.maximum.at(height, upper[low], above[low])
    raise UserError("arcs must form trees, but form a cycle; parse the data again")
