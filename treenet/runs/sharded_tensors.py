"""Tensors in parts, one a rank (DTensor).

They are told by their methods: to import their class takes two seconds, which most runs need not wait.
"""

from typing import Any

import torch
from torch import Tensor


def is_sharded(value: Any) -> bool:
    """Whether a tensor is in parts."""
    return hasattr(value, "full_tensor")


def complete(tensor: Tensor) -> Tensor:
    """The complete tensor. All ranks must call this for the same tensors in the same order."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; of one that is not in parts, all of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def in_parts_like(value: Tensor, like: Tensor) -> Tensor:
    """A complete tensor of the shape of `like`, in parts where that is: every rank has it, and keeps its own part."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


@torch.no_grad()
def copy_complete(value: Tensor, into: Tensor) -> None:
    """Copy a complete tensor into one of the same shape, which may be in parts."""
    local_part(into).copy_(local_part(in_parts_like(value, into)))
