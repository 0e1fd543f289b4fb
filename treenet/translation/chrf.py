"""chrF of every string against every string, as sacrebleu computes it for sentences: up to 6 characters, beta 2, no white space.

Shapes: N strings, G different n-grams of one order.
"""

from collections.abc import Sequence

import numpy as np

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
