"""The order of found hypotheses: by minimum Bayes risk, and by the coverage penalty.

Minimum Bayes risk (Eikema and Aziz, 2020) takes of samples the text with the highest mean chrF against all of them. Samples stand
for the distribution of the model, both as candidates and as references. A text that was drawn several times is one candidate, and
counts several times as a reference.

The coverage penalty (Wu et al., 2016, equation 14) orders the hypotheses that a beam holds at its end. It does not change which
ones the beam finds. The attention from target position j to leaf i, p_ij, is the mean over layers and heads. The weight of a node
goes to the leaves of its span in equal parts, so the leaves of a sentence share all attention. The penalty is
`cp = beta * sum_i log(min(sum_j p_ij, 1))`. It is 0 if every leaf got at least the attention of one position, and negative
otherwise. Target positions include EOS.

Shapes: A decoder layers, H heads, T target positions, L leaves, N nodes, S = L + N positions (plain models: S = L). C strings, G
different n-grams of one order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from treenet.config import DecodingConfig
from treenet.data.batch import TreeBatch, in_order, longer_side
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
    penalties = in_order(penalise, model.reads, forced, 0.0, longer_side, decoding.max_tokens, device, window)
    scored = [[replace(one, score=one.score + next(penalties)) for one in own] for own in found]
    return [sort_hypotheses(own)[:num_best] for own in scored]


def _penalty(example: Mapping, weights: np.ndarray, decoding: DecodingConfig) -> float:
    """Return the penalty of an example with weights [A, H, T, S]."""
    mean = weights.mean((0, 1), dtype=np.float64)
    return coverage_penalty(leaf_attention(mean, example["spans"], len(example["leaves"]["piece"])), decoding.coverage_penalty)


_ORDER = 6
_BETA_SQUARED = 4


def chrf_matrix(texts: Sequence[str]) -> np.ndarray:
    """Return chrF [N, N], from 0 to 100, of hypothesis i against reference j.

    It equals `sacrebleu.CHRF().sentence_score(texts[i], [texts[j]]).score` to the last bit.
    """
    joined = ["".join(text.split()) for text in texts]
    shape = len(texts), len(texts)
    precision, recall, orders = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for order in range(1, _ORDER + 1):
        counts = _count_ngrams(joined, order)
        total = counts.sum(1)
        matches = np.stack([np.minimum(own, counts).sum(1) for own in counts])
        both = (total[:, None] > 0) & (total[None, :] > 0)
        precision += np.where(both, matches / np.maximum(total, 1)[:, None], 0.0)
        recall += np.where(both, matches / np.maximum(total, 1)[None, :], 0.0)
        orders += both
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    divisor = _BETA_SQUARED * precision + recall
    score = (1 + _BETA_SQUARED) * precision * recall
    return 100 * (score / np.where(divisor > 0, divisor, 1.0))


def _count_ngrams(texts: Sequence[str], order: int) -> np.ndarray:
    """Count the n-grams of each text: [N, G]."""
    ids: dict[str, int] = {}
    rows = [[ids.setdefault(text[i : i + order], len(ids)) for i in range(len(text) - order + 1)] for text in texts]
    counts = np.zeros((len(texts), len(ids)), dtype=np.int32)
    for row, found in zip(counts, rows, strict=True):
        np.add.at(row, found, 1)
    return counts


def choose_by_risk(samples: Sequence[Hypothesis], texts: Sequence[str], num_best: int) -> list[Hypothesis]:
    """Return the `num_best` samples of different `texts` with the highest mean chrF, best first. Their score is this mean.

    Of several samples of a text, the most probable one stays. Equal scores are ordered by log-probability, then by ids. Without
    samples, because none meets the constraints of a line, the result is empty.
    """
    if not samples:
        return []
    different = list(dict.fromkeys(texts))
    place = {text: number for number, text in enumerate(different)}
    weights = np.bincount([place[text] for text in texts], minlength=len(different))
    utility = chrf_matrix(different)
    # Exact sums, and no digits beyond those that the F-scores have: texts of equal means tie, whatever their order.
    scores = [round(math.fsum(row * weights) / len(texts), 9) for row in utility]
    best: dict[str, Hypothesis] = {}
    for sample, text in zip(samples, texts, strict=True):
        if text not in best or (-sample.log_prob, sample.ids) < (-best[text].log_prob, best[text].ids):
            best[text] = sample
    found = [replace(best[text], score=scores[place[text]]) for text in different]
    return sorted(found, key=lambda one: (-one.score, -one.log_prob, one.ids))[:num_best]
