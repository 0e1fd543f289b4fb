"""Self-attention with relative positions in a tree: differences of depth (Sartran et al., 2022; Dai et al., 2019).

    e_ij = ((q_i + u) k_j + (q_i + v) W R_d) / sqrt(K),    d = depth of i - depth of j

R_d is the sinusoid of position d; u, v and W are learned in every layer. As in the authors' code, d is cut to NEAREST..FARTHEST.

Shapes: B batch, A actions, D model, H heads, K = D / H, R relative positions.
"""

import math

import torch
from torch import Tensor, nn

from treenet.layers.attention import SelfAttention
from treenet.layers.linear import build_linear

NEAREST, FARTHEST = -1, 62


def depth_differences(depth: Tensor) -> Tensor:
    """Return the row of the relative position of every pair [B, A, A], from 0, for depths [B, A]."""
    return (depth[:, :, None] - depth[:, None, :]).clamp(NEAREST, FARTHEST) - NEAREST


class DepthAttention(SelfAttention):
    """Self-attention within a mask, by relative depth."""

    def __init__(self, d_model: int, num_heads: int, dropout: float):
        super().__init__(d_model, num_heads, dropout)
        self.positions = build_linear(d_model, d_model, bias=False)
        self.content_bias, self.position_bias = (nn.Parameter(torch.zeros(num_heads, 1, d_model // num_heads)) for _ in range(2))

    def forward(self, x: Tensor, attend_mask: Tensor, difference: Tensor, sinusoids: Tensor) -> Tensor:  # type: ignore[override]
        """Map x [B, A, D] -> [B, A, D], with `attend_mask` and `difference` [B, A, A], and the sinusoids [R, D] of its rows."""
        queries, keys, values = map(self.split_heads, self.project(x))
        relative = self.split_heads(self.positions(sinusoids)[None])  # [1, H, R, K]
        by_row = (queries + self.position_bias) @ relative.transpose(2, 3) / math.sqrt(queries.shape[3])
        bias = by_row.gather(3, difference[:, None].expand(-1, self.num_heads, -1, -1))
        return self.attend(queries + self.content_bias, keys, values, bias.masked_fill(~attend_mask[:, None], -torch.inf))
