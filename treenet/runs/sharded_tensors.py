"""Tensors in parts, one per rank (DTensor).

The code recognises them by their methods. The import of their class takes two seconds, which most runs can save.
"""

from typing import Any

import torch
from torch import Tensor


def is_sharded(value: Any) -> bool:
    """Return whether a tensor is in parts."""
    return hasattr(value, "full_tensor")


def complete(tensor: Tensor) -> Tensor:
    """Return the complete tensor. All ranks must call this for the same tensors in the same order."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory. For a tensor that is not in parts, it is the whole."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def in_parts_like(value: Tensor, like: Tensor) -> Tensor:
    """Cut a complete tensor into parts as `like` is, which has the same shape. Every rank has it, and keeps its part."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


@torch.no_grad()
def copy_complete(value: Tensor, into: Tensor) -> None:
    """Copy a complete tensor into one of the same shape, which may be in parts."""
    local_part(into).copy_(local_part(in_parts_like(value, into)))
