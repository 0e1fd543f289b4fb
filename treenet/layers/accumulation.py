"""Hierarchical accumulation (sections 4.1 and 4.2, equations 5 to 10) without the tensor S.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads, K = D / H, W = leaf weights a leaf (1 or H).

Equations 5 to 8 are linear in the vectors of leaves and nodes. The weight of leaf j in node i is
`a_ij = w_j / (span length of i * |C_j^i|)`; node t of i's subtree lies on the branches of its own leaves, so its weight
in node i is the sum of a_ij over the span of t. Two small matrices, [N, L] and [N, N], replace S in R^{(m+1) x n x d}, and
one product of width D serves all heads. Nothing cancels, unlike with running sums along the branches.

Equation 10 adds, for every node t of a branch, row |V_j^t| of the vertical table to the first K / 2 dimensions and row
|H_j^t| of the horizontal table to the last K / 2. Levels 1 to |V_j^i| occur once each on a branch: their sum is a prefix
sum of the vertical table. The horizontal rows of all branches are counted by one sparse sum.
"""

import torch
from torch import Tensor, nn

from treenet.config import TreeAttentionConfig
from treenet.structure import TreeStructure


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
        leaves, nodes = structure.num_leaves, vectors.shape[1] - structure.num_leaves
        dtype = torch.promote_types(vectors.dtype, torch.float32)
        with torch.autocast(vectors.device.type, enabled=False):
            operators = structure.operators(self.rule, dtype)
            # [B, W, 1, L]: projecting all positions and dropping the nodes' is cheaper than slicing the states
            w = (states.to(dtype) @ self.leaf_weight.to(dtype)).transpose(1, 2)[:, :, None, :leaves]
            on_leaves = w * operators.average[:, None]  # [B, W, N, L]
            on_nodes = (on_leaves @ operators.leaf_in_node[:, None]) * operators.node_in_subtree[:, None]  # [B, W, N, N]
            split = vectors.to(dtype).unflatten(2, (w.shape[1], -1)).transpose(1, 2)  # [B, W, S, D / W]
            node_vectors = torch.cat([on_leaves, on_nodes], dim=3) @ split
            node_vectors = node_vectors.transpose(1, 2).reshape(len(vectors), nodes, self.num_heads, -1)
            if self.embeds:
                node_vectors = node_vectors + self._embed(on_leaves, on_nodes, operators.level, structure).transpose(1, 2)
        leaf_vectors = vectors.split((leaves, nodes), dim=1)[0]
        return torch.cat([leaf_vectors, node_vectors.flatten(2).to(vectors.dtype)], dim=1)

    def _embed(self, on_leaves: Tensor, on_nodes: Tensor, level: Tensor, structure: TreeStructure) -> Tensor:
        """[B, W, N, K]: what the embeddings E of equation 9 add to each node."""
        if self.rule == "paper":
            rows = _clamped_rows(self.vertical, structure.max_height).to(on_leaves.dtype).cumsum(0)
            index = level[:, None].expand_as(on_leaves)
            counts = on_leaves.new_zeros(*on_leaves.shape[:3], structure.max_height).scatter_add(3, index, on_leaves)
            vertical = counts @ rows
        else:  # the depth of a node is the same for each of its leaves: a vector a node, accumulated like any other
            rows = _clamped_rows(self.vertical, structure.max_depth + 1).to(on_leaves.dtype)
            vertical = on_nodes @ rows[structure.depth][:, None]
        flat = on_leaves.transpose(0, 1).flatten(1)  # [W, B * N * L]
        index = structure.horizontal_target.expand(len(flat), -1)
        counts = torch.zeros_like(flat).scatter_add(1, index, flat.index_select(1, structure.horizontal_branch))
        counts = counts.view(on_leaves.transpose(0, 1).shape).transpose(0, 1)  # [B, W, N, ranks]
        horizontal = counts @ _clamped_rows(self.horizontal, structure.num_leaves).to(on_leaves.dtype)
        return torch.cat([vertical, horizontal], dim=3)


def _clamped_rows(table: Tensor, count: int) -> Tensor:
    """Rows of the counts 1 to `count`: a count past the table uses its last row."""
    if count <= len(table):
        return table[:count]
    return torch.cat([table, table[-1:].expand(count - len(table), -1)])
