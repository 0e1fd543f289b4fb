"""The interface of tasks that predict the label of every example, by a classifier's encoder below a head."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from treenet.data.labelled import LabelledBatch
from treenet.data.pairs import PairBatch
from treenet.models import ClassLogits
from treenet.tasks.base import Task


class PredictionTask(Task):
    """A task that is scored by its predictions. Tables show the metrics `percentages` and `figures` of a split."""

    use = "classification"
    ties_embeddings = False
    percentages: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()

    def next_commands(self) -> list[tuple[str, str, str]]:
        return []

    @abstractmethod
    def score_predictions(
        self, predictions: Iterable[tuple[LabelledBatch | PairBatch, ClassLogits]]
    ) -> tuple[list[str], dict[str, Any]]:
        """Return the lines of predictions.tsv in the order of examples, after a header, and the metrics of all predictions."""
