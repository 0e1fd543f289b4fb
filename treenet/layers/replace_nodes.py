"""The matrix product of hierarchical accumulation with a backward pass of its own.

Left to autograd, `torch.cat([leaves, matrix @ vectors + embedding])` fills gradients of parts up with zeros and adds them:
three more passes over the gradient. PyTorch's own operators on every device; `torch.compile` traces through it.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights a leaf (1 or H).
"""

import torch
from torch import Tensor


def replace_nodes(vectors: Tensor, matrix: Tensor, embedding: Tensor | None, num_heads: int) -> Tensor:
    """Vectors [B, S, D] with `matrix` [B, W, N, S] times vectors, plus `embedding` [B, N, W, K], in place of the nodes'."""
    return _ReplaceNodes.apply(vectors, matrix, embedding, num_heads)


class _ReplaceNodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vectors: Tensor, matrix: Tensor, embedding: Tensor | None, num_heads: int) -> Tensor:
        leaves = vectors.shape[1] - matrix.shape[2]
        nodes = _merge(matrix @ _split(vectors, matrix.shape[1]))
        if embedding is not None:
            nodes = (nodes.unflatten(2, (num_heads, -1)) + embedding).flatten(2)
        ctx.save_for_backward(vectors, matrix)
        ctx.num_heads, ctx.embeds = num_heads, embedding is not None
        return torch.cat([vectors[:, :leaves], nodes], dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        vectors, matrix = ctx.saved_tensors
        num_weights, leaves = matrix.shape[1], vectors.shape[1] - matrix.shape[2]
        node_grad = grad[:, leaves:]
        split_grad = _split(node_grad, num_weights)
        vector_grad = _merge(matrix.transpose(2, 3) @ split_grad)
        vector_grad[:, :leaves] += grad[:, :leaves]
        matrix_grad = split_grad @ _split(vectors, num_weights).transpose(2, 3)
        embedding_grad = None
        if ctx.embeds:
            embedding_grad = node_grad.unflatten(2, (ctx.num_heads, -1))
            embedding_grad = embedding_grad.sum(2, keepdim=True) if num_weights == 1 else embedding_grad
        return vector_grad, matrix_grad, embedding_grad, None


def _split(x: Tensor, num_weights: int) -> Tensor:
    """[B, S, D] -> [B, W, S, D / W]."""
    return x.unflatten(2, (num_weights, -1)).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    """[B, W, S, D / W] -> [B, S, D]."""
    return x.transpose(1, 2).flatten(2)
