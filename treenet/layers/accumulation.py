"""Hierarchical accumulation (sections 4.1 and 4.2, equations 5 to 10) without the tensor S.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights per leaf (1 or H), E
entries. P are branches (node i, leaf j), Q are pairs (node i, node t of its subtree). V are levels, X = V + L are ranks and
heights. See `treenet.structure`.

Equations 5 to 8 are linear in the vectors of leaves and nodes. The weight of leaf j in node i is
`a_ij = w_j / (span length of i * |C_j^i|)`. Node t of i's subtree is on the branches of the leaves of t. So its weight in node i
is the sum of a_ij over the span of t, a difference of two running sums.

These P + Q scalars replace S in R^{(m+1) x n x d}. The nodes are then one product with the vectors for all heads. Sentences use
matrices [N, S]; documents use a sum over the P + Q entries.

Equation 10 adds embeddings for every node t of a branch: row |V_j^t| of the vertical table in the first K / 2 dimensions, and row
|H_j^t| of the horizontal table in the last K / 2. The weighted counts of the rows in each node are scalars too. They are added up
in a matrix [B * N, rows]. Its product with the table serves all heads that share leaf weights.

Precision. With lists of branches, all of this runs at least in float32, with or without autocast; only inputs and outputs are
rounded. Vectors are added, never subtracted, so that nothing cancels. The running sums that are subtracted are scalars in
float64, each over one example of the batch. TF32 may stay on for matrix products. It rounds weights and vectors to 11 bits once
each, which is no worse than bf16 inputs.

The sums have explicit backward passes, by lists of entries or by dense products.

Lists of entries: autograd of `torch.cat([leaves, matrix @ vectors + embedding])` pads gradients of parts with zeros and adds
them. It also computes the gradient of all cells of the matrix, although few are used. On every device this function uses
PyTorch's own operators, and `torch.compile` traces through it.

Dense products over compact trees, for accelerators: the same sums without index lists, in the same order of equations. Nothing is
scattered: every sum is a product or a reduction, so every run gives the same result. Weights are sums too, never differences.
Autograd would scatter where the forward pass gathers, and keep large tensors of gathered cells. Weights are computed at least in
float32. The products with vectors use the type of the vectors, bfloat16 under autocast, as attention's products with values do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.backend import first_derivative, multiply_rows, sum_weighted_rows, without_autocast
from treenet.layers.scaled_dot_product import merge_heads, split_heads
from treenet.structure import BranchMaps, TreeStructure
from treenet.structure.branches import BranchMatrices, Entries, EntryOrder, PathMaps

if TYPE_CHECKING:
    from treenet.config import TreeAttentionConfig


class _ReplaceNodes(torch.autograd.Function):
    """Replaces the nodes by sums of vectors [B, S, D] with `weights` [W, E], plus `embedding` [B, N, W, K]."""

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
    @first_derivative
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
    @first_derivative
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


class HierarchicalAccumulation(nn.Module):
    """Replaces node vectors by accumulations over their subtrees; one per attention module.

    `accumulate_on` (appendix 7.3):
    - "value": equations 16 and 23.
    - "key": the same on the keys; values are left as projected.
    - "scores": the affinities of a query with the nodes are accumulated by U and V from its affinities with leaves and
      nodes. They are scalars: hierarchical embeddings, vectors of a head's width, do not apply. Since q.k is linear in k,
      this equals keys accumulated without embeddings, and so it is computed.
    """

    def __init__(self, d_model: int, num_heads: int, config: TreeAttentionConfig):
        super().__init__()
        self.rule = config.accumulation_rule
        self.accumulate_on = config.accumulate_on
        self.num_heads = num_heads
        d_head = d_model // num_heads
        # Layer inputs have about unit variance, so N(0, 1/D) gives |w_j| of about 1. A node over one leaf starts near its scale.
        # Wider nodes start smaller, since the signs of w differ. Zeros would hide the trees at first.
        num_weights = num_heads if config.leaf_weights == "per_head" else 1
        self.leaf_weight = nn.Parameter(torch.empty(d_model, num_weights).normal_(std=d_model**-0.5))
        # A row [v; h] then has norm 1 beside projected values of norm sqrt(K), so it is only a bias.
        self.embeds = config.hierarchical_embeddings and config.accumulate_on != "scores"
        if self.embeds:
            for name, rows in (("vertical", config.vertical_rows), ("horizontal", config.horizontal_rows)):
                table = torch.empty(rows, d_head // 2).normal_(std=d_head**-0.5)
                self.register_parameter(name, nn.Parameter(table))

    def forward(self, states: Tensor, keys: Tensor, values: Tensor, structure: TreeStructure) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, S, D], with the accumulated ones at the nodes.

        Keys and values were projected from `states` [B, S, D], which also give w = L u.
        """
        if self.accumulate_on == "value":
            return keys, self.accumulate(states, values, structure)
        return self.accumulate(states, keys, structure), values

    def accumulate(self, states: Tensor, vectors: Tensor, structure: TreeStructure) -> Tensor:
        """Replace node rows of `vectors` [B, S, D] by N-bar' (equation 10); leaf rows stay.

        It computes at least in float32, except for the product of compact trees with the vectors.
        """
        branches, given = structure.branches, vectors.dtype
        dtype = torch.promote_types(given, torch.float32)
        with without_autocast(vectors.device):
            if isinstance(branches, BranchMatrices):
                weights = self._weigh_leaves(states.to(dtype))[:, : structure.num_leaves].transpose(1, 2)
                table = build_table(self.vertical, self.horizontal, branches) if self.embeds else None
                return accumulate_densely(vectors, weights, table, branches, self.num_heads, self.rule == "paper")
            weights = self._weigh_branches(states.to(dtype), branches)  # [W, P]
            pair_weights = sum_pairs(weights, branches)  # [W, Q]
            embedding = self._embed(weights, pair_weights, structure) if self.embeds else None
            entries = torch.cat([weights, pair_weights], dim=1)
            return _ReplaceNodes.apply(vectors.to(dtype), entries, embedding, branches.entries, self.num_heads).to(given)

    def _weigh_branches(self, states: Tensor, branches: BranchMaps) -> Tensor:
        """Return a_ij [W, P]. The rule 'paper' divides a branch by its nodes and the leaf, 'released' by its nodes alone."""
        leaf_weights = self._weigh_leaves(states).flatten(0, 1).t()  # [W, B * S]
        count = branches.height + 1 if self.rule == "paper" else branches.height
        return leaf_weights.index_select(1, branches.leaf) / (count * branches.length)

    def _weigh_leaves(self, states: Tensor) -> Tensor:
        """Return w = L u of all positions [B, S, W]. Dropping those of the nodes is cheaper than slicing the states."""
        return states @ self.leaf_weight.to(states.dtype)

    def _embed(self, weights: Tensor, pair_weights: Tensor, structure: TreeStructure) -> Tensor:
        """Return the sum of the embeddings E of equation 9 in each node [B, N, W, K]. Heads of the same leaf weights share it."""
        branches, num_nodes = structure.branches, structure.node_pad_mask.numel()
        rows = take_rows(self.vertical.to(weights.dtype), torch.arange(branches.max_height, device=weights.device))
        if self.rule == "paper":  # by the height of t above j: the nodes of a branch take the rows up to its own height
            vertical = add_up(weights, branches.height_cell, num_nodes, branches.max_height) @ rows.cumsum(0)
        else:  # by the depth of t, which is the same for all leaves
            vertical = add_up(pair_weights, branches.depth_cell, num_nodes, branches.max_height) @ rows
        table = self.horizontal.to(weights.dtype)
        if branches.paths is None:
            num_rows = min(branches.max_length, len(table))
            cell = branches.rank_node * num_rows + branches.rank.clamp(max=num_rows - 1)
            use = add_up(weights.index_select(1, branches.rank_branch), cell, num_nodes, num_rows)
            horizontal = use @ table[:num_rows]
        else:
            horizontal = sum_paths(weights, table, branches.paths, branches.max_height)
        embedding = torch.cat([vertical, horizontal], dim=1).view(len(weights), *structure.node_pad_mask.shape, -1)
        return embedding.permute(1, 2, 0, 3)


