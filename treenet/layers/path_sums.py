"""Sums along the paths from leaves to the root, one for every branch.

Shapes: P branches in path order (`treenet.structure.branches`), H the largest height, C channels.
"""

from itertools import pairwise

import torch
from torch import Tensor

from treenet.structure import BranchMaps


def sum_along_paths(rows: Tensor, branches: BranchMaps) -> Tensor:
    """rows [P, C], one for the uppermost node of each branch -> [P, C], the sum over all nodes of each branch."""
    if rows.device.type == "cpu":
        return _sum_levels(rows, branches.level_size)
    return sum_padded_paths(rows, branches)


def sum_padded_paths(rows: Tensor, branches: BranchMaps) -> Tensor:
    """The same by one running sum over [B * L, H, C]: few kernels, as a GPU likes it."""
    height, leaves = len(branches.level_size), branches.num_leaves
    padded = rows.new_zeros(leaves * height, rows.shape[1]).index_copy(0, branches.path_cell, rows)
    return padded.unflatten(0, (leaves, height)).cumsum(1).flatten(0, 1).index_select(0, branches.path_cell)


@torch.library.custom_op("treenet::sum_levels", mutates_args=(), device_types="cpu")
def _sum_levels(rows: Tensor, level_size: Tensor) -> Tensor:
    """Level by level, in place: the branches of height h + 1 extend the first ones of height h."""
    out = rows.clone()
    for below, level in pairwise(out.split(level_size.tolist())):
        level += below[: len(level)]
    return out


@torch.library.custom_op("treenet::sum_levels_backward", mutates_args=(), device_types="cpu")
def _sum_levels_backward(grad: Tensor, level_size: Tensor) -> Tensor:
    out = grad.clone(memory_format=torch.contiguous_format)
    for level, above in reversed([*pairwise(out.split(level_size.tolist()))]):
        level[: len(above)] += above
    return out


@_sum_levels.register_fake
def _(rows, level_size):
    return torch.empty_like(rows)


@_sum_levels_backward.register_fake
def _(grad, level_size):
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx, grad: Tensor):
    return _sum_levels_backward(grad, *ctx.saved_tensors), None


_sum_levels.register_autograd(_backward, setup_context=_setup_context)
