"""The mask of equation 11 for FlexAttention: a function of two positions, and the blocks of it that are not empty.

No mask is stored: a kernel computes it from the spans, and leaves out blocks in which nobody attends. In a document these are
most. Shapes: B batch, L leaves, N nodes, S = L + N positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


@dataclass
class SubtreeIntervals:
    """What a position sees: an interval of leaves, one of nodes that starts with itself, and itself."""

    first_leaf: Tensor  # [B, S] int32, as the next two
    last_leaf: Tensor  # one past the last leaf
    last_position: Tensor  # one past the last node of the subtree, counted from the first leaf; 0 for leaves

    def sees(self, tree: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query attends to a key, for indices of any shape that fit together."""
        leaves = (self.first_leaf[tree, query] <= key) & (key < self.last_leaf[tree, query])
        nodes = (query <= key) & (key < self.last_position[tree, query])
        return leaves | nodes | (query == key)


@dataclass
class Blocks:
    """Path "blocks": attention by FlexAttention."""

    mask: BlockMask


def build_blocks(intervals: SubtreeIntervals) -> Blocks:
    """The blocks of a batch, the same for all heads."""

    def sees(tree: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return intervals.sees(tree, head, query, key)

    batch, positions = intervals.first_leaf.shape
    device = intervals.first_leaf.device
    # The model's graph takes the mask as it is. To say so loads the compiler, which processes that make batches never need.
    make = torch.compiler.disable(create_block_mask)
    return Blocks(make(sees, batch, None, positions, positions, device=device))
