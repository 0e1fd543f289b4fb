"""The most probable next pieces. Shapes: R hypotheses, V vocabulary."""

import torch
from torch import Tensor


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


def known_all_false(mask: Tensor) -> bool:
    """Return whether a mask is known to be False everywhere. On other devices than CPUs nothing is known: the host would wait."""
    return mask.device.type == "cpu" and not mask.any()
