"""The long table of a study: one row for each value of a cell. Reports select from it, and group it by system, size and seed."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SAMPLED = "sampled"  # the split of scores of a bootstrap: that of all sentences, then that of each sample, [1 + samples]


class Result(NamedTuple):
    """A value of a cell, a score, a number of its training, or its name. `split` is empty for a value that is of no result."""

    system: str
    size: float  # the share of the training examples
    seed: int
    split: str
    metric: str
    value: Any


class Results(list[Result]):
    """Rows, in the order of the cells."""

    @classmethod
    def of(cls, cells: Iterable[Mapping], system: str) -> "Results":
        """Make the table from the values of cells by their names, METRIC or SPLIT.METRIC. `system` is the label of a cell's."""
        return cls(
            Result(cell[system], cell.get("fraction", 1.0), cell["seed"], split, metric, value)
            for cell in cells
            for name, value in cell.items()
            for split, _, metric in (name.rpartition("."),)
        )

    def where(self, **wanted: object) -> "Results":
        """Return the rows with these values."""
        return Results(row for row in self if all(getattr(row, name) == value for name, value in wanted.items()))

    def by(self, column: str) -> dict[Any, "Results"]:
        """Return the rows by a column, in order of appearance."""
        found: dict[Any, Results] = {}
        for row in self:
            found.setdefault(getattr(row, column), Results()).append(row)
        return found

    def by_seed(self, metric: str, split: str = "") -> dict[int, Any]:
        """Return the values of a metric by seed, in order, from rows of one system and size."""
        return dict(sorted(((row.seed, row.value) for row in self.where(metric=metric, split=split)), key=lambda one: one[0]))

    def paired(self, others: "Results", metric: str, split: str = "") -> list[tuple[Any, Any]]:
        """Return the values here and there of every seed that both have, in order, as `by_seed`."""
        here, there = (side.by_seed(metric, split) for side in (self, others))
        return [(value, there[seed]) for seed, value in here.items() if seed in there]
