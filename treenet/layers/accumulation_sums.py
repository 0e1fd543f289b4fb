"""The sums of hierarchical accumulation, with explicit backward passes: by lists of entries, or by dense products.

Lists of entries: autograd of `torch.cat([leaves, matrix @ vectors + embedding])` pads gradients of parts with zeros and adds
them. It also computes the gradient of all cells of the matrix, although few are used. On every device this function uses
PyTorch's own operators, and `torch.compile` traces through it.

Dense products over compact trees, for accelerators: the same sums without index lists, in the same order of equations. Nothing is
scattered: every sum is a product or a reduction, so every run gives the same result. Weights are sums too, never differences.
Autograd would scatter where the forward pass gathers, and keep large tensors of gathered cells. Weights are computed at least in
float32. The products with vectors use the type of the vectors, bfloat16 under autocast, as attention's products with values do.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights per leaf (1 or H), E
entries; see `treenet.structure.branches`. V are levels, X = V + L are ranks and heights.
"""

import torch
from torch import Tensor

from treenet.layers.scaled_dot_product import merge_heads, split_heads
from treenet.layers.torch_internals import multiply_rows, sum_weighted_rows
from treenet.structure.branches import BranchMatrices, Entries, EntryOrder


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
            nodes = merge_heads(matrix @ split_heads(vectors, len(weights)))
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


def build_table(vertical: Tensor, horizontal: Tensor, maps: BranchMatrices) -> Tensor:
    """Return [X, K]. The left half has the vertical rows for a branch of each height, the right half the row of each rank."""
    left, right = maps.vertical_use @ vertical, maps.horizontal_use @ horizontal
    return torch.cat([torch.cat([left, torch.zeros_like(left)], 1), torch.cat([torch.zeros_like(right), right], 1)])


def accumulate_densely(
    vectors: Tensor, leaf_weights: Tensor, table: Tensor | None, maps: BranchMatrices, num_heads: int, paper: bool
) -> Tensor:
    """Replace node rows of `vectors` [B, S, D] by N-bar' (equation 10); leaf rows stay.

    `leaf_weights` [B, W, L]; `table` is from `build_table`, or None without embeddings; `paper` is the rule.
    """
    if torch.compiler.is_exporting():  # a graph for other programs has no backward pass
        return _accumulate(vectors, leaf_weights, table, maps, num_heads, paper)[0]
    return _Accumulate.apply(vectors, leaf_weights, table, maps, num_heads, paper)


class _Accumulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vectors, leaf_weights, table, maps: BranchMatrices, num_heads: int, paper: bool) -> Tensor:
        out, matrix, use = _accumulate(vectors, leaf_weights, table, maps, num_heads, paper)
        ctx.save_for_backward(vectors, matrix, use, table)
        ctx.maps, ctx.num_heads, ctx.paper = maps, num_heads, paper
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
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
            if ctx.paper:
                weight_grad = weight_grad + use_grad[..., :levels].gather(3, maps.height.expand_as(weight_grad))
            else:
                pair_grad = pair_grad + use_grad[..., :levels] @ maps.node_level.transpose(2, 3)
            weight_grad = weight_grad + _sum_shifted(use_grad[..., levels:], maps.rank, maps.in_span, maps.subtree)
        weight_grad = weight_grad + (pair_grad * maps.subtree) @ maps.span
        # `scale` is 0 off the span, where the gathered gradients have no meaning.
        return vector_grad, (weight_grad * maps.scale).sum(2), table_grad, None, None, None


def _accumulate(
    vectors: Tensor, leaf_weights: Tensor, table: Tensor | None, maps: BranchMatrices, num_heads: int, paper: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `accumulate_densely`. Also returns the weights of leaves and nodes [B, W, N, S], and how often rows are used."""
    num_weights, num_leaves = leaf_weights.shape[1:]
    weights = maps.scale * leaf_weights[:, :, None]  # a_ij [B, W, N, L]
    pairs = (weights @ maps.span.transpose(2, 3)) * maps.subtree  # of (i, t): the sum over the span of t [B, W, N, N]
    matrix = torch.cat([weights, pairs], 3).to(vectors.dtype)
    nodes = merge_heads(matrix @ split_heads(vectors, num_weights))
    use = None
    if table is not None:
        heights = _sum_heights(weights, maps) if paper else pairs @ maps.node_level
        use = torch.cat([heights, _sum_shifted(weights, maps.from_start, maps.in_length, maps.subtree)], 3)  # [B, W, N, X]
        heads = nodes.unflatten(2, (num_heads, -1))
        nodes = (heads + (use @ table).transpose(1, 2)).to(nodes.dtype).flatten(2)
    return torch.cat([vectors[:, :num_leaves], nodes], 1), matrix, use


def _sum_heights(weights: Tensor, maps: BranchMatrices) -> Tensor:
    """Sum weights of branches [B, W, N, L] by their height: [B, W, N, V]."""
    level = torch.arange(maps.node_level.shape[3], device=weights.device)
    return torch.where(maps.height[..., None] == level, weights[..., None], 0).sum(3)


def _sum_shifted(rows: Tensor, place: Tensor, real: Tensor, subtree: Tensor) -> Tensor:
    """Sum, for every node i, row i [B, W, N, L], read at the places of t, over the nodes t of its subtree.

    It maps from leaves to ranks, and in the backward pass from ranks to leaves. `torch.compile` makes one kernel of it. Without
    it, B * W * N * N * L cells exist for a moment.
    """
    shape = *rows.shape[:3], *place.shape[3:]
    read = rows[:, :, :, None].expand(shape).gather(4, place.expand(shape))
    return torch.where(real, read * subtree[..., None], 0).sum(3)
