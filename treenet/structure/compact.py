"""Trees as accelerators get them: spans and depths, of which the device makes all masks and weights of a batch.

The index lists of `treenet.structure.branches` take 80 times the bytes, and time of the host that an accelerator would wait
for. Shapes: B batch, L leaves, N nodes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.structure.span_table import SpanTable, round_up

# L and N are multiples of it on accelerators: kernels of attention want masks whose rows are aligned, and shapes are fewer.
WIDTH_MULTIPLE = 8
# Batches of longer trees keep index lists: dense products over leaves and nodes grow with the square of a tree's positions,
# and the sum of horizontal embeddings with its cube. A first choice; no GPU has been measured.
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


def to_int32(values: np.ndarray) -> Tensor:
    """A copy, in the order of rows."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
