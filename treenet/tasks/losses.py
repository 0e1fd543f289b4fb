"""Label-smoothed negative log-likelihood and R-Drop. Shapes: B batch, T target, V vocabulary."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from treenet.config import OptimizerConfig
from treenet.layers.backend import CompiledOnGpu, first_derivative, product_dtype, without_autocast
from treeproc.shards.schema import PAD_ID

# Number of tokens whose logits are computed at once. On CPUs it is the fastest of 64 to 1,024 at 10,000 to 32,000 pieces.
# It keeps GPUs busy. If there were fewer, passes over the gradient of the table would cost more than those over logits.
_ROWS = 256
_LOGITS_GPU = 2**26
# Scales gradients of logits in float16. Most would be 0, or rounded to a bit or two: probabilities of 1 / 32,000 and less.
_FLOAT16_FACTOR = 256.0


class LossSums(NamedTuple):
    """Sums over the target tokens of a batch, scalars. Divide by the token count for a mean."""

    loss: Tensor
    nll: Tensor
    auxiliary: Tensor | None = None  # the model's own loss, a part of `loss`

    def totals(self) -> Tensor:
        """Return loss, nll and auxiliary loss, 0 for none, detached: [3] float64."""
        auxiliary = self.nll.new_zeros(()) if self.auxiliary is None else self.auxiliary
        return torch.stack([value.detach().double() for value in (self.loss, self.nll, auxiliary)])


def score_chunk(
    states: Tensor, table: Tensor, target: Tensor, smoothing: float, factor: float, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return sums of loss and nll of states [m, D] for targets [m, 1] and a table [V, D], and the gradient of the logits.

    The gradient [m, V] is multiplied by `factor`, in the type of the states.
    """
    logits = states @ table.t()
    logits = logits.to(torch.promote_types(states.dtype, torch.float32))
    score, mean, top = logits.gather(1, target), logits.mean(1, keepdim=True), logits.amax(1, keepdim=True)
    odds = logits.sub_(top).exp_()
    total = odds.sum(1, keepdim=True)
    normaliser = top + total.log()
    # The logits are z: -log p_i = logsumexp(z) - z_i. This needs no tensor of log-probabilities.
    nll = normaliser - score
    loss = ((1 - smoothing) * nll + smoothing * (normaliser - mean)).sum()
    if not with_grad:
        return loss, nll.sum(), None
    grad = odds.div_(total).sub_(smoothing / len(table))
    grad.scatter_add_(1, target, grad.new_full((), smoothing - 1).expand(target.shape))
    return loss, nll.sum(), (grad if factor == 1 else grad * factor).to(states.dtype)


_score_on_gpu = CompiledOnGpu(score_chunk)


