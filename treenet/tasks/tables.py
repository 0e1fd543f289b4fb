"""Tables as columns of texts, for a terminal and for a page; numbers and scores as every table writes them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

NONE = "–"
Item = TypeVar("Item")


@dataclass(frozen=True)
class Column:
    """A column of a table. `kind` is the class of its cells: "n" aligns numbers. The rows `best` are bold."""

    title: str
    cells: Sequence[str]
    kind: str = ""
    best: Collection[int] = ()


def number(value: float | None, form: str = ",") -> str:
    """Return a number with a true minus sign; a dash where there is none."""
    return NONE if value is None else typeset(format(value, form))


def typeset(text: str) -> str:
    """Return a text of numbers with true minus signs; of a lone hyphen, the dash of a number that is not there."""
    return NONE if text == "-" else text.replace("-", "−")


def numbers(title: str, values: Iterable[float | None], form: str = ",", best: Collection[int] = ()) -> Column:
    return Column(title, [number(value, form) for value in values], "n", best)


def shown(title: str, items: Iterable[Item | None], show: Callable[[Item], str]) -> Column:
    """Return a column of what `show` says of each item; nothing where there is none."""
    return Column(title, ["" if item is None else show(item) for item in items], "n")


def align(columns: Sequence[Column]) -> list[str]:
    """Return the lines of a table for a terminal, with its titles. Numbers are on the right of their columns."""
    padded = []
    for column in columns:
        cells = [column.title, *column.cells]
        width, side = max(map(len, cells)), ">" if column.kind == "n" else "<"
        padded.append([f"{cell:{side}{width}}" for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def show_p_value(value: float | None) -> str:
    """Format a p-value. A small one is not shown as 0."""
    return NONE if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def show_interval(interval: Sequence[float] | None, form: str = "+.2f") -> str:
    return " to ".join(number(end, form) for end in interval) if interval else NONE


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score of runs or of single sentences."""

    title: str
    unit: float = 1  # a value times this is the printed number, with `digits` places
    digits: int
    lower_is_better: bool = False
    short: str = ""  # its title in tables with many scores, if that is another one
    hub: str = ""  # its name on Hugging Face, if it has one

    @property
    def column(self) -> str:
        """Return the title in tables with many scores."""
        return self.short or self.title

    def show(self, value: float, sign: str = "") -> str:
        """Format a value or a difference."""
        return f"{self.unit * value:{sign}.{self.digits}f}"

    def show_interval(self, interval: Sequence[float] | None) -> str:
        """Format the interval of a difference; a dash if there is none."""
        return f"[{', '.join(self.show(end, '+') for end in interval)}]" if interval else "-"

    def show_ends(self, interval: Sequence[float] | None) -> str:
        """Format the interval of a value; a dash if there is none."""
        return " to ".join(map(self.show, interval)) if interval else NONE
