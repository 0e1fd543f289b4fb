"""Constituent attention (Wang et al., 2019): link probabilities of neighbours, and the prior of attention that they give.

Shapes: B batch, L leaves, D model. Between L leaves there are L - 1 links; link k joins leaves k and k + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.linear import build_linear

if TYPE_CHECKING:
    from treenet.config import ConstituentConfig

# The released code adds this below its square root. A leaf then keeps almost no attention to itself.
_RELEASED_EPSILON = 1e-9


class NeighbouringAttention(nn.Module):
    """Neighbouring attention and the hierarchical constraint of one layer, shared by its heads."""

    def __init__(self, d_model: int, config: ConstituentConfig):
        super().__init__()
        self.scale = config.neighbour_scale or d_model
        self.norm = nn.LayerNorm(d_model)
        self.queries_keys = build_linear(d_model, d_model, num_blocks=2)

    def forward(self, x: Tensor, links: Tensor, below: Tensor | None = None) -> Tensor:
        """Return probabilities a^l [B, L - 1] that the leaves of a link are in one constituent, at least in float32.

        x [B, L, D]; `links` [B, L - 1] is True between two real leaves; `below` is a^{l-1} of the layer below. The softmax over
        two neighbours is a sigmoid of the difference of their scores, and its logarithm does not underflow. At the ends of a
        sentence it is over one neighbour, and is 1.
        """
        queries, keys = self.queries_keys(self.norm(x)).chunk(2, dim=2)
        queries, keys = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (queries, keys))
        ahead = (queries[:, :-1] * keys[:, 1:]).sum(2) / self.scale  # s_{i,i+1}
        back = (queries[:, 1:] * keys[:, :-1]).sum(2) / self.scale  # s_{i+1,i}
        preference = ahead[:, 1:] - back[:, :-1]  # s_{i,i+1} - s_{i,i-1} of the leaves i between two links
        to_next = F.pad(F.logsigmoid(preference), (1, 0))[:, : links.shape[1]]  # none of a single leaf
        to_previous = F.pad(F.logsigmoid(-preference).masked_fill(~links[:, 1:], 0.0), (0, 1))[:, : links.shape[1]]
        link_probs = (0.5 * (to_next + to_previous)).exp()  # the square root of p_{i,i+1} p_{i+1,i}
        return link_probs if below is None else below + (1 - below) * link_probs


def constituent_prior(link_probs: Tensor, layer: int, config: ConstituentConfig) -> Tensor:
    """Return C [B, L, L], the product of a_k over the links between two leaves.

    `a` [B, L - 1] is that of layer `layer`, counted from 0. The product is the exponential of a sum of logarithms. The sum is a
    difference of two cumulative sums, which never grow: C_ij = exp(-|S_i - S_j|). A leaf and itself have the empty product, 1, or
    the value of the released code.
    """
    sums = F.pad(link_probs.clamp_min(torch.finfo(link_probs.dtype).tiny).log().cumsum(1), (1, 0))
    prior = (-(sums[:, :, None] - sums[:, None, :]).abs()).exp()
    if config.diagonal == "one":
        return prior
    own = 1 - (1 - _RELEASED_EPSILON**0.5) ** (layer + 1)
    return prior.masked_fill(torch.eye(prior.shape[1], dtype=torch.bool, device=prior.device), own)
