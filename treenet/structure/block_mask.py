"""The mask of equation 11 for FlexAttention: a function of two positions, and the list of blocks that are not empty.

No mask is stored. A kernel computes it from the spans, and skips blocks without a True entry, which are most blocks of a
document. Shapes: B batch, L leaves, N nodes, S = L + N positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


@dataclass
class SubtreeIntervals:
    """The keys of a position: an interval of leaves, an interval of nodes that starts with the position, and itself."""

    first_leaf: Tensor  # [B, S] int32, as the next two
    last_leaf: Tensor  # one past the last leaf
    last_position: Tensor  # one past the last node of the subtree, counted from the first leaf; 0 for leaves

    def sees(self, tree: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether a query attends to a key, for indices of broadcastable shapes."""
        leaves = (self.first_leaf[tree, query] <= key) & (key < self.last_leaf[tree, query])
        nodes = (query <= key) & (key < self.last_position[tree, query])
        return leaves | nodes | (query == key)


@dataclass
class Blocks:
    """Path "blocks": attention by FlexAttention."""

    mask: BlockMask


def build_blocks(intervals: SubtreeIntervals) -> Blocks:
    """Build the blocks of a batch. All heads share them."""

    def sees(tree: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return intervals.sees(tree, head, query, key)

    batch, positions = intervals.first_leaf.shape
    device = intervals.first_leaf.device
    # The model's graph takes the mask unchanged. To declare this would load the compiler, which loader processes do not need.
    make = torch.compiler.disable(create_block_mask)
    return Blocks(make(sees, batch, None, positions, positions, device=device))
