"""The product of hierarchical accumulation, with an explicit backward pass.

Autograd of `torch.cat([leaves, matrix @ vectors + embedding])` pads gradients of parts with zeros and adds them. It also computes
the gradient of all cells of the matrix, although few are used. On every device this function uses PyTorch's own operators, and
`torch.compile` traces through it.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights per leaf (1 or H), E
entries; see `treenet.structure.branches`.
"""

import torch
from torch import Tensor

from treenet.layers.torch_internals import multiply_rows, sum_weighted_rows
from treenet.structure.branches import Entries, EntryOrder


def replace_nodes(vectors: Tensor, weights: Tensor, embedding: Tensor | None, entries: Entries, num_heads: int) -> Tensor:
    """Replace the nodes by sums of vectors [B, S, D] with `weights` [W, E], plus `embedding` [B, N, W, K]."""
    return _ReplaceNodes.apply(vectors, weights, embedding, entries, num_heads)


class _ReplaceNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vectors: Tensor, weights: Tensor, embedding: Tensor | None, entries: Entries, num_heads: int) -> Tensor:
        leaves = vectors.shape[1] - entries.num_nodes
        if entries.to_nodes:
            matrix = None
            nodes = _sum_groups(vectors, weights, entries.to_nodes).unflatten(0, (-1, entries.num_nodes))
        else:
            matrix = _fill_matrix(weights, entries, vectors.shape)
            nodes = _merge(matrix @ _split(vectors, len(weights)))
        if embedding is not None:
            nodes.unflatten(2, (num_heads, -1)).add_(embedding)
        ctx.save_for_backward(vectors, weights, matrix)
        ctx.entries, ctx.num_heads, ctx.embeds = entries, num_heads, embedding is not None
        return torch.cat([vectors[:, :leaves], nodes], dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        vectors, weights, matrix = ctx.saved_tensors
        entries, num_weights = ctx.entries, len(weights)
        leaves = vectors.shape[1] - entries.num_nodes
        node_grad = grad[:, leaves:]
        if matrix is None:
            vector_grad = _sum_groups(grad, weights, entries.to_positions).view(vectors.shape)
        else:
            vector_grad = _merge(matrix.transpose(2, 3) @ _split(node_grad, num_weights))
        vector_grad[:, :leaves] += grad[:, :leaves]
        weight_grad = _multiply_rows(grad, vectors, entries, num_weights)
        embedding_grad = None
        if ctx.embeds:
            embedding_grad = node_grad.unflatten(2, (ctx.num_heads, -1))
            embedding_grad = embedding_grad.sum(2, keepdim=True) if num_weights == 1 else embedding_grad
        return vector_grad, weight_grad, embedding_grad, None, None


def _fill_matrix(weights: Tensor, entries: Entries, shape: torch.Size) -> Tensor:
    """Fill a matrix with weights [W, E] -> [B, W, N, S]."""
    matrix = weights.new_zeros(len(weights), shape[0] * entries.num_nodes * shape[1]).index_copy_(1, entries.cell, weights)
    return matrix.view(len(weights), shape[0], entries.num_nodes, shape[1]).transpose(0, 1)


def _sum_groups(rows: Tensor, weights: Tensor, order: EntryOrder) -> Tensor:
    """Sum rows [B, S, D] with weights [W, E], one sum per group: [groups, D]."""
    num_weights, num_entries = weights.shape
    weights = weights.index_select(1, order.entry).flatten()
    first = _per_weight(order.first, num_weights, num_entries).flatten()
    index = _row_of_weight(order.source, num_weights).flatten()
    sums = sum_weighted_rows(_rows(rows, num_weights), index, first, weights)
    return sums if num_weights == 1 else sums.unflatten(0, (num_weights, -1)).transpose(0, 1).flatten(1)


def _multiply_rows(left: Tensor, right: Tensor, entries: Entries, num_weights: int) -> Tensor:
    """Multiply rows of two tensors [B, S, D] for each entry, the node's of `left` with the position's of `right`: [W, E]."""
    node, position = (_row_of_weight(x, num_weights).flatten() for x in (entries.node, entries.position))
    return multiply_rows(_rows(left, num_weights), _rows(right, num_weights), node, position).view(num_weights, -1)


def _row_of_weight(position: Tensor, num_weights: int) -> Tensor:
    """Map flat positions [E] to rows [W, E] of `_rows`."""
    return position if num_weights == 1 else position * num_weights + _count(num_weights, position)


def _per_weight(first: Tensor, num_weights: int, num_entries: int) -> Tensor:
    return first if num_weights == 1 else first + num_entries * _count(num_weights, first)


def _count(num_weights: int, like: Tensor) -> Tensor:
    return torch.arange(num_weights, device=like.device)[:, None]


def _rows(x: Tensor, num_weights: int) -> Tensor:
    """Reshape [B, S, D] -> [B * S * W, D / W]."""
    return x.flatten(0, 1) if num_weights == 1 else x.reshape(-1, x.shape[2] // num_weights)


def _split(x: Tensor, num_weights: int) -> Tensor:
    """Reshape [B, S, D] -> [B, W, S, D / W]."""
    return x.unflatten(2, (num_weights, -1)).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    """Reshape [B, W, S, D / W] -> [B, S, D]."""
    return x.transpose(1, 2).flatten(2)
