"""Compact trees for accelerators: spans and depths. The device makes all masks and weights of a batch from them.

The index lists of `treenet.structure.branches` have 80 times the bytes, and the accelerator would wait while the host makes them.
Shapes: B batch, L leaves, N nodes, V levels, R rows of a table of embeddings.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.structure.span_table import SpanTable, round_up

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
        return cls(to_int32(table.depth()), to_int32(leaf), round_up(int(leaf.max()), WIDTH_MULTIPLE))


@dataclass
class BranchMatrices:
    """Branches (i, j) and pairs (i, t) as cells of matrices. The second dimension is for the leaf weights per leaf."""

    scale: Tensor  # [B, 1, N, L] 1 / (span length of i * |C_j^i|); 0 off the span, as the next two
    span: Tensor  # [B, 1, N, L] 1 where leaf j is in the span of node i
    subtree: Tensor  # [B, 1, N, N] 1 where node t is in the subtree of node i
    height: Tensor  # [B, 1, N, L] int64, |V_j^i| - 1 within [0, V)
    node_level: Tensor  # [B, 1, N, V] 1 at the number of proper ancestors of node t
    from_start: Tensor  # [B, 1, 1, N, L] int64, the leaf of rank r in node t, r counted from 0; any leaf past the span
    in_length: Tensor  # [B, 1, 1, N, L] bool, True where rank r is less than the length of node t
    rank: Tensor  # [B, 1, 1, N, L] int64, the rank of leaf j in node t; 0 off the span
    in_span: Tensor  # [B, 1, 1, N, L] bool, True where leaf j is in the span of node t
    vertical_use: Tensor  # [V, R] how often a branch of height v + 1 (with rule 'released', a node at depth v) takes each row
    horizontal_use: Tensor  # [L, R] 1 at the row of each rank


def to_int32(values: np.ndarray) -> Tensor:
    """Return a copy, in the order of rows."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
