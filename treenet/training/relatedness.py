"""Losses and correlations of models that score pairs of sentences. Shapes: P pairs, K scores."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from treenet.data.pairs import PairBatch
from treenet.layers.pair_head import expected_score, score_distribution
from treenet.models import ClassLogits
from treenet.training.losses import LossSums
from treenet.training.step import Stepper


class RelatednessStepper(Stepper):
    """Updates of a model of pairs: the loss is KL(p || q), of the scores' distribution p and the predicted one q."""

    output = "forward"
    ties_embeddings = False

    def sum_losses(self, batch: PairBatch, first: ClassLogits, second: None = None) -> LossSums:
        log_probs = first.examples.log_softmax(1)
        wanted = score_distribution(batch.scores).to(log_probs.dtype)
        nll = -(wanted * log_probs).sum()
        return LossSums(nll + torch.special.xlogy(wanted, wanted).sum(), nll)

    def count_right(self, batch: PairBatch, output: ClassLogits) -> Sequence[Tensor]:
        return moments(expected_score(output.examples.double()), batch.scores)


def moments(predicted: Tensor, scores: Tensor) -> list[Tensor]:
    """Sums over pairs that Pearson's correlation and the squared error follow from: 1, x, y, x^2, y^2, x y."""
    return [torch.ones_like(scores).sum(), *(x.sum() for x in (predicted, scores, predicted**2, scores**2, predicted * scores))]


def summarize_moments(sums: Tensor) -> dict[str, float]:
    """Pearson's correlation, 0 where a side does not vary, and the mean squared error."""
    count, x, y, xx, yy, xy = sums.tolist()
    deviations = math.sqrt(max(0.0, count * xx - x * x) * max(0.0, count * yy - y * y))
    pearson = (count * xy - x * y) / deviations if deviations > 1e-9 * count * count else 0.0
    return {"pearson": pearson, "mse": (xx - 2 * xy + yy) / count}
