"""Tables as columns of texts, which a template writes as cells, and numbers as every section writes them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from treenet.runs.result_provenance import short

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
    return NONE if value is None else format(value, form).replace("-", "−")


def numbers(title: str, values: Iterable[float | None], form: str = ",", best: Collection[int] = ()) -> Column:
    return Column(title, [number(value, form) for value in values], "n", best)


def shown(title: str, items: Iterable[Item | None], show: Callable[[Item], str]) -> Column:
    """Return a column of what `show` says of each item; nothing where there is none."""
    return Column(title, ["" if item is None else show(item) for item in items], "n")


def fact_columns(title: str, names: Iterable[str], facts: Mapping[str, Iterable[str]]) -> list[Column]:
    """Return the columns of a table with a row for each fact, and a column for each name."""
    columns = zip(names, zip(*facts.values(), strict=True), strict=True)
    return [Column(title, list(facts)), *(Column(name, cells, "n") for name, cells in columns)]


def code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


def show_hash(sha256: str | None) -> str:
    """Return the first digits of a hash, or a dash."""
    return code(short(sha256)) if sha256 else NONE


def show_p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def show_interval(interval: Sequence[float] | None, form: str = "+.2f") -> str:
    return " to ".join(number(end, form) for end in interval) if interval else NONE
