"""Scores of classes that need only counts: macro F1, intervals and the confusion matrix."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from treenet.tasks.tables import Column, align, numbers

_SAMPLES, _SEED = 1000, 12345  # of the bootstrap; the seed is sacrebleu's, as in comparisons
_NORMAL = 1.959963984540054  # of a 95 % interval
_MOST_SHOWN, _MOST_COLUMNS = 100, 20  # classes of a confusion matrix in scores.json, and in tables


def class_scores(cells: Mapping[tuple[int, int], int], num_classes: int) -> dict[str, Any]:
    """Return macro F1, 95 % intervals for other examples, and the confusion matrix, from counts by (class, predicted class).

    The interval of the accuracy is Wilson's, that of macro F1 has the percentiles of a bootstrap over examples. It is left out if
    all samples have the same score, for example if every prediction is right. `confusion` has a row for each class, a column for
    each prediction.
    """
    label, predicted = np.array(list(cells)).T
    counts = np.array(list(cells.values()))
    total, right = int(counts.sum()), int(counts[label == predicted].sum())
    samples = np.random.default_rng(_SEED).multinomial(total, counts / total, _SAMPLES)  # examples drawn with replacement
    observed, *sampled = macro_f1(label, predicted, np.stack([counts, *samples])).tolist()
    low, high = np.percentile(sampled, [2.5, 97.5]).tolist()
    scores: dict[str, Any] = {"macro_f1": observed, "accuracy_interval": list(wilson_interval(right, total))}
    if low < high:
        scores["macro_f1_interval"] = [low, high]
    if num_classes <= _MOST_SHOWN:
        matrix = np.zeros((num_classes, num_classes), dtype=np.int64)
        matrix[label, predicted] = counts
        scores["confusion"] = matrix.tolist()
    return scores


def confusion_columns(entry: Mapping) -> list[Column]:
    """Return the confusion matrix of an entry of scores.json as a table; empty without one, or with many classes."""
    names, matrix = entry.get("classes"), entry.get("confusion")
    if not names or not matrix or len(names) > _MOST_COLUMNS:
        return []
    counts = zip(names, zip(*matrix, strict=True), strict=True)
    return [Column("class", names), *(numbers(name, predicted) for name, predicted in counts)]


def format_confusion(entry: Mapping) -> str:
    """Return `confusion_columns` for a terminal."""
    table = align(confusion_columns(entry))
    return "\n".join(["examples by class (row) and predicted class (column)", *table]) if table else ""


def macro_f1(label: np.ndarray, predicted: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean F1 [samples] of the classes that occur, as labels or predictions.

    `counts` [samples, n] has how often each place counts, with its class and its predicted class [n].
    """
    classes, counts = np.arange(max(label.max(), predicted.max()) + 1), counts.astype(float)
    is_label, is_predicted = (side[:, None] == classes for side in (label, predicted))
    hits, total = counts @ (is_label & is_predicted), counts @ is_label + counts @ is_predicted
    return (2 * hits / np.maximum(total, 1)).sum(1) / (total > 0).sum(1)


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share by Wilson (1927)."""
    share, spread = right / total, _NORMAL**2 / total
    half = _NORMAL * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    centre = (share + spread / 2) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
