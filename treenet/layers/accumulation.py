"""Hierarchical accumulation (sections 4.1 and 4.2, equations 5 to 10) without the tensor S.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights a leaf (1 or H),
P branches (node i, leaf j), Q pairs (node i, node t of its subtree); see `treenet.structure`.

Equations 5 to 8 are linear in the vectors of leaves and nodes. The weight of leaf j in node i is
`a_ij = w_j / (span length of i * |C_j^i|)`; node t of i's subtree lies on the branches of its own leaves, so its weight
in node i is the sum of a_ij over the span of t, a difference of two running sums. These P + Q scalars replace S in
R^{(m+1) x n x d}; the nodes are one product with the vectors for all heads, by matrices [N, S] for sentences and as a sum
over the P + Q entries for documents.

Equation 10 adds, for every node t of a branch, row |V_j^t| of the vertical table to the first K / 2 dimensions and row
|H_j^t| of the horizontal table to the last K / 2. A branch (i, j) is the lower part, |V_j^i| nodes long, of the path above
leaf j: running sums along the path hold the rows of all its branches, P vectors of width K for all nodes and heads.

Precision. All of this runs in float32 at least, autocast or not; only inputs and outputs are rounded. Vectors are added,
never subtracted, so that nothing cancels; the running sums that are subtracted are scalars, kept in float64. TF32, when it
is switched on for matrix products, rounds weights and vectors to 11 bits once each, no worse than bf16 inputs are: it may
stay on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.path_sums import sum_along_paths
from treenet.layers.replace_nodes import replace_nodes
from treenet.structure import BranchMaps, TreeStructure

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
        # Layer inputs have about unit variance, so that N(0, 1/D) gives |w_j| of about 1: nodes start at the scale
        # of leaves. Zeros would hide the trees at first.
        num_weights = num_heads if config.leaf_weights == "per_head" else 1
        self.leaf_weight = nn.Parameter(torch.empty(d_model, num_weights).normal_(std=d_model**-0.5))
        # A row [v; h] then has norm 1 beside projected values of norm sqrt(K): a bias, not the signal.
        self.embeds = config.hierarchical_embeddings and config.accumulate_on != "scores"
        if self.embeds:
            self.vertical = nn.Parameter(torch.empty(config.vertical_rows, d_head // 2).normal_(std=d_head**-0.5))
            self.horizontal = nn.Parameter(torch.empty(config.horizontal_rows, d_head // 2).normal_(std=d_head**-0.5))

    def forward(self, states: Tensor, keys: Tensor, values: Tensor, structure: TreeStructure) -> tuple[Tensor, Tensor]:
        """Keys and values [B, S, D] with the accumulated ones in place of the nodes'.

        `states` [B, S, D] is what keys and values were projected from; it gives w = L u.
        """
        if self.accumulate_on == "value":
            return keys, self.accumulate(states, values, structure)
        return self.accumulate(states, keys, structure), values

    def accumulate(self, states: Tensor, vectors: Tensor, structure: TreeStructure) -> Tensor:
        """Node rows of `vectors` [B, S, D] become N-bar' (equation 10); leaf rows stay. Accumulates in float32 at least."""
        nodes, branches, given = structure.num_nodes, structure.branches, vectors.dtype
        dtype = torch.promote_types(given, torch.float32)
        with torch.autocast(vectors.device.type, enabled=False):
            weights = self._weigh_branches(states.to(dtype), branches)  # [W, P]
            entries = torch.cat([weights, sum_pairs(weights, branches)], dim=1)  # [W, P + Q]
            embedding = self._embed(weights, branches).unflatten(0, (-1, nodes)) if self.embeds else None  # [B, N, W, K]
            vectors = vectors.to(dtype)
            if branches.sparse:
                out = self._multiply_sparse(entries, vectors, embedding, structure)
            else:
                matrix = entries.new_zeros(len(entries), len(vectors) * nodes * vectors.shape[1])
                matrix = matrix.index_copy(1, branches.cell, entries)
                matrix = matrix.view(len(entries), len(vectors), nodes, -1).transpose(0, 1)  # [B, W, N, S]
                out = replace_nodes(vectors, matrix, embedding, self.num_heads)
        return out.to(given)

    def _weigh_branches(self, states: Tensor, branches: BranchMaps) -> Tensor:
        """a_ij [W, P]. The rule 'paper' divides a branch by its nodes and the leaf, 'released' by its nodes alone."""
        # Projecting all positions and dropping the nodes' is cheaper than slicing the states.
        leaf_weights = (states @ self.leaf_weight.to(states.dtype)).flatten(0, 1).t()  # [W, B * S]
        count = branches.height + 1 if self.rule == "paper" else branches.height
        return leaf_weights.index_select(1, branches.leaf) / (count * branches.length)

    def _embed(self, weights: Tensor, branches: BranchMaps) -> Tensor:
        """What the embeddings E of equation 9 add to each node [B * N, W, K]; heads of the same leaf weights share it."""
        level = branches.path_height if self.rule == "paper" else branches.path_depth
        rows = [read_rows(self.vertical, level), read_rows(self.horizontal, branches.path_rank)]
        rows = sum_along_paths(torch.cat(rows, dim=1).to(weights.dtype), branches)  # of all nodes on a branch
        return sum_rows(rows, branches.on_path, weights, branches.first).transpose(0, 1)

    def _multiply_sparse(self, entries: Tensor, vectors: Tensor, embedding: Tensor | None, structure: TreeStructure) -> Tensor:
        """What `replace_nodes` computes, from entries [W, P + Q] one by one: [B, S, D]."""
        branches, num_weights = structure.branches, len(entries)
        rows = vectors.reshape(vectors.shape[0] * vectors.shape[1] * num_weights, -1)  # [B * S * W, D / W]
        entries = entries.index_select(1, branches.order)
        head = torch.arange(num_weights, device=entries.device)[:, None]
        index = (branches.position * num_weights + head).flatten()
        first = (branches.first_entry + entries.shape[1] * head).flatten()
        nodes = sum_rows(rows, index, entries.reshape(1, -1), first)  # [1, W * B * N, D / W]
        nodes = nodes.view(num_weights, len(vectors), structure.num_nodes, -1).permute(1, 2, 0, 3).flatten(2)
        if embedding is not None:
            nodes = (nodes.unflatten(2, (self.num_heads, -1)) + embedding).flatten(2)
        return torch.cat([vectors.split((structure.num_leaves, structure.num_nodes), dim=1)[0], nodes], dim=1)


