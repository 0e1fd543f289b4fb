r"""Hierarchical accumulation by lists of entries: sums over the branches and subtrees of a batch. It equals `treenet.paper`.

Equations 5 to 8 are linear in the vectors of leaves and nodes. In node i, the weight of leaf j is a_ij = w_j / (|L_i| |C_j^i|).
The weight b_it of node t is the sum of a_ij over the leaves of t, because t is on the branches of these leaves. They are
neighbours, so b_it is a difference of two running sums:

       VP          branches (i, j)   | VP,a | VP,b | VP,c | NP,a | NP,b |    P entries: a_ij
       / \         running sums      0      1      2      3      4      5    sum k adds up the first k branches
     NP   c        pairs (i, t)        VP,VP   VP,NP   NP,NP                 Q entries: b_it
     / \           differences         3 - 0   2 - 0   5 - 3
    a   b

    N-bar of VP = a_VP,a a + a_VP,b b + a_VP,c c + b_VP,VP VP + b_VP,NP NP   the sum of the entries of VP
    N-bar of NP = a_NP,a a + a_NP,b b + b_NP,NP NP

These P + Q scalars replace the tensor of equation 5. For sentences they fill matrices [N, S], which are multiplied; for
documents, rows are summed. Equation 10 adds rows of tables. The weights of each row in each node are added up in a matrix [B * N,
rows]. Its product with the table serves all heads that share leaf weights.

Precision. All runs at least in float32, with or without autocast; only inputs and outputs are rounded. Vectors are added, never
subtracted, so that nothing cancels. The running sums that are subtracted are scalars in float64, each over one example of the
batch. TF32 may stay on for matrix products. It rounds weights and vectors to 11 bits once each, which is no worse than bf16
inputs.

The backward pass is explicit. Autograd of `torch.cat([leaves, matrix @ vectors + embedding])` pads gradients of parts with zeros
and adds them. It also computes the gradient of all cells of the matrix, although few are used. On every device this function uses
PyTorch's own operators, and `torch.compile` traces through it.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights per leaf (1 or H). P are
branches (node i, leaf j), Q are pairs (node i, node t of its subtree), E = P + Q entries. See `treenet.structure.branches`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treenet.layers.backend import first_derivative, multiply_rows, sum_weighted_rows
from treenet.layers.scaled_dot_product import merge_heads, split_heads
from treenet.paper.equations import Tables
from treenet.structure import BranchMaps
from treenet.structure.branches import Entries, EntryOrder, PathMaps


def accumulate_by_lists(
    vectors: Tensor, leaf_weights: Tensor, tables: Tables | None, maps: BranchMaps, num_heads: int, rule: str
) -> Tensor:
    """Replace node rows of `vectors` [B, S, D] by N-bar' (equation 10); leaf rows stay.

    `leaf_weights` [B, S, W], those of nodes unused; `tables` vertical and horizontal, or None without embeddings.
    """
    flat, count = leaf_weights.flatten(0, 1).t(), maps.height + 1 if rule == "paper" else maps.height
    weights = flat.index_select(1, maps.leaf) / (count * maps.length)  # a_ij [W, P]
    pair_weights = sum_pairs(weights, maps)  # b_it [W, Q]
    embedding = None
    if tables is not None:
        shape = len(vectors), maps.entries.num_nodes
        embedding = _embed(weights, pair_weights, tables, maps, shape, rule)
    entries = torch.cat([weights, pair_weights], dim=1)
    return _ReplaceNodes.apply(vectors, entries, embedding, maps.entries, num_heads)


class _ReplaceNodes(torch.autograd.Function):
    """Replaces the nodes by sums of vectors [B, S, D] with `weights` [W, E], plus `embedding` [B, N, W, K]."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weights: Tensor, embedding: Tensor | None, entries: Entries, num_heads: int) -> Tensor:
        leaves = vectors.shape[1] - entries.num_nodes
        if entries.to_nodes:
            matrix = None
            nodes = _sum_groups(vectors, weights, entries.to_nodes).unflatten(0, (-1, entries.num_nodes))
        else:
            matrix = _fill_matrix(weights, entries, vectors.shape)
            nodes = merge_heads(matrix @ split_heads(vectors, len(weights)))
        if embedding is not None:
            nodes.unflatten(2, (num_heads, -1)).add_(embedding)
        ctx.save_for_backward(vectors, weights, matrix)
        ctx.entries, ctx.num_heads, ctx.embeds = entries, num_heads, embedding is not None
        return torch.cat([vectors[:, :leaves], nodes], dim=1)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> Any:
        vectors, weights, matrix = ctx.saved_tensors
        entries, num_weights = ctx.entries, len(weights)
        leaves = vectors.shape[1] - entries.num_nodes
        node_grad = grad[:, leaves:]
        if matrix is None:
            vector_grad = _sum_groups(grad, weights, entries.to_positions).view(vectors.shape)
        else:
            vector_grad = merge_heads(matrix.transpose(2, 3) @ split_heads(node_grad, num_weights))
        vector_grad[:, :leaves] += grad[:, :leaves]
        weight_grad = _multiply_rows(grad, vectors, entries, num_weights)
        embedding_grad = None
        if ctx.embeds:
            embedding_grad = node_grad.unflatten(2, (ctx.num_heads, -1))
            embedding_grad = embedding_grad.sum(2, keepdim=True) if num_weights == 1 else embedding_grad
        return vector_grad, weight_grad, embedding_grad, None, None