def take_rows(table: Tensor, count: Tensor) -> Tensor:
    """Return row count - 1 of a table for each of the counts [C]: [C, K / 2]. A count past the table takes its last row."""
    return F.embedding(count.clamp(max=len(table) - 1), table)


def add_up(weights: Tensor, cell: Tensor, num_nodes: int, num_rows: int) -> Tensor:
    """Sum weights [W, E] by cells [E] of [B * N, rows]: [W * B * N, rows]."""
    cells = weights.new_zeros(len(weights), num_nodes * num_rows)
    return cells.scatter_add(1, cell.expand(len(weights), -1), weights).view(-1, num_rows)


def sum_paths(weights: Tensor, table: Tensor, paths: PathMaps, max_height: int) -> Tensor:
    """Multiply weights of branches [W, P] with the sums of the horizontal rows of their nodes: [W * B * N, K / 2]."""
    num_weights, num_branches = weights.shape
    rows = take_rows(table, paths.rank)
    padded = rows.new_zeros(paths.num_leaves * max_height, rows.shape[1]).index_copy(0, paths.cell, rows)
    sums = padded.unflatten(0, (-1, max_height)).cumsum(1).flatten(0, 1)
    first = paths.first + num_branches * torch.arange(num_weights, device=weights.device)[:, None]
    index = paths.cell.repeat(num_weights)
    return F.embedding_bag(index, sums, first.flatten(), mode="sum", per_sample_weights=weights.flatten())


def sum_pairs(weights: Tensor, branches: BranchMaps) -> Tensor:
    """Map weights of branches [W, P] to those of pairs (i, t) [W, Q]: the sum over the branches of i that pass through t.

    The running sums start again at every example of the batch. One sum over all would spread an infinite or NaN weight, and the
    rounding of a huge one, from an example to its batch-mates.
    """
    cells = weights.new_zeros(len(weights), math.prod(branches.running_shape), dtype=torch.float64)
    cells = cells.index_copy(1, branches.running, weights.double()).unflatten(1, branches.running_shape)
    running = cells.cumsum(2).flatten(1)
    difference = running.index_select(1, branches.pair_last) - running.index_select(1, branches.pair_first)
    return difference.to(weights.dtype)