class _ProjectedNll(torch.autograd.Function):
    """Sums of loss and nll of states [M, D] under the softmax of a table [V, D], computed a few tokens at a time.

    The gradients of a chunk are computed together with its sums, while its logits are in the cache. On CPUs, passes over [M, V]
    cost more than the products. So the same sums take little over half the time, and no tensor of that size is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, table: Tensor, targets: Tensor, smoothing: float, dtype: torch.dtype, with_grad: bool
    ) -> tuple[Tensor, Tensor]:
        rows = _ROWS if states.device.type == "cpu" else max(_ROWS, _LOGITS_GPU // len(table))
        rounded_table, rounded_states = table.to(dtype), states.to(dtype)
        loss_sum, nll_sum = states.new_zeros(2, dtype=torch.float64)
        if with_grad:
            grad_states, grad_table = torch.empty_like(states), torch.zeros_like(table)
        factor = _FLOAT16_FACTOR if dtype == torch.float16 else 1.0
        for first in range(0, len(states), rows):
            chunk, target = rounded_states[first : first + rows], targets[first : first + rows, None]
            loss, nll, grad = _score_on_gpu(chunk, rounded_table, target, smoothing, factor, with_grad)
            loss_sum += loss
            nll_sum += nll
            if with_grad:
                grad_states[first : first + rows] = grad @ rounded_table
                if grad.dtype == grad_table.dtype:
                    grad_table.addmm_(grad.t(), chunk)
                else:
                    grad_table += grad.t() @ (chunk if factor == 1 else chunk / factor)
        if with_grad and factor != 1:
            grad_states /= factor
        if with_grad:
            ctx.save_for_backward(grad_states, grad_table)
        ctx.mark_non_differentiable(nll_sum)
        return loss_sum, nll_sum

    @staticmethod
    @first_derivative
    def backward(ctx: Any, grad_loss: Tensor, _grad_nll: Tensor) -> tuple:
        return *(grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors), None, None, None, None


def keep_counted(x: Tensor, targets: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
    """Return the rows [M, D] of x [..., D] whose targets [...] count, and these targets [M]. With `ignored` None all count.

    Then M follows from the shapes, without reading data.
    """
    if ignored is None:
        return x.flatten(0, -2), targets.flatten()
    counted = targets != ignored
    return x[counted], targets[counted]


def take_counted(
    counted: Tensor | None, targets: Tensor, ignored: int, *states: Tensor
) -> tuple[Tensor, int | None, list[Tensor]]:
    """Return targets, the value to ignore, and states [..., D]. With the places [M] of counted targets, only these are left."""
    if counted is None:
        return targets, ignored, list(states)
    return targets.flatten().index_select(0, counted), None, [x.flatten(0, -2).index_select(0, counted) for x in states]


def projected_nll(states: Tensor, table: Tensor, targets: Tensor, smoothing: float, ignored: int | None = PAD_ID) -> LossSums:
    """Compute `label_smoothed_nll` of the logits `states @ table.T` without making them.

    Shapes: states [..., D], table [V, D], targets [...]. Under autocast, the products have its type; sums are float64.
    """
    dtype = product_dtype(table)
    with without_autocast(states.device):
        states, targets = keep_counted(states, targets, ignored)
        sums = _ProjectedNll.apply(states, table, targets, smoothing, dtype, torch.is_grad_enabled())
    return LossSums(*sums)


def label_smoothed_nll(logits: Tensor, targets: Tensor, smoothing: float, ignored: int | None = PAD_ID) -> LossSums:
    """Compute cross-entropy against (1 - smoothing) on the target and smoothing / V on every piece, without targets `ignored`.

    Shapes: logits [..., V], targets [...] int64. The loss is differentiable; `nll` is only for reading.
    """
    logits, targets = keep_counted(logits, targets, ignored)
    log_probs = logits.float().log_softmax(dim=-1)
    nll = -log_probs.gather(-1, targets.unsqueeze(-1)).sum()
    return LossSums((1 - smoothing) * nll - smoothing * log_probs.mean(dim=-1).sum(), nll.detach())


def symmetric_divergence(first: Tensor, second: Tensor, targets: Tensor, ignored: int | None = PAD_ID) -> Tensor:
    """Sum (KL(p || q) + KL(q || p)) / 2 over the target tokens; p and q are the softmax of two logits [..., V]."""
    log_p, log_q = (keep_counted(logits, targets, ignored)[0].float().log_softmax(dim=-1) for logits in (first, second))
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum()


def r_drop_loss(
    first: Tensor, second: Tensor, targets: Tensor, smoothing: float, alpha: float, ignored: int | None = PAD_ID
) -> LossSums:
    """Compute R-Drop (Liang et al., 2021): the loss of both passes, plus alpha times their divergence.

    `nll` is the mean of the passes.
    """
    one, other = (label_smoothed_nll(logits, targets, smoothing, ignored) for logits in (first, second))
    loss = one.loss + other.loss + alpha * symmetric_divergence(first, second, targets, ignored)
    return LossSums(loss, (one.nll + other.nll) / 2)


def sum_tied_losses(
    model: Any,
    targets: Tensor,
    options: OptimizerConfig,
    first: Any,
    second: Any = None,
    counted: Tensor | None = None,
) -> LossSums:
    """Compute the losses of pieces through the table that the model also reads: of one pass, or of two with R-Drop.

    A pass is states [..., D], or states and the model's own loss. `counted` [M] are the flat places of the targets that count, if
    they are known.
    """
    passes = [output if isinstance(output, tuple) else (output, None) for output in (first, second) if output is not None]
    all_states, auxiliary = zip(*passes, strict=True)
    targets, ignored, states = take_counted(counted, targets, PAD_ID, *all_states)
    if second is None:
        sums = projected_nll(states[0], model.encoder.embedding.weight, targets, options.label_smoothing, ignored)
    else:
        one, other = map(model.compute_logits, states)
        sums = r_drop_loss(one, other, targets, options.label_smoothing, options.r_drop, ignored)
    if auxiliary[0] is None:
        return sums
    return LossSums(sums.loss + sum(auxiliary), sums.nll, sum(auxiliary).detach() / len(auxiliary))
