"""Undocumented operators of PyTorch, and public replacements for versions without them.

Shapes: R rows, D columns, E entries, G groups of entries.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_SUM = 0  # a mode of embedding bags


def _operator(name: str):
    return getattr(torch.ops.aten, name, None)


# Attention on the CPU with the logarithms of its normalisers, and its gradient. Without them `attend_subtrees` composes
# `scaled_dot_product_attention`.
flash_attention = _operator("_scaled_dot_product_flash_attention_for_cpu")
flash_attention_backward = _operator("_scaled_dot_product_flash_attention_for_cpu_backward")
_bag = _operator("_embedding_bag_forward_only")
_bag_weights_backward = _operator("_embedding_bag_per_sample_weights_backward")


def has_flash_attention() -> bool:
    """Return whether both CPU operators of attention exist."""
    return flash_attention is not None and flash_attention_backward is not None


def sum_weighted_rows(rows: Tensor, index: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Return sums [G, D] of rows [R, D] by weights [E]. `index` [E] is the row of an entry, `first` [G] a group's first entry.

    If the rows are a part of fused projections, `F.embedding_bag` would first copy them.
    """
    if _bag is None:
        return F.embedding_bag(index, rows, first, mode="sum", per_sample_weights=weights)
    return _bag(rows, index, first, per_sample_weights=weights, mode=_SUM)[0]


def multiply_rows(left: Tensor, right: Tensor, left_index: Tensor, right_index: Tensor) -> Tensor:
    """Return products [E] of a row of `left` [R, D] with a row of `right` [R, D].

    This is the gradient of the weights in a weighted sum of rows, without a copy of the rows.
    """
    if _bag_weights_backward is None:
        return (left.index_select(0, left_index) * right.index_select(0, right_index)).sum(1)
    # It reads the group of each entry from `left_index`, and no offsets.
    return _bag_weights_backward(left, right, right_index, left_index[:0], left_index, _SUM)