def _fill_matrix(weights: Tensor, entries: Entries, shape: torch.Size) -> Tensor:
    """Fill a matrix with weights [W, E] -> [B, W, N, S]."""
    assert entries.cell is not None  # rows are not summed one by one
    matrix = weights.new_zeros(len(weights), shape[0] * entries.num_nodes * shape[1]).index_copy_(1, entries.cell, weights)
    return matrix.view(len(weights), shape[0], entries.num_nodes, shape[1]).transpose(0, 1)


def _sum_groups(rows: Tensor, weights: Tensor, order: EntryOrder) -> Tensor:
    """Sum rows [B, S, D] with weights [W, E], one sum per group: [groups, D]."""
    num_weights, num_entries = weights.shape
    weights = weights.index_select(1, order.entry).flatten()
    first = order.first if num_weights == 1 else (order.first + num_entries * _count(num_weights, order.first)).flatten()
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


def _count(num_weights: int, like: Tensor) -> Tensor:
    return torch.arange(num_weights, device=like.device)[:, None]


def _rows(x: Tensor, num_weights: int) -> Tensor:
    """Reshape [B, S, D] -> [B * S * W, D / W]."""
    return x.flatten(0, 1) if num_weights == 1 else x.reshape(-1, x.shape[2] // num_weights)


def _embed(weights: Tensor, pair_weights: Tensor, tables: Tables, maps: BranchMaps, shape: tuple[int, int], rule: str) -> Tensor:
    """Return the sum of the embeddings E of equation 9 in each node [B, N, W, K], for `shape` (B, N).

    Heads of the same leaf weights share it.
    """
    num_nodes = math.prod(shape)
    rows = take_rows(tables[0].to(weights.dtype), torch.arange(maps.max_height, device=weights.device))
    if rule == "paper":  # by the height of t above j: the nodes of a branch take the rows up to its own height
        vertical = add_up(weights, maps.height_cell, num_nodes, maps.max_height) @ rows.cumsum(0)
    else:  # by the depth of t, which is the same for all leaves
        vertical = add_up(pair_weights, maps.depth_cell, num_nodes, maps.max_height) @ rows
    table = tables[1].to(weights.dtype)
    if maps.paths is None:
        num_rows = min(maps.max_length, len(table))
        cell = maps.rank_node * num_rows + maps.rank_row.clamp(max=num_rows - 1)
        use = add_up(weights.index_select(1, maps.rank_branch), cell, num_nodes, num_rows)
        horizontal = use @ table[:num_rows]
    else:
        horizontal = sum_paths(weights, table, maps.paths, maps.max_height)
    embedding = torch.cat([vertical, horizontal], dim=1).view(len(weights), *shape, -1)
    return embedding.permute(1, 2, 0, 3)


def take_rows(table: Tensor, row: Tensor) -> Tensor:
    """Return the rows of a table of these numbers [C], which count from 0: [C, K / 2]. Numbers past the table take the last."""
    return F.embedding(row.clamp(max=len(table) - 1), table)


def add_up(weights: Tensor, cell: Tensor, num_nodes: int, num_rows: int) -> Tensor:
    """Sum weights [W, E] by cells [E] of [B * N, rows]: [W * B * N, rows]."""
    cells = weights.new_zeros(len(weights), num_nodes * num_rows)
    return cells.scatter_add(1, cell.expand(len(weights), -1), weights).view(-1, num_rows)


def sum_paths(weights: Tensor, table: Tensor, paths: PathMaps, max_height: int) -> Tensor:
    """Multiply weights of branches [W, P] with the sums of the horizontal rows of their nodes: [W * B * N, K / 2]."""
    num_weights, num_branches = weights.shape
    rows = take_rows(table, paths.rank_row)
    padded = rows.new_zeros(paths.num_leaves * max_height, rows.shape[1]).index_copy(0, paths.cell, rows)
    sums = padded.unflatten(0, (-1, max_height)).cumsum(1).flatten(0, 1)
    first = paths.first + num_branches * torch.arange(num_weights, device=weights.device)[:, None]
    index = paths.cell.repeat(num_weights)
    return F.embedding_bag(index, sums, first.flatten(), mode="sum", per_sample_weights=weights.flatten())


def sum_pairs(weights: Tensor, maps: BranchMaps) -> Tensor:
    """Map weights of branches [W, P] to those of pairs (i, t) [W, Q]: the sum over the branches of i that pass through t.

    The running sums start again at every example of the batch. One sum over all would spread an infinite or NaN weight, and the
    rounding of a huge one, from an example to its batch-mates.
    """
    cells = weights.new_zeros(len(weights), math.prod(maps.running_shape), dtype=torch.float64)
    cells = cells.index_copy(1, maps.running, weights.double()).unflatten(1, maps.running_shape)
    running = cells.cumsum(2).flatten(1)
    difference = running.index_select(1, maps.pair_last) - running.index_select(1, maps.pair_first)
    return difference.to(weights.dtype)
