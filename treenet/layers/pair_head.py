"""The head for two sentences of Tai et al. (2015), section 4.2. Shapes: P pairs, D model, K = NUM_SCORES."""

import torch
from torch import Tensor, nn

from treenet.layers.linear import build_linear

NUM_SCORES = 5


class PairHead(nn.Module):
    """Logits of the scores 1 to K from the product of two states and the distance between them, through a sigmoid layer."""

    def __init__(self, d_model: int, d_hidden: int):
        super().__init__()
        self.compare = build_linear(2 * d_model, d_hidden)
        self.scores = build_linear(d_hidden, NUM_SCORES)

    def forward(self, states: Tensor) -> Tensor:
        """Map states [2 P, D] to logits [P, K]. The states of a pair are neighbours."""
        left, right = states.unflatten(0, (-1, 2)).unbind(1)
        return self.scores(self.compare(torch.cat([left * right, (left - right).abs()], dim=1)).sigmoid())


def score_distribution(scores: Tensor) -> Tensor:
    """Return the distribution [P, K] over 1 to K whose mean is the score [P].

    It uses only the whole numbers next to the score.
    """
    return (1 - (scores[:, None] - _whole_scores(scores)).abs()).clamp(min=0)


def expected_score(logits: Tensor) -> Tensor:
    """Return the mean [P] of the softmax of logits [P, K]."""
    return logits.softmax(1) @ _whole_scores(logits)


def _whole_scores(like: Tensor) -> Tensor:
    return torch.arange(1, NUM_SCORES + 1, dtype=like.dtype, device=like.device)
