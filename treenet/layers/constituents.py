"""Losses and priors of constituents: constituent attention, and tree regularisation.

Constituent attention (Wang et al., 2019): link probabilities of neighbours, and the prior of attention that they give. Between L
leaves there are L - 1 links; link k joins leaves k and k + 1.

Tree regularisation (Nandi, Manning and Murty, 2024): states of constituents shall not depend on what precedes them. orth(x, y) is
the part of x that is orthogonal to y. A span [i, j) has the score

    SCIN(i, j) = |orth(h_{j-1}, h_{i-1})| + |orth(h_j, h_{j-1})|

where a norm with a state before the first or after the last leaf is 0. The score of splitting [i, j) at k is SCIN(i, k) +
SCIN(k, j). The loss of a span is the cross-entropy of its split in the tree under the softmax of the scores of its splits.
The part |orth(h_j, h_{j-1})| is the same for all splits of a span. It cancels in the softmax, and is not computed. The loss is
the mean over the spans of a sentence. Sentences are weighted by their pieces, so micro-batches do not change the mean; the
paper's are not weighted. Several trees of an example count as sentences.

Shapes: B batch, L leaves, D model, K entries of a state, S spans, M possible splits of all spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treenet.layers.backend import without_autocast
from treenet.layers.core import build_linear
from treenet.structure import SplitPoints

if TYPE_CHECKING:
    from treenet.config import ConstituentConfig


# The released code adds this below its square root. A leaf then keeps almost no attention to itself.
_RELEASED_EPSILON = 1e-9


class NeighbouringAttention(nn.Module):
    """Neighbouring attention and the hierarchical constraint of one layer, shared by its heads.

    The d of s_{i,i+1} is d_model; the released code divides by 256. That code adds 1e-9 under its square root and its logarithm,
    about 3e-5 a layer, and nothing is added here. Its diagonal C_ii is 1 - (1 - sqrt(1e-9))^l (`model.constituents.diagonal:
    official`).
    """

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


# Least squared sine of the angle of two states. Below it, float32 computes only noise, and the gradient of the root explodes.
_LEAST_SINE_SQUARED = 1e-6


def tree_reg_losses(states: Tensor, points: SplitPoints) -> Tensor:
    """Return the mean loss of the spans of every example [B], float32 at least; 0 without spans. `states` is [B, L, K]."""
    with without_autocast(states.device):
        scores = split_scores(states.to(torch.promote_types(states.dtype, torch.float32)), points)
        losses = _log_sum_exp(scores, points.span, len(points.gold)) - scores[points.gold]
        return scores.new_zeros(len(states)).index_add(0, points.owner, losses * points.share.to(scores.dtype))


def split_scores(states: Tensor, points: SplitPoints) -> Tensor:
    """Return the scores of all splits [M], less what all splits of a span have in common."""
    unit = F.normalize(states, dim=2)
    sine_squared = 1 - (unit @ unit.transpose(1, 2)).square()
    # Entry (b, i, j) is |orth(h_j, h_i)|.
    norms = states.norm(dim=2)[:, None] * sine_squared.clamp(min=_LEAST_SINE_SQUARED).sqrt()
    left, inside = points.start - 1, points.split - 1
    on_left = norms[points.example, left.clamp(min=0), inside].where(left >= 0, 0.0)
    return on_left + norms[points.example, inside, points.split] + norms[points.example, inside, points.end - 1]


def _log_sum_exp(scores: Tensor, span: Tensor, num_spans: int) -> Tensor:
    """Return log sum exp of the scores [M] of each span [S]."""
    top = scores.new_full((num_spans,), -torch.inf).scatter_reduce(0, span, scores.detach(), "amax")
    return top + scores.new_zeros(num_spans).index_add(0, span, (scores - top[span]).exp()).log()
