"""Label-smoothed negative log-likelihood and R-Drop. Shapes: B batch, T target, V vocabulary."""

from typing import NamedTuple

import torch
from torch import Tensor

from treeproc.schema import PAD_ID


class LossSums(NamedTuple):
    """Sums over the target tokens of a batch, float32 scalars; divide by the token count for a mean."""

    loss: Tensor
    nll: Tensor


class _SmoothedCrossEntropy(torch.autograd.Function):
    """Sum of the smoothed loss. The gradient is written in one tensor of the size of the logits, the largest of a step."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, smoothing: float, ignored: int) -> tuple[Tensor, Tensor]:
        counted = targets != ignored
        targets = targets.masked_fill(~counted, 0)
        # With z the logits, -log p_i = logsumexp(z) - z_i: no tensor of log-probabilities is needed.
        normaliser = logits.logsumexp(dim=-1)
        nll = normaliser - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        uniform = normaliser - logits.mean(dim=-1)
        loss = (1 - smoothing) * nll + smoothing * uniform
        ctx.save_for_backward(logits, targets, normaliser, counted)
        ctx.smoothing = smoothing
        nll_sum = nll.masked_fill(~counted, 0).sum()
        ctx.mark_non_differentiable(nll_sum)
        return loss.masked_fill(~counted, 0).sum(), nll_sum

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _grad_nll: Tensor):
        logits, targets, normaliser, counted = ctx.saved_tensors
        index = targets.unsqueeze(-1)
        grad = (logits - normaliser.unsqueeze(-1)).exp_().sub_(ctx.smoothing / logits.shape[-1])
        grad.scatter_add_(-1, index, grad.new_full((), ctx.smoothing - 1).expand(index.shape))
        return grad.mul_(grad_loss).masked_fill_(~counted.unsqueeze(-1), 0), None, None, None


def label_smoothed_nll(logits: Tensor, targets: Tensor, smoothing: float, ignored: int = PAD_ID) -> LossSums:
    """Cross-entropy against (1 - smoothing) on the target and smoothing / V on every piece; targets `ignored` are left out.

    logits [..., V], targets [...] int64. Differentiable in the loss; `nll` is for reading.
    """
    return LossSums(*_SmoothedCrossEntropy.apply(logits.float(), targets, smoothing, ignored))


def symmetric_divergence(first: Tensor, second: Tensor, targets: Tensor, ignored: int = PAD_ID) -> Tensor:
    """Sum over the target tokens of (KL(p || q) + KL(q || p)) / 2, p and q the softmax of two logits [..., V]."""
    counted = targets != ignored
    log_p, log_q = (logits[counted].float().log_softmax(dim=-1) for logits in (first, second))
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()


def r_drop_loss(
    first: Tensor, second: Tensor, targets: Tensor, smoothing: float, alpha: float, ignored: int = PAD_ID
) -> LossSums:
    """R-Drop (Wu et al., 2021): both passes' loss, plus alpha times their divergence. `nll` is the mean of the passes."""
    one, other = (label_smoothed_nll(logits, targets, smoothing, ignored) for logits in (first, second))
    loss = one.loss + other.loss + alpha * symmetric_divergence(first, second, targets, ignored)
    return LossSums(loss, (one.nll + other.nll) / 2)