def read_rows(table: Tensor, count: Tensor) -> Tensor:
    """Rows of the counts [P] less 1 of a table: [P, K / 2]. A count past the table uses its last row."""
    return F.embedding(count.clamp(max=len(table) - 1), table)


def sum_pairs(weights: Tensor, branches: BranchMaps) -> Tensor:
    """Weights of branches [W, P] -> of pairs (i, t) [W, Q]: the sum over the branches of i that pass through t."""
    running = F.pad(weights.double().cumsum(1), (1, 0))
    difference = running.index_select(1, branches.pair_last) - running.index_select(1, branches.pair_first)
    return difference.to(weights.dtype)


def sum_rows(rows: Tensor, index: Tensor, weights: Tensor, first: Tensor) -> Tensor:
    """For each of M bags, items first[m] up to the next bag's: sum of weights[w, e] * rows[index[e]].

    rows [R, K], index [E], weights [W, E], first [M] -> [W, M, K].
    """
    num_weights, num_items = weights.shape
    if num_weights > 1:
        index = index.repeat(num_weights)
        first = (first + num_items * torch.arange(num_weights, device=first.device)[:, None]).flatten()
    out = F.embedding_bag(index, rows, first, mode="sum", per_sample_weights=weights.flatten())
    return out.view(num_weights, -1, rows.shape[1])
