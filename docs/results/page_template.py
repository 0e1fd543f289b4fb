"""Pages as templates: their tables and sentences keep their words, and get figures of records in the digits that they have."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from figures import FIGURE, Cell, Figures, write_like

# Sentences and parts of them, with their figures. A space stands for any white space.
Sentences = Iterable[tuple[str, Figures]]


class PageTable(NamedTuple):
    """A table of a page: its place, and of each row below its head the cells, as ranges of the text."""

    place: str
    start: int
    rows: list[list[tuple[int, int]]]


def find_tables(text: str) -> Iterator[PageTable]:
    """Yield the tables of a page in order, without those in blocks of code."""
    heading, number, at, in_code, lines = "", 0, 0, False, list[tuple[int, str]]()
    for line in [*text.split("\n"), ""]:
        is_row = line.lstrip().startswith("|") and not in_code
        if lines and not is_row:
            yield PageTable(f"{heading}#{number}", lines[0][0], [_cells(*one) for one in lines[2:]])
            number, lines = number + 1, []
        in_code ^= line.lstrip().startswith("```")
        if is_row:
            lines.append((at, line))
        elif not in_code and (found := re.match(r"#+ (.*)", line)):
            heading, number = found[1], 0
        at += len(line) + 1


def _cells(at: int, line: str) -> list[tuple[int, int]]:
    bars = [at + found.start() for found in re.finditer(r"\|", line)]
    return [(start + 1, end) for start, end in zip(bars, bars[1:], strict=False)]


class Filled(NamedTuple):
    """A page with the figures of the records, what could not be filled, and the ranges of the text that are checked."""

    text: str
    problems: list[str]
    checked: list[tuple[int, int]]


def fill_page(
    page: str, text: str, known_tables: Mapping[str, list[list[Cell]]], mixed: Iterable[str], sentences: Sentences
) -> Filled:
    """Write the figures of the tables of a page, by place, and of its sentences anew. `mixed` are places of other tables."""
    problems, changes = list[str](), list[tuple[int, int, str]]()

    def change(start: int, end: int, figures: Callable[[], Figures]) -> None:
        there = list(FIGURE.finditer(text, start, end))
        if there and (found := write_like([one[0] for one in there], figures())) is not None:
            changes.extend((*one.span(), new) for one, new in zip(there, found, strict=True))
        elif there:
            problems.append(f"{page}: {text[start:end]!r} does not have as many figures as records give: {figures()}")

    places = dict[str, PageTable]()
    for table in find_tables(text):
        places[table.place] = table
        known = known_tables.get(table.place)
        if known and [len(row) for row in known] != [len(row) for row in table.rows]:
            problems.append(f"{page}, {table.place}: other rows or columns than in TABLES")
        elif known:
            for row, cells in zip(known, table.rows, strict=True):
                for cell, (start, end) in zip(row, cells, strict=True):
                    if cell is not None:
                        change(start, end, cell)
    problems += [f"{page}, {place}: no such table" for place in (*known_tables, *mixed) if place not in places]
    checked = []
    for sentence, figures in sentences:
        pattern = r"((?:< )?[+-]?\d[\d,.]*\d|\d)".join(re.escape(part) for part in sentence.split("{}"))
        matches = list(re.finditer(pattern.replace(r"\ ", r"\s+"), text))
        written = write_like(list(matches[0].groups()), figures) if len(matches) == 1 else None
        if written is None:
            problems.append(f"{page}: this must be there once, with {len(figures)} figures: {sentence!r}")
        else:
            checked.append(matches[0].span())
            changes += [(*matches[0].span(number + 1), new) for number, new in enumerate(written)]
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    return Filled(text, problems, checked)
