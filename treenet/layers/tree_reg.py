"""Tree regularisation (Nandi, Manning and Murty, 2024): states of constituents shall not depend on what precedes them.

orth(x, y) is the part of x that is orthogonal to y. A span [i, j) has the score

    SCIN(i, j) = |orth(h_{j-1}, h_{i-1})| + |orth(h_j, h_{j-1})|

where a norm with a state before the first or after the last leaf is 0. The score of splitting [i, j) at k is SCIN(i, k) +
SCIN(k, j). The loss of a span is the cross-entropy of its split in the tree under the softmax of the scores of its splits.
|orth(h_j, h_{j-1})| is the same for all splits of a span. It cancels in the softmax, and is not computed.

Shapes: B batch, L leaves, K entries of a state, S spans, M possible splits of all spans.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from treenet.layers.autocast import without_autocast
from treenet.structure import SplitPoints

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
