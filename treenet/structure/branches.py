"""Branches and subtrees of the trees, for hierarchical accumulation: index lists, or matrices made from depths.

Shapes: B batch, L leaves, N nodes, S = L + N positions, P branches, Q pairs of a node and a node of its subtree. E = P + Q
entries, R ranks (of matrices: rows of a table of embeddings), V levels.

A branch (i, j) is a leaf j and its ancestors up to node i, the paper's C_j^i. Its nodes are V_j^i. Branches and pairs are ordered
by node i, then by leaf or node. The length of both lists is that of all spans and subtrees together: about n log n for a parse of
n leaves, n^2 / 2 for a chain.

Accelerators get compact trees: spans and depths. The device makes all masks and weights of a batch from them. Index lists have 80
times the bytes, and the accelerator would wait while the host makes them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.structure.base import SpanTable, expand, round_up

# Summing E rows one by one takes as long as a dense product of about 8 E cells (one CPU thread, D = 512).
SPARSE_BELOW_DENSITY = 1 / 8
# Horizontal rows are summed along paths, not listed one by one, from this mean branch length: in chains of 50 and more.
PATHS_FROM_HEIGHT = 16


def choose_sparse(num_entries: int, num_cells: int) -> bool:
    """Choose whether to sum `num_entries` = P + Q rows one by one instead of multiplying matrices [B, N, S] of `num_cells`.

    Sentences of 50 positions fill a quarter of their matrices, sentences of 200 a twelfth, and documents a hundredth.
    """
    return num_entries < SPARSE_BELOW_DENSITY * num_cells


@dataclass
class EntryOrder:
    """Entries in the order of their sums."""

    entry: Tensor  # [E] index of the entry
    source: Tensor  # [E] flat position that the ordered entry reads
    first: Tensor  # [groups] first ordered entry of each sum

    @classmethod
    def build(cls, group: np.ndarray, source: np.ndarray, num_groups: int) -> "EntryOrder":
        """Order entries by `group` [E], the sum of each entry. `source` [E] is the position that it reads."""
        entry = np.argsort(group, kind="stable")
        sizes = np.bincount(group, minlength=num_groups)
        return cls(*map(torch.from_numpy, (entry, source[entry], np.cumsum(sizes) - sizes)))


@dataclass
class Entries:
    """Branches, then pairs, as the entries of a matrix from positions to nodes. Matrices or single rows are summed."""

    num_nodes: int  # N
    node: Tensor  # [E] flat position in [B, S] of node i
    position: Tensor  # [E] flat position in [B, S] of leaf j or node t
    cell: Tensor | None  # [E] flat cell in [B, N, S]; None if rows are summed one by one
    to_nodes: EntryOrder | None  # one sum per node of [B, N]; None for matrices, as the next
    to_positions: EntryOrder | None  # one sum per position of [B, S], for gradients

    @classmethod
    def build(cls, table: SpanTable, node: np.ndarray, position: np.ndarray, sparse: bool | None) -> "Entries":
        """Build from `node` [E] flat in [B, N] and `position` [E] flat in [B, S]. `sparse` overrides the choice by size."""
        batch, num_nodes = table.start.shape
        positions = table.num_leaves + num_nodes
        tree, index = np.divmod(np.arange(batch * num_nodes), num_nodes)
        node_position = (tree * positions + table.num_leaves + index)[node]
        flat = num_nodes, torch.from_numpy(node_position), torch.from_numpy(position)
        if sparse is None:
            sparse = choose_sparse(len(node), batch * num_nodes * positions)
        if not sparse:
            first_cell = (np.arange(batch * num_nodes) - tree) * positions
            return cls(*flat, torch.from_numpy(first_cell[node] + position), None, None)
        to_nodes = EntryOrder.build(node, position, batch * num_nodes)
        return cls(*flat, None, to_nodes, EntryOrder.build(position, node_position, batch * positions))


@dataclass
class PathMaps:
    """Branches in the order of the paths from leaves to the root. (i, j) is the lower part of the path above leaf j."""

    cell: Tensor  # [P] flat (b, j, |V_j^i| - 1) in [B, L, max_height]
    rank_row: Tensor  # [P] |H_j^i| - 1
    first: Tensor  # [B * N] first branch of each node
    num_leaves: int  # B * L


@dataclass
class BranchMaps:
    """Branches (i, j) and pairs (i, t), all int64. 'Flat' positions count through the batch."""

    leaf: Tensor  # [P] flat position of leaf j in [B, S]
    height: Tensor  # [P] |V_j^i|
    length: Tensor  # [P] span length of node i
    running: Tensor  # [P] flat cell of the branch in `running_shape`, for running sums by example
    running_shape: tuple[int, int]  # B, 1 + most branches of an example; the first cell of a row holds no branch
    pair_first: Tensor  # [Q] the cell before the first branch (i, j) with j under t
    pair_last: Tensor  # [Q] the cell of the last of them
    height_cell: Tensor  # [P] flat (i, |V_j^i| - 1) in [B * N, max_height]
    depth_cell: Tensor  # [Q] flat (i, proper ancestors of t) in [B * N, max_height]
    max_height: int
    rank_branch: Tensor  # [R] branch (i, j) of each node t on it; empty if there are `paths`
    rank_node: Tensor  # [R] flat node i
    rank_row: Tensor  # [R] |H_j^t| - 1
    max_length: int  # leaves of the longest span
    paths: PathMaps | None
    entries: Entries

    @classmethod
    def build(cls, table: SpanTable, sparse: bool | None = None) -> "BranchMaps":
        """Build the maps. `sparse` overrides the choice by size."""
        num_nodes, num_leaves = table.num_nodes, table.num_leaves
        positions = num_nodes + num_leaves
        start, length, depth = table.start.ravel(), table.length.ravel(), table.depth.ravel()
        upper, offset, _ = expand(table.subtree_size.ravel())
        lower = upper + offset
        leaf_depth = table.leaf_depth().ravel()
        node, rank, first = expand(length)
        tree, index = np.divmod(np.arange(start.size), num_nodes)
        flat_leaf = (tree * num_leaves + start)[node] + rank
        leaf, lower_position = (tree * positions + start)[node] + rank, (tree * positions + num_leaves + index)[lower]
        height = leaf_depth[flat_leaf] - depth[node]
        max_height, max_length = max(1, int(leaf_depth.max())), max(1, int(length.max()))
        first_branch = (first - start)[upper] + start[lower]
        pair_length = length[lower]

        paths, rank_branch, rank_node, rank_of_t = None, *(np.zeros(0, dtype=np.int64),) * 3
        if height.sum() <= PATHS_FROM_HEIGHT * len(height):
            begin = np.cumsum(pair_length) - pair_length
            item = np.arange(pair_length.sum())
            rank_branch, rank_of_t = (item + np.repeat(offset, pair_length) for offset in (first_branch - begin, -begin))
            rank_node = np.repeat(upper, pair_length)
        else:
            path_cell = flat_leaf * max_height + height - 1
            paths = PathMaps(torch.from_numpy(path_cell), torch.from_numpy(rank), torch.from_numpy(first), leaf_depth.size)

        counts = length.reshape(-1, num_nodes).sum(axis=1)  # branches of each example
        running_shape = len(counts), 1 + int(counts.max())
        shift = np.arange(len(counts)) * running_shape[1] - (np.cumsum(counts) - counts)  # from a branch to the cell before it
        running, pair_first = np.arange(len(node)) + shift[tree[node]] + 1, first_branch + shift[tree[upper]]

        entries = Entries.build(table, np.concatenate([node, upper]), np.concatenate([leaf, lower_position]), sparse)
        return cls(
            leaf=torch.from_numpy(leaf),
            height=torch.from_numpy(height),
            length=torch.from_numpy(length[node]),
            running=torch.from_numpy(running),
            running_shape=running_shape,
            pair_first=torch.from_numpy(pair_first),
            pair_last=torch.from_numpy(pair_first + pair_length),
            height_cell=torch.from_numpy(node * max_height + height - 1),
            depth_cell=torch.from_numpy(upper * max_height + depth[lower]),
            max_height=max_height,
            rank_branch=torch.from_numpy(rank_branch),
            rank_node=torch.from_numpy(rank_node),
            rank_row=torch.from_numpy(rank_of_t),
            max_length=max_length,
            paths=paths,
            entries=entries,
        )


# On accelerators, L and N are multiples of this: kernels of attention need masks with aligned rows, and shapes are fewer.
WIDTH_MULTIPLE = 8
# Batches of longer trees keep index lists. Dense products over leaves and nodes grow with the square of a tree's positions,
# and the sum of horizontal embeddings with its cube. This is a first choice; it was not measured on a GPU.
COMPACT_BELOW_POSITIONS = 512


@dataclass
class Depths:
    """Levels of a batch of trees."""

    node: Tensor  # [B, N] int32, proper ancestors of a node
    leaf: Tensor  # [B, L] int32, ancestors of a leaf
    levels: int  # at least the most ancestors of a leaf

    @classmethod
    def build(cls, table: SpanTable) -> "Depths":
        leaf = table.leaf_depth()
        return cls(to_int32(table.depth), to_int32(leaf), round_up(int(leaf.max()), WIDTH_MULTIPLE))


@dataclass
class BranchMatrices:
    """Branches (i, j) and pairs (i, t) as cells of matrices. The second dimension is for the leaf weights per leaf."""

    scale: Tensor  # [B, 1, N, L] 1 / (span length of i * |C_j^i|); 0 off the span, as the next two
    span: Tensor  # [B, 1, N, L] 1 where leaf j is in the span of node i
    subtree: Tensor  # [B, 1, N, N] 1 where node t is in the subtree of node i
    height_row: Tensor  # [B, 1, N, L] int64, |V_j^i| - 1 within [0, V)
    node_level: Tensor  # [B, 1, N, V] 1 at the number of proper ancestors of node t
    from_start: Tensor  # [B, 1, 1, N, L] int64, the leaf of rank r in node t, r counted from 0; any leaf past the span
    in_length: Tensor  # [B, 1, 1, N, L] bool, True where rank r is less than the length of node t
    rank_row: Tensor  # [B, 1, 1, N, L] int64, the rank of leaf j in node t, counted from 0; 0 off the span
    in_span: Tensor  # [B, 1, 1, N, L] bool, True where leaf j is in the span of node t
    vertical_use: Tensor  # [V, R] how often a branch of height v + 1 (with rule 'released', a node at depth v) takes each row
    horizontal_use: Tensor  # [L, R] 1 at the row of each rank
    rule: str  # the `accumulation_rule` of `scale` and `vertical_use`


def to_int32(values: np.ndarray) -> Tensor:
    """Return a copy, in the order of rows."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
