"""Hierarchical accumulation (sections 4.1 and 4.2, equations 5 to 10) without the tensor S.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights per leaf (1 or H).
P are branches (node i, leaf j), Q are pairs (node i, node t of its subtree); see `treenet.structure`.

Equations 5 to 8 are linear in the vectors of leaves and nodes. The weight of leaf j in node i is
`a_ij = w_j / (span length of i * |C_j^i|)`. Node t of i's subtree is on the branches of the leaves of t. So its weight in node i
is the sum of a_ij over the span of t, a difference of two running sums.

These P + Q scalars replace S in R^{(m+1) x n x d}. The nodes are then one product with the vectors for all heads. Sentences use
matrices [N, S]; documents use a sum over the P + Q entries.

Equation 10 adds embeddings for every node t of a branch: row |V_j^t| of the vertical table in the first K / 2 dimensions, and row
|H_j^t| of the horizontal table in the last K / 2. The weighted counts of the rows in each node are scalars too. They are added up
in a matrix [B * N, rows]. Its product with the table serves all heads that share leaf weights.

Precision. All of this runs at least in float32, with or without autocast; only inputs and outputs are rounded. Vectors are added,
never subtracted, so that nothing cancels. The running sums that are subtracted are scalars in float64, each over one example of
the batch. TF32 may stay on for matrix products. It rounds weights and vectors to 11 bits once each, which is no worse than bf16
inputs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.accumulation_sums import accumulate_densely, build_table, replace_nodes
from treenet.layers.linear import generator_of
from treenet.layers.torch_internals import without_autocast
from treenet.structure import BranchMaps, TreeStructure
from treenet.structure.branches import BranchMatrices, PathMaps

if TYPE_CHECKING:
    from treenet.config import TreeAttentionConfig


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
        apart = generator_of("accumulation")
        num_weights = num_heads if config.leaf_weights == "per_head" else 1
        self.leaf_weight = nn.Parameter(torch.empty(d_model, num_weights).normal_(std=d_model**-0.5, generator=apart))
        # A row [v; h] then has norm 1 beside projected values of norm sqrt(K), so it is only a bias.
        self.embeds = config.hierarchical_embeddings and config.accumulate_on != "scores"
        if self.embeds:
            for name, rows in (("vertical", config.vertical_rows), ("horizontal", config.horizontal_rows)):
                table = torch.empty(rows, d_head // 2).normal_(std=d_head**-0.5, generator=apart)
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

        It accumulates at least in float32.
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
            return replace_nodes(vectors.to(dtype), entries, embedding, branches.entries, self.num_heads).to(given)

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
