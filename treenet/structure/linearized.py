"""Trees as sequences of words and labelled brackets (Li et al., 2017; Currey and Heafield, 2019).

A node becomes an opening bracket, its children, and a closing bracket, both with its label. Attention does not know the order of
its inputs. So the positions stay leaves, then nodes, each node twice: first its opening bracket, then its closing one. Only
`place` knows the sequence.

Shapes: B batch, L leaves, N nodes, S = L + 2N positions.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from treenet.structure.base import Structure
from treenet.structure.span_table import SpanTable


@dataclass
class LinearizedTrees(Structure):
    """The places of all positions of a batch."""

    place: Tensor  # [B, S] int64: the place in the sequence, from 0; 0 for padding
    positions_of_node: ClassVar[int] = 2

    @classmethod
    def build(cls, table: SpanTable) -> "LinearizedTrees":
        """Build from a span table. Raises UserError if the spans are not trees."""
        table.check_nested()
        leaf, node, depth = np.arange(table.num_leaves), np.arange(table.num_nodes), table.depth()
        # Before a leaf are the brackets that opened at it or before it, and those that closed.
        place_of_leaf = leaf + table.count_until(table.start)[:, :-1] + table.count_until(table.end)[:, :-1]
        opened = table.start + node + (node - depth)
        closed = table.end + table.subtree_end + (table.subtree_end - 1 - depth)
        brackets = np.where(table.node_pad_mask[..., None], 0, np.stack([opened, closed], axis=2))
        leaves = np.where(table.leaf_pad_mask, 0, place_of_leaf)
        return cls(torch.from_numpy(np.concatenate([leaves, brackets.reshape(len(leaves), -1)], axis=1)))
