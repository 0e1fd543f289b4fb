"""Relatedness: scores of pairs of sentences, and their correlation with human scores. Shapes: P pairs, K scores."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treenet.config import ClassifierConfig
from treenet.data.labelled import PairBatch, PairSource, check_all_roots
from treenet.models import ClassLogits, build_relatedness
from treenet.models.composed import expected_score, score_distribution
from treenet.tasks.base import PredictionTask, check_structure, vocab_sizes
from treenet.tasks.learning import LEARNING, facts_of_scores
from treenet.tasks.losses import LossSums
from treeproc.common.settings import UserError


class Relatedness(PredictionTask[PairBatch]):
    """Scores of pairs of sentences, from a classifier's encoder that reads both sentences."""

    num_sums = 8
    score = "pearson"
    examples, targets = "pairs", "pairs"

    def check(self, index: Mapping) -> None:
        options = self.config.optimizer
        if self.config.classifier.neutral_class is not None:
            raise UserError("classifier.neutral_class must be null for task relatedness, which has scores and no classes")
        if options.label_smoothing or options.r_drop:
            raise UserError(
                "optimizer.label_smoothing and optimizer.r_drop must be 0 for task relatedness, whose targets are "
                f"distributions, but are {options.label_smoothing} and {options.r_drop}"
            )
        check_structure(self.config, index, self.encoder)
        check_all_roots(self.config.data / "encoded", index, self.reads)

    def unread_settings(self, index: Mapping) -> list[str]:
        ignored = self.config.classifier.split_words != ClassifierConfig().split_words
        return [*super().unread_settings(index), *["classifier.split_words"] * ignored]

    def open(self, split: str, *, training: bool = False, device: torch.device | str = "cpu") -> PairSource:
        return PairSource(self.config.data / "encoded", split, self.reads.for_device(device), states=self.config.frozen_states)

    def build_model(self, sizes: Mapping) -> nn.Module:
        return build_relatedness(self.config.model, vocab_sizes(sizes), self.config.classifier)

    def counted_targets(self, batch: PairBatch) -> None:
        """Return None: every pair has a score."""

    def sum_losses(
        self, model: Any, batch: PairBatch, first: ClassLogits, second: Any = None, counted: Tensor | None = None
    ) -> LossSums:
        log_probs = first.examples.log_softmax(1)
        wanted = score_distribution(batch.scores).to(log_probs.dtype)
        nll = -(wanted * log_probs).sum()
        return LossSums(nll + torch.special.xlogy(wanted, wanted).sum(), nll)

    def count_right(self, batch: PairBatch, output: ClassLogits) -> Sequence[Tensor]:
        return moments(expected_score(output.examples.double()), batch.scores)

    def score_predictions(self, predictions: Iterable[tuple[PairBatch, ClassLogits]]) -> tuple[list[str], dict[str, Any]]:
        rows: dict[int, tuple[float, float]] = {}
        for batch, output in predictions:
            columns = (batch.example_ids[::2] // 2, batch.scores, expected_score(output.examples.double()))
            rows |= {pair: (score, predicted) for pair, score, predicted in zip(*(c.tolist() for c in columns), strict=True)}
        lines = [f"{pair}\t{score:g}\t{predicted:.6f}\n" for pair, (score, predicted) in sorted(rows.items())]
        score, predicted = np.array(list(rows.values())).T
        return ["pair\tscore\tpredicted\n", *lines], correlations(predicted, score) | {
            LEARNING: facts_of_scores(predicted, score)
        }

    def metrics(self, sums: Tensor, targets: int) -> dict[str, float]:
        loss, nll = (sums[:2] / targets).tolist()
        return {"loss": loss, "nll": nll, **summarize_moments(sums[2:])}

    def describe(self, line: Mapping[str, float]) -> str:
        return f"Pearson {line['pearson']:.4f}, squared error {line['mse']:.3f}"

    def describe_best(self, line: Mapping[str, float]) -> str:
        return f"{line['pearson']:.4f}"


def moments(predicted: Tensor, scores: Tensor) -> list[Tensor]:
    """Return sums over pairs that give Pearson's correlation and the squared error: 1, x, y, x^2, y^2, x y."""
    return [torch.ones_like(scores).sum(), *(x.sum() for x in (predicted, scores, predicted**2, scores**2, predicted * scores))]


def summarize_moments(sums: Tensor) -> dict[str, float]:
    """Return Pearson's correlation, 0 if a side does not vary, and the mean squared error."""
    count, x, y, xx, yy, xy = sums.tolist()
    deviations = math.sqrt(max(0.0, count * xx - x * x) * max(0.0, count * yy - y * y))
    pearson = (count * xy - x * y) / deviations if deviations > 1e-9 * count * count else 0.0
    return {"pearson": pearson, "mse": (xx - 2 * xy + yy) / count}


def correlations(predicted: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, 0 if a side does not vary, and the mean squared error of two vectors [n]."""
    return {
        "pearson": pearson(predicted, scores),
        "spearman": pearson(average_ranks(predicted), average_ranks(scores)),
        "mse": float(np.mean((predicted - scores) ** 2)),
    }


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks [n] from 1 on. Equal values share the mean of their ranks. If one value is NaN, all ranks are NaN."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return np.full(len(values), np.nan) if np.isnan(values).any() else ranks


def pearson(x: np.ndarray, y: np.ndarray) -> float:
    """Return Pearson's correlation of two vectors [n]; 0 if one does not vary."""
    if not (np.ptp(x) and np.ptp(y)):
        return 0.0
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))
