r"""Hierarchical accumulation by dense products, for compact trees on accelerators. It equals `treenet.paper`.

The weights of leaves and of nodes in nodes, as in `accumulation_by_lists.py`, are one matrix for each tree:

       VP                   a       b       c        VP      NP
       / \           VP    a_VP,a  a_VP,b  a_VP,c | b_VP,VP b_VP,NP        times the vectors of all positions [S, D]
     NP   c          NP    a_NP,a  a_NP,b  0      | 0       b_NP,NP        is N-bar [N, D]
     / \
    a   b                  scale * w [N, L]       | the left part times span [L, N], within the subtree [N, N]

Nothing is scattered: every sum is a product or a reduction, so every run gives the same result. Weights are sums too, never
differences. The backward pass is explicit, because autograd would scatter where the forward pass gathers, and keep large tensors
of gathered cells. Weights are computed at least in float32. The products with vectors use the type of the vectors, bfloat16 under
autocast, as attention's products with values do.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights per leaf (1 or H). V are
levels, X = V + L are ranks and heights. See `BranchMatrices`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treenet.layers.backend import first_derivative
from treenet.layers.scaled_dot_product import merge_heads, split_heads
from treenet.paper.equations import Tables
from treenet.structure.branches import BranchMatrices


def accumulate_by_matrices(
    vectors: Tensor, leaf_weights: Tensor, tables: Tables | None, maps: BranchMatrices, num_heads: int
) -> Tensor:
    """Replace node rows of `vectors` [B, S, D] by N-bar' (equation 10); leaf rows stay.

    `leaf_weights` [B, S, W], those of nodes unused; `tables` vertical and horizontal, or None without embeddings.
    """
    weights = leaf_weights[:, : maps.span.shape[3]].transpose(1, 2)
    arguments = vectors, weights, _build_table(*tables, maps) if tables else None, maps, num_heads
    if torch.compiler.is_exporting():  # a graph for other programs has no backward pass
        return _accumulate(*arguments)[0]
    return _Accumulate.apply(*arguments)


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, leaf_weights: Tensor, table: Tensor | None, maps: BranchMatrices, num_heads: int
    ) -> Tensor:
        out, matrix, use = _accumulate(vectors, leaf_weights, table, maps, num_heads)
        ctx.save_for_backward(vectors, matrix, use, table)
        ctx.maps, ctx.num_heads = maps, num_heads
        return out

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Any:
        vectors, matrix, use, table = ctx.saved_tensors
        maps: BranchMatrices = ctx.maps
        num_weights, num_leaves = matrix.shape[1], maps.span.shape[3]
        node_grad = grad[:, num_leaves:]
        split_grad = split_heads(node_grad, num_weights)
        vector_grad = merge_heads(matrix.transpose(2, 3) @ split_grad)
        vector_grad = torch.cat([vector_grad[:, :num_leaves] + grad[:, :num_leaves], vector_grad[:, num_leaves:]], 1)
        matrix_grad = (split_grad @ split_heads(vectors, num_weights).transpose(2, 3)).to(maps.scale.dtype)
        weight_grad, pair_grad = matrix_grad[..., :num_leaves], matrix_grad[..., num_leaves:]
        table_grad = None
        if table is not None:
            embedded = node_grad.unflatten(2, (ctx.num_heads, -1)).to(table.dtype).transpose(1, 2)  # [B, H, N, K]
            embedded = embedded.sum(1, keepdim=True) if num_weights == 1 else embedded
            table_grad = use.flatten(0, 2).t() @ embedded.flatten(0, 2)
            use_grad = embedded @ table.t()
            levels = maps.node_level.shape[3]
            if maps.rule == "paper":
                weight_grad = weight_grad + use_grad[..., :levels].gather(3, maps.height_row.expand_as(weight_grad))
            else:
                pair_grad = pair_grad + use_grad[..., :levels] @ maps.node_level.transpose(2, 3)
            weight_grad = weight_grad + _sum_shifted(use_grad[..., levels:], maps.rank_row, maps.in_span, maps.subtree)
        weight_grad = weight_grad + (pair_grad * maps.subtree) @ maps.span
        # `scale` is 0 off the span, where the gathered gradients have no meaning.
        return vector_grad, (weight_grad * maps.scale).sum(2), table_grad, None, None


def _accumulate(
    vectors: Tensor, leaf_weights: Tensor, table: Tensor | None, maps: BranchMatrices, num_heads: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the sums. Also returns the weights of leaves and nodes [B, W, N, S], and how often rows are used."""
    num_weights, num_leaves = leaf_weights.shape[1:]
    weights = maps.scale * leaf_weights[:, :, None]  # a_ij [B, W, N, L]
    pairs = (weights @ maps.span.transpose(2, 3)) * maps.subtree  # of (i, t): the sum over the span of t [B, W, N, N]
    matrix = torch.cat([weights, pairs], 3).to(vectors.dtype)
    nodes = merge_heads(matrix @ split_heads(vectors, num_weights))
    use = None
    if table is not None:
        heights = _sum_heights(weights, maps) if maps.rule == "paper" else pairs @ maps.node_level
        use = torch.cat([heights, _sum_shifted(weights, maps.from_start, maps.in_length, maps.subtree)], 3)  # [B, W, N, X]
        heads = nodes.unflatten(2, (num_heads, -1))
        nodes = (heads + (use @ table).transpose(1, 2)).to(nodes.dtype).flatten(2)
    return torch.cat([vectors[:, :num_leaves], nodes], 1), matrix, use


def _sum_heights(weights: Tensor, maps: BranchMatrices) -> Tensor:
    """Sum weights of branches [B, W, N, L] by their height: [B, W, N, V]."""
    level = torch.arange(maps.node_level.shape[3], device=weights.device)
    return torch.where(maps.height_row[..., None] == level, weights[..., None], 0).sum(3)


def _sum_shifted(rows: Tensor, place: Tensor, real: Tensor, subtree: Tensor) -> Tensor:
    """Sum, for every node i, row i [B, W, N, L], read at the places of t, over the nodes t of its subtree.

    It maps from leaves to ranks, and in the backward pass from ranks to leaves. `torch.compile` makes one kernel of it. Without
    it, B * W * N * N * L cells exist for a moment.
    """
    shape = *rows.shape[:3], *place.shape[3:]
    read = rows[:, :, :, None].expand(shape).gather(4, place.expand(shape))
    return torch.where(real, read * subtree[..., None], 0).sum(3)


def _build_table(vertical: Tensor, horizontal: Tensor, maps: BranchMatrices) -> Tensor:
    """Return [X, K]. The left half has the vertical rows for a branch of each height, the right half the row of each rank."""
    left, right = maps.vertical_use @ vertical, maps.horizontal_use @ horizontal
    return torch.cat([torch.cat([left, torch.zeros_like(left)], 1), torch.cat([torch.zeros_like(right), right], 1)])
