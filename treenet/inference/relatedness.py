"""Scores of pairs of sentences, predicted by a trained model, and how they go with those of people."""

from collections.abc import Iterable

import numpy as np

from treenet.data.pairs import PairBatch
from treenet.layers.pair_head import expected_score
from treenet.models import ClassLogits


def score_pairs(predictions: Iterable[tuple[PairBatch, ClassLogits]]) -> tuple[list[str], dict[str, float]]:
    """The lines of predictions.tsv in the order of pairs, after a header, and the correlations over them."""
    rows = {}
    for batch, output in predictions:
        columns = (batch.example_ids[::2] // 2, batch.scores, expected_score(output.examples.double()))
        rows |= {pair: (score, predicted) for pair, score, predicted in zip(*(c.tolist() for c in columns), strict=True)}
    lines = [f"{pair}\t{score:g}\t{predicted:.6f}\n" for pair, (score, predicted) in sorted(rows.items())]
    score, predicted = np.array(list(rows.values())).T
    return ["pair\tscore\tpredicted\n", *lines], correlations(predicted, score)


def correlations(predicted: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's correlation, 0 where a side does not vary, and the mean squared error, of two vectors [n]."""
    return {
        "pearson": pearson(predicted, scores),
        "spearman": pearson(average_ranks(predicted), average_ranks(scores)),
        "mse": float(np.mean((predicted - scores) ** 2)),
    }


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's correlation of two vectors [n]; 0 where one does not vary."""
    if not (np.ptp(x) and np.ptp(y)):
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1 [n]; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
