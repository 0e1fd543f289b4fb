"""The coverage penalty of Wu et al. (2016), equation 14, and the attention to leaves that it reads.

The attention from target position j to leaf i, p_ij, is the mean over layers and heads. The weight of a node goes to the leaves
of its span in equal parts, so the leaves of a sentence share all attention. The penalty is
`cp = beta * sum_i log(min(sum_j p_ij, 1))`. It is 0 if every leaf got at least the attention of one position, and negative
otherwise. Target positions include EOS.

The penalty orders the hypotheses that a beam holds at its end. It does not change which ones the beam finds.

Shapes: A decoder layers, H heads, T target positions, L leaves, N nodes, S = L + N positions (plain models: S = L).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch
from treenet.data.in_order import in_order_with_rows, longer_side
from treenet.models.composed import attend_batch
from treenet.models.decoders.transformer import TransformerDecoder
from treenet.translation.hypotheses import Hypothesis, sort_hypotheses
from treeproc.common.errors import UserError

_LEAST = float(np.finfo(np.float32).tiny)  # attention of a leaf, whose logarithm stays finite


def check_attends(model: nn.Module) -> None:
    """Raise UserError if the model has no cross-attention whose weights can be read."""
    if not isinstance(getattr(model, "decoder", None), TransformerDecoder):
        raise UserError("decoding.coverage_penalty needs one model with a Transformer decoder; leave it out")


def leaf_attention(weights: np.ndarray, spans: Mapping[str, np.ndarray], num_leaves: int) -> np.ndarray:
    """Return attention [..., T, L] to leaves, from weights [..., T, S] of leaves and nodes with these `spans`."""
    num_nodes = weights.shape[-1] - num_leaves
    starts, ends = (np.asarray(spans[name])[:num_nodes, None] for name in ("start", "end"))
    leaves = np.arange(num_leaves)
    shares = ((leaves >= starts) & (leaves < ends)) / np.maximum(ends - starts, 1)  # [N, L]
    return weights[..., :num_leaves] + weights[..., num_leaves:].astype(np.float64) @ shares


def coverage_penalty(attention: np.ndarray, beta: float) -> float:
    """Return the penalty of attention [T, L] to leaves."""
    covered = np.clip(attention.astype(np.float64).sum(0), _LEAST, 1.0)
    return beta * float(np.log(covered).sum())


def order_by_coverage(
    model: Any,
    examples: Sequence[Mapping],
    found: Sequence[Sequence[Hypothesis]],
    decoding: DecodingConfig,
    num_best: int,
    device: torch.device | str,
) -> list[list[Hypothesis]]:
    """Add the penalty to the scores of the hypotheses of every example, and return the `num_best` best of each.

    The model must be in evaluation mode.
    """
    forced = [
        {**example, "tgt_pieces": np.array(one.ids, dtype=np.int32)}
        for example, own in zip(examples, found, strict=True)
        for one in own
    ]

    def penalise(batch: TreeBatch, rows: list[dict]) -> list[float]:
        # Batch by batch, because the weights of all layers and heads are large.
        return [_penalty(row, weights, decoding) for row, weights in zip(rows, attend_batch(model, batch), strict=True)]

    window = max(1, len(forced))
    penalties = in_order_with_rows(penalise, model.reads, forced, 0.0, longer_side, decoding.max_tokens, device, window)
    scored = [[replace(one, score=one.score + next(penalties)) for one in own] for own in found]
    return [sort_hypotheses(own)[:num_best] for own in scored]


def _penalty(example: Mapping, weights: np.ndarray, decoding: DecodingConfig) -> float:
    """Return the penalty of an example with weights [A, H, T, S]."""
    mean = weights.mean((0, 1), dtype=np.float64)
    return coverage_penalty(leaf_attention(mean, example["spans"], len(example["leaves"]["piece"])), decoding.coverage_penalty)
