"""Cells and tables that only pages have."""

from collections.abc import Iterable, Mapping

from markupsafe import Markup

from treenet.runs.result_provenance import short
from treenet.tasks.tables import NONE, Column


def fact_columns(title: str, names: Iterable[str], facts: Mapping[str, Iterable[str]]) -> list[Column]:
    """Return the columns of a table with a row for each fact, and a column for each name."""
    columns = zip(names, zip(*facts.values(), strict=True), strict=True)
    return [Column(title, list(facts)), *(Column(name, cells, "n") for name, cells in columns)]


def code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


def show_hash(sha256: str | None) -> str:
    """Return the first digits of a hash, or a dash."""
    return code(short(sha256)) if sha256 else NONE
