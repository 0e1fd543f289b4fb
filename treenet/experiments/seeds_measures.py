"""The measures of a comparison over seeds, by task: accuracy of classes, correlation of relatedness."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treenet.evaluation.significance import SeedTest, compare_correlations, compare_examples
from treenet.experiments.records import show_numbers
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath

Numbers = Mapping[str, np.ndarray]  # of examples, by the name that `Measures.read` gave

_SCALE = 10_000  # records hold whole numbers, so scores of pairs have four digits


@dataclass(frozen=True)
class Measures:
    """The scores of a task, and the numbers of single examples that a test over them needs."""

    columns: Mapping[tuple[str, str], str]  # (entry of scores.json, score): the column title
    headline: str  # the score whose differences are tested, in the results TESTED
    unit: float  # a value times this is the printed number, with `digits` places
    digits: int
    axis: str  # of the picture
    read: Callable[[AnyPath, str], dict[str, str]]  # the lines for the record of a run folder's result
    compare: Callable[[Sequence[Numbers], Sequence[Numbers], str], SeedTest]  # of a result of baselines and of systems, by seed

    def show(self, value: float, sign: str = "") -> str:
        """Format a value or a difference for tables."""
        return f"{self.unit * value:{sign}.{self.digits}f}"

    def show_mean(self, summary: Mapping) -> str:
        """Format mean and deviation over seeds."""
        return f"{self.show(summary['mean'])} ± {'-' if summary['deviation'] is None else self.show(summary['deviation'])}"

    def show_interval(self, test: SeedTest) -> str:
        """Format the interval of a difference; a dash if there is none."""
        return f"[{', '.join(self.show(end, '+') for end in test.interval)}]" if test.interval else "-"

    def tested(self) -> dict[str, str]:
        """Return the tested measures, and the result of each."""
        return {f"{result}.{self.headline}": result for result in TESTED}


TESTED = ("test", "test.last")  # entries of scores.json


def _read_columns(path: AnyPath, names: tuple[str, str]) -> list[tuple[str, str]]:
    """Read two columns of a file of predictions, in the order of the examples."""
    try:
        file = io.StringIO(path.read_bytes().decode(), newline="")
        return [(row[names[0]], row[names[1]]) for row in csv.DictReader(file, delimiter="\t")]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {path} ({error}); remove its folder and run the same command again") from None


def _read_right(folder: AnyPath, result: str) -> dict[str, str]:
    """Read whether each prediction is right."""
    rows = _read_columns(folder / f"predictions.{result}.tsv", ("predicted", "label"))
    return {result: show_numbers(int(predicted == label) for predicted, label in rows)}


def _read_scores(folder: AnyPath, result: str) -> dict[str, str]:
    """Read predicted scores of pairs, and the human scores."""
    path = folder / f"predictions.{result}.tsv"
    columns = list(zip(*_read_columns(path, ("predicted", "score")), strict=True))
    try:
        predicted, scores = (show_numbers(round(_SCALE * float(value)) for value in column) for column in columns)
    except ValueError as error:
        raise UserError(f"cannot read {path} ({error}); remove its folder and run the same command again") from None
    return {result: predicted, f"{result}.scores": scores}


def _compare_accuracies(baselines: Sequence[Numbers], systems: Sequence[Numbers], result: str) -> SeedTest:
    sides = [np.array([one[result] for one in side], dtype=float) for side in (baselines, systems)]
    return compare_examples(sides[1] - sides[0])


def _compare_correlations(baselines: Sequence[Numbers], systems: Sequence[Numbers], result: str) -> SeedTest:
    sides = [np.array([one[result] for one in side], dtype=float) for side in (baselines, systems)]
    return compare_correlations(*sides, scores=systems[0][f"{result}.scores"])


MEASURES = {
    "classification": Measures(
        columns={
            ("valid", "accuracy"): "valid",
            ("test", "accuracy"): "test",
            ("test.last", "accuracy"): "last",
            ("test", "binary_accuracy"): "two",
            ("test.last", "binary_accuracy"): "two, last",
            ("test.peak", "accuracy"): "peak on test!",
        },
        headline="accuracy",
        unit=100,
        digits=2,
        axis="test accuracy, %",
        read=_read_right,
        compare=_compare_accuracies,
    ),
    "relatedness": Measures(
        columns={
            ("valid", "pearson"): "valid, r",
            ("test", "pearson"): "test, r",
            ("test.last", "pearson"): "last, r",
            ("test", "spearman"): "test, rho",
            ("test", "mse"): "test, MSE",
            ("test.peak", "pearson"): "peak on test!",
        },
        headline="pearson",
        unit=1,
        digits=4,
        axis="Pearson's r on test",
        read=_read_scores,
        compare=_compare_correlations,
    ),
}
