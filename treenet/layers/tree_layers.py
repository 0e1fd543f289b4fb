"""The common part of everything that runs attention layers over trees. Shapes: B batch, L leaves, N nodes, S = L + N, D model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treenet.layers.attention import padding_to_attend_mask
from treenet.layers.autocast import product_dtype
from treenet.structure import TreeStructure
from treenet.structure.on_device import prepare

if TYPE_CHECKING:
    from treenet.config import TreeAttentionConfig


def prepare_trees(
    structure: TreeStructure, tree: TreeAttentionConfig, like: Tensor, *, drops_weights: bool = False
) -> TreeStructure:
    """Return the structure with all maps that layers read, for vectors as `like`; `drops_weights`: attention has dropout now."""
    # FlexAttention has no dropout of attention weights; on CPUs it has no backward pass.
    blocks = like.device.type == "cuda" and not drops_weights
    return prepare(structure, tree, like.dtype, product_dtype(like), blocks)


def position_pad_mask(structure: TreeStructure) -> Tensor:
    """Return [B, S] bool, True = padding: leaves, then nodes."""
    return torch.cat([structure.leaf_pad_mask, structure.node_pad_mask], dim=1)


def attend_mask_of(tree: TreeAttentionConfig, pad_mask: Tensor) -> Tensor | None:
    """Return the mask of attention layers; None if they attend by the trees (equation 11)."""
    return None if tree.subtree_mask else padding_to_attend_mask(pad_mask)


def run_layers(
    layers: Iterable[nn.Module], x: Tensor, structure: TreeStructure, tree: TreeAttentionConfig, pad_mask: Tensor
) -> Tensor:
    """Run x [B, S, D], leaves, then nodes, through `EncoderLayer`s over a prepared structure -> [B, S, D]."""
    attend_mask = attend_mask_of(tree, pad_mask)
    for layer in layers:
        x = layer(x, attend_mask, structure, num_leaves=structure.num_leaves)
    return x
