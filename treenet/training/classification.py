"""Losses and accuracies of classifiers.

Shapes: B batch, P positions, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from treenet.data.labelled import NO_CLASS, LabelledBatch
from treenet.models import ClassLogits
from treenet.training.losses import LossSums, label_smoothed_nll, r_drop_loss
from treenet.training.step import Stepper


class ClassifierStepper(Stepper):
    """Updates of a classifier: the loss is that of all classes to be predicted, of positions where these are learned."""

    output = "forward"
    ties_embeddings = False

    def sum_losses(self, batch: LabelledBatch, first: ClassLogits, second: ClassLogits | None = None) -> LossSums:
        options = self.config.optimizer
        if first.positions is None:
            targets, passes = batch.labels, [logits.examples for logits in (first, second) if logits]
        else:
            targets, passes = batch.position_labels, [logits.positions for logits in (first, second) if logits]
        if second is None:
            return label_smoothed_nll(*passes, targets, options.label_smoothing, NO_CLASS)
        return r_drop_loss(*passes, targets, options.label_smoothing, options.r_drop, NO_CLASS)

    def count_right(self, batch: LabelledBatch, output: ClassLogits) -> Sequence[Tensor]:
        return count_right(batch, output, self.config.classifier.neutral_class)


def count_right(batch: LabelledBatch, output: ClassLogits, neutral: int | None) -> list[Tensor]:
    """Examples and how many of them are right; the same of examples read as two classes, and of labelled positions."""
    labels = batch.labels
    right = output.examples.argmax(-1) == labels
    counts = [torch.tensor(len(labels), device=labels.device), right.sum()]
    if neutral is None:
        counts += [torch.zeros_like(counts[0])] * 2
    else:
        is_above = above_neutral(output.examples.softmax(-1), neutral)
        counted = labels != neutral
        counts += [counted.sum(), (counted & (is_above == (labels > neutral))).sum()]
    if output.positions is None:
        return counts + [torch.zeros_like(counts[0])] * 2
    counted = batch.position_labels != NO_CLASS
    return [*counts, counted.sum(), (counted & (output.positions.argmax(-1) == batch.position_labels)).sum()]


def above_neutral(probabilities: Tensor, neutral: int) -> Tensor:
    """[B, C] -> [B] bool: whether the classes above the neutral one have more probability than those below."""
    return probabilities[:, neutral + 1 :].sum(-1) > probabilities[:, :neutral].sum(-1)


def summarize_counts(counts: Tensor) -> dict[str, float]:
    """Accuracies, as fractions, from the sums of `count_right`; those of what was not counted are left out."""
    pairs = counts.view(3, 2).tolist()
    names = ("accuracy", "binary_accuracy", "phrase_accuracy")
    return {name: right / count for name, (count, right) in zip(names, pairs, strict=True) if count}
