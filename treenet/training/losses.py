"""Label-smoothed negative log-likelihood. Shapes: B batch, T target, V vocabulary."""

from typing import NamedTuple

from torch import Tensor

from treeproc.schema import PAD_ID


class LossSums(NamedTuple):
    """Sums over the target tokens of a batch, float32 scalars; divide by the token count for a mean."""

    loss: Tensor
    nll: Tensor


def label_smoothed_nll(logits: Tensor, targets: Tensor, smoothing: float) -> LossSums:
    """Cross-entropy against (1 - smoothing) on the target and smoothing / V on every piece, padding left out.

    logits [B, T, V], targets [B, T] int64. With z the logits, -log p_i = logsumexp(z) - z_i, so the mean over
    the vocabulary needs no tensor of log-probabilities: the largest of a step is not kept twice.
    """
    logits = logits.float()
    counted = targets != PAD_ID
    normaliser = logits.logsumexp(dim=-1)
    nll = normaliser - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    uniform = normaliser - logits.mean(dim=-1)
    loss = (1 - smoothing) * nll + smoothing * uniform
    return LossSums(loss.masked_fill(~counted, 0).sum(), nll.detach().masked_fill(~counted, 0).sum())
