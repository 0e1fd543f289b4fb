"""The pieces that may follow a hypothesis, and the most probable of them.

Search never produces PAD, BOS and UNK, because UNK has no text. Their probability stays in the normalisation. Shapes: R
hypotheses, V vocabulary.
"""

import torch
from torch import Tensor

from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID

NEVER_PRODUCED = (PAD_ID, UNK_ID, BOS_ID)


def allowed_log_probs(logits: Tensor, step: int, min_length: int, limits: Tensor | None) -> Tensor:
    """Return log-probabilities [R, V], -inf for pieces that must not follow `step` pieces.

    `limits` [R] are the maximum lengths of the hypotheses; None if no hypothesis has reached its limit.
    """
    log_probs = logits.float().log_softmax(dim=1)
    for piece in NEVER_PRODUCED:
        log_probs[:, piece] = -torch.inf
    full = torch.zeros_like(log_probs[:, 0], dtype=torch.bool) if limits is None else limits == step
    if step < min_length:
        log_probs[:, EOS_ID].masked_fill_(~full, -torch.inf)
    if limits is not None and not is_none(full):
        others = torch.arange(log_probs.shape[1], device=logits.device) != EOS_ID
        log_probs.masked_fill_(full[:, None] & others, -torch.inf)
    return log_probs


def allowed_log_probs_at(logits: Tensor, step: Tensor, min_length: int, limits: Tensor) -> Tensor:
    """Compute `allowed_log_probs` for a `step` [1] on the device, with the same operations at every step."""
    pieces = torch.arange(logits.shape[1], device=logits.device)
    full = (limits == step)[:, None]
    banned = torch.where(pieces == EOS_ID, ~full & (step < min_length), full)
    for piece in NEVER_PRODUCED:
        banned = banned | (pieces == piece)
    return logits.float().log_softmax(dim=1).masked_fill(banned, -torch.inf)


def best_pieces(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best values and pieces of rows [R, V] of float32, each [R, count].

    Of equal finite values, the lowest ids come first.

    `topk` alone does not define which of several equal values it returns.
    """
    if log_probs.device.type != "cpu":
        return best_by_key(log_probs, count)
    most = min(count + 1, log_probs.shape[1])  # one value more shows whether the cut divides equal values
    values, pieces = log_probs.topk(most, dim=1)
    tied = (values[:, count - 1] == values[:, most - 1]) & values[:, count - 1].isfinite() & (most > count)
    values, pieces = values[:, :count], pieces[:, :count]
    if tied.any():
        pieces[tied] = log_probs[tied].sort(dim=1, descending=True, stable=True).indices[:, :count]
    pieces, order = pieces.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    pieces = pieces.gather(1, order)
    return values, pieces


def best_by_key(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `best_pieces` without reading the values on the host. Integer keys order them as floats are ordered, then by ids.

    On CPUs, it takes at least three times as long.
    """
    bits = log_probs.view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    keys = torch.where(bits < 0, -magnitude, magnitude) << 32
    keys -= torch.arange(log_probs.shape[1], device=log_probs.device)
    pieces = keys.topk(count, dim=1).indices
    return log_probs.gather(1, pieces), pieces


def is_none(mask: Tensor) -> bool:
    """Return whether a mask is False everywhere. Other devices return False, so the host does not wait."""
    return mask.device.type == "cpu" and not mask.any()
