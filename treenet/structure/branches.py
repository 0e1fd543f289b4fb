"""What hierarchical accumulation needs of the trees: their branches and subtrees as lists.

Shapes: B batch, L leaves, N nodes, S = L + N positions, P branches, Q pairs of a node and a node of its subtree, H the
largest height. A branch (i, j) is a node i and a leaf j of its span; the nodes on it are V_j^i of the paper. Branches
and pairs are ordered by node i, then by leaf or node. Both lists are as long as the spans and subtrees together: about
n log n for a parse of n leaves, n^2 / 2 for a chain; nothing here is longer.

Path order is by height, then by leaf, those of most ancestors first: the leaves of height h + 1 are the first ones of
height h, and sums along the paths to the root are sums of neighbouring blocks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.structure.spans import SpanTable, check_nested, expand

# A sparse sum of E entries takes as long as a dense product of about 12 E cells (one CPU thread, D = 512).
SPARSE_BELOW_DENSITY = 1 / 12


def choose_sparse(num_entries: int, num_cells: int) -> bool:
    """Whether to sum P + Q = `num_entries` rows one by one instead of multiplying by matrices [B, N, S] of `num_cells`.

    Sentences fill a fifth of their matrices, documents a hundredth.
    """
    return num_entries < SPARSE_BELOW_DENSITY * num_cells


@dataclass
class BranchMaps:
    """Branches (i, j) and pairs (i, t), all int64. 'Flat' counts through the batch."""

    leaf: Tensor  # [P] flat position of leaf j in [B, S]
    height: Tensor  # [P] |V_j^i|
    length: Tensor  # [P] span length of node i
    first: Tensor  # [B * N] first branch of each node
    on_path: Tensor  # [P] each branch's place in path order
    path_height: Tensor  # [P] |V_j^i| - 1, in path order
    path_rank: Tensor  # [P] |H_j^i| - 1, in path order
    path_depth: Tensor  # [P] proper ancestors of node i, in path order
    path_cell: Tensor  # [P] flat (b, j, |V_j^i| - 1) in [B, L, H], in path order
    level_size: Tensor  # [H] branches of each height
    pair_first: Tensor  # [Q] first branch (i, j) with j under t
    pair_last: Tensor  # [Q] one past the last of them
    num_leaves: int  # B * L
    sparse: bool  # how entries, branches and then pairs, are laid out
    cell: Tensor  # [P + Q] dense: flat cell of each entry in [B, N, S]; sparse: empty
    order: Tensor  # [P + Q] sparse: entries ordered by node; dense: empty, as the next two
    position: Tensor  # [P + Q] flat position in [B, S] of the ordered entries
    first_entry: Tensor  # [B * N] first ordered entry of each node

    @classmethod
    def build(cls, table: SpanTable, sparse: bool | None = None) -> "BranchMaps":
        """`sparse` overrides the choice by size."""
        num_nodes, num_leaves = table.num_nodes, table.num_leaves
        positions = num_nodes + num_leaves
        start, length, depth = table.start.ravel(), table.length.ravel(), table.depth().ravel()
        upper, offset, _ = expand(table.subtree_size.ravel())
        lower = upper + offset
        check_nested(table, upper, lower)
        leaf_depth = table.leaf_depth()
        node, rank, first = expand(length)
        pair_first = first[upper] + start[lower] - start[upper]
        tree, leaf = node // num_nodes, start[node] + rank
        height = leaf_depth[tree, leaf] - depth[node]
        max_height = max(1, int(leaf_depth.max()))

        flat_leaf = tree * num_leaves + leaf
        by_depth = np.empty(leaf_depth.size, dtype=np.int64)
        by_depth[np.argsort(-leaf_depth, axis=None, kind="stable")] = np.arange(leaf_depth.size)
        path_order = np.lexsort((by_depth[flat_leaf], height))
        on_path = np.empty_like(path_order)
        on_path[path_order] = np.arange(len(path_order))
        path_cell = flat_leaf * max_height + height - 1
        paths = (on_path, *(x[path_order] for x in (height - 1, rank, depth[node], path_cell)))
        level_size = np.bincount(height, minlength=max_height + 1)[1:]

        entry_node = np.concatenate([node, upper])
        column = np.concatenate([leaf, num_leaves + lower % num_nodes])
        if sparse is None:
            sparse = choose_sparse(len(entry_node), len(start) * positions)
        empty = np.zeros(0, dtype=np.int64)
        cell = order = position = first_entry = empty
        if sparse:
            order = np.argsort(entry_node, kind="stable")
            position = (entry_node // num_nodes * positions + column)[order]
            sizes = np.bincount(entry_node, minlength=len(start))
            first_entry = np.cumsum(sizes) - sizes
        else:
            cell = entry_node * positions + column
        arrays = (tree * positions + leaf, height, length[node], first, *paths, level_size)
        pairs = (pair_first, pair_first + length[lower])
        entries = (cell, order, position, first_entry)
        return cls(*map(torch.from_numpy, (*arrays, *pairs)), leaf_depth.size, sparse, *map(torch.from_numpy, entries))
