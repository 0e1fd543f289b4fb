"""Hierarchical accumulation (sections 4.1 and 4.2) as a layer: its parameters, and the choice of an implementation.

`treenet.paper` has the equations. Two fast algorithms equal them: `accumulation_by_lists.py`, and for compact trees on
accelerators `accumulation_by_matrices.py`.

Shapes: B batch, L leaves, N nodes, S = L + N positions, D model, H heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treenet.layers import reference
from treenet.layers.accumulation_by_lists import accumulate_by_lists
from treenet.layers.accumulation_by_matrices import accumulate_by_matrices
from treenet.layers.backend import without_autocast
from treenet.structure import TreeStructure
from treenet.structure.branches import BranchMaps, BranchMatrices

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
        self.by_equations = config.implementation == "reference"
        self.num_heads = num_heads
        d_head = d_model // num_heads
        # Layer inputs have about unit variance, so N(0, 1/D) gives |w_j| of about 1. A node over one leaf starts near its scale.
        # Wider nodes start smaller, since the signs of w differ. Zeros would hide the trees at first.
        num_weights = num_heads if config.leaf_weights == "per_head" else 1
        self.leaf_weight = nn.Parameter(torch.empty(d_model, num_weights).normal_(std=d_model**-0.5))
        # A row [v; h] then has norm 1 beside projected values of norm sqrt(K), so it is only a bias.
        self.embeds = config.hierarchical_embeddings and config.accumulate_on != "scores"
        self.vertical: nn.Parameter
        self.horizontal: nn.Parameter
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
        tables = (self.vertical, self.horizontal) if self.embeds else None
        with without_autocast(vectors.device):
            # Dropping the weights of nodes is cheaper than slicing the states.
            weights = states.to(dtype) @ self.leaf_weight.to(dtype)  # w = L u [B, S, 1 or H]
            if self.by_equations:
                return reference.accumulate(vectors.to(dtype), weights, tables, structure, self.num_heads, self.rule).to(given)
            if isinstance(branches, BranchMatrices):
                if branches.rule != self.rule:
                    raise ValueError(f"trees prepared with accumulation_rule={branches.rule} cannot serve one of {self.rule}")
                return accumulate_by_matrices(vectors, weights, tables, branches, self.num_heads)
            assert isinstance(branches, BranchMaps)  # `prepare` makes matrices of depths
            return accumulate_by_lists(vectors.to(dtype), weights, tables, branches, self.num_heads, self.rule).to(given)
