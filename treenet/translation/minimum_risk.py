"""Minimum Bayes risk decoding (Eikema and Aziz, 2020): of samples, the text with the highest mean chrF against all of them.

Samples stand for the model's distribution, both as candidates and as references. A text that was drawn several times is one
candidate, and counts several times as a reference.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from treenet.translation.chrf import chrf_matrix
from treenet.translation.hypotheses import Hypothesis


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


def rank_by_risk(
    drawn: Sequence[Sequence[Hypothesis]], detokenize: Callable[[Hypothesis], str], num_best: int
) -> list[list[Hypothesis]]:
    """Apply `choose_by_risk` to the samples of every sentence."""
    return [choose_by_risk(samples, [detokenize(one) for one in samples], num_best) for samples in drawn]
