"""Minimal pairs of files: JSON Lines, tables with a header, or Penn Treebank trees, in folders and archives; and their pieces.

BLiMP's summary of published accuracies, a line for each paradigm and model, may lie beside its paradigms.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from treeproc.common.errors import quoted
from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.online.line_encoder import LineEncoder
from treeproc.parsers import Given
from treeproc.readers import convert_rows
from treeproc.readers.labelled import clean_field, records_of, table_form
from treeproc.readers.line_forms import csv_quotes
from treeproc.readers.numbered_lines import read_texts
from treeproc.readers.treebanks import read_trees
from treeproc.shards.store import read_index

SUMMARY = "models_summary.jsonl"
_PARADIGM, _TOTALS = "UID", "overall"  # a key of the summary; its lines with this paradigm are means over others
_LINES = 8192  # encoded at once
_SHOWN = 40


@dataclass(frozen=True)
class PairColumns:
    """The columns or keys of a table of minimal pairs. `more` ends the advice to name others."""

    good: str
    bad: str
    by: tuple[str, ...] = ()
    more: str = ""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the names of all columns: the two sentences, then the groups."""
        return (self.good, self.bad, *self.by)

    texts = wanted

    def setting_of(self, column: str) -> str:
        """Return the setting that names a column."""
        return f"pairs.{'good' if column == self.good else 'bad' if column == self.bad else 'by'}{self.more}"


class MinimalPair(NamedTuple):
    """Two sentences, the good one first; with their trees if the file has them."""

    place: str  # file and line, or number of the tree
    sentences: tuple[str, str]
    groups: tuple[str, ...] = ()
    trees: tuple[dict, dict] | None = None  # rows of `read_trees`

    @property
    def is_equal(self) -> bool:
        """Whether it is one sentence twice, without trees."""
        return self.sentences[0] == self.sentences[1] and not self.trees


def read_pairs(files: Sequence[Path], columns: PairColumns) -> tuple[list[MinimalPair], dict[str, dict[str, float]]]:
    """Return the pairs of files, folders and archives, and the published accuracies by paradigm and model, if BLiMP's are there.

    In a folder or archive, other files are left out, and a note counts them. Zip archives in a folder without tables are read.
    Raises UserError with file and line on bad input, and if there are no pairs.
    """
    pairs: list[MinimalPair] = []
    published: dict[str, dict[str, float]] = {}
    left_out, direct = 0, {str(path) for path in files}
    for name, lines in _texts(files):
        if name.endswith(SUMMARY):
            published |= _read_summary(lines, name)
        elif table_form(name) is None and name not in direct:
            left_out += 1
        else:
            pairs += _pairs_of(lines, name, columns)
    if left_out:
        warn(f"note: {', '.join(direct)}: {left_out:,} files cannot hold pairs, and are left out")
    if not pairs:
        raise UserError(f"{', '.join(direct)} has no minimal pairs; give JSON Lines, a table with a header, or trees in brackets")
    return pairs, published


def _texts(files: Sequence[Path]) -> Iterator[tuple[str, Iterator[str]]]:
    for path in files:
        if path.is_dir() and not any(table_form(one.name) and one.name != SUMMARY for one in path.rglob("*")):
            yield from read_texts(sorted(path.rglob("*.zip")), stripped=False)
        yield from read_texts([path], stripped=False)


def _pairs_of(lines: Iterator[str], name: str, columns: PairColumns) -> Iterator[MinimalPair]:
    """Yield the pairs of one file. Without the suffix of a table, a file that begins with a bracket has trees."""
    if (first := next(lines, None)) is None:
        return
    lines = chain([first], lines)
    if table_form(name) is None and first.lstrip().startswith("("):
        yield from _tree_pairs(lines, name)
        return
    quotes = _Quotes(name, (columns.good, columns.bad)) if table_form(name) in ("tsv", None) else None
    for record in records_of(lines, name, columns, needs_header=True):
        where = f"{name}, line {record.number}"
        good, bad, *groups = (clean_field(*field, where) for field in zip(record.fields, columns.wanted, strict=True))
        if quotes:
            quotes.check(record.number, (good, bad))
        yield MinimalPair(f"{Path(name).name}:{record.number}", (good, bad), tuple(" ".join(one.split()) for one in groups))
    if quotes:
        quotes.check_all()


class _Quotes:
    """Refuses a table with tabs whose sentences are quoted as in CSV: its quotation marks would be scored as text."""

    def __init__(self, name: str, columns: tuple[str, str]):
        self._name = name
        self._first: dict[str, tuple[int, str]] = {}  # the first sentence of each column
        self._quoted = dict.fromkeys(columns, True)  # whether all sentences so far are

    def check(self, number: int, sentences: tuple[str, str]) -> None:
        """Raise UserError for a sentence with doubled marks inside quotation marks."""
        for column, sentence in zip(self._quoted, sentences, strict=True):
            doubled = csv_quotes(sentence)
            self._first.setdefault(column, (number, sentence))
            self._quoted[column] &= doubled is not None
            if doubled:
                raise UserError(
                    f"{self._name}, line {number}: expected a plain {column} between tabs, but found one quoted as in CSV: "
                    f"{quoted(sentence[:_SHOWN])}; undo the quoting, or save the table with commas as a file in .csv"
                )

    def check_all(self) -> None:
        """Warn if all sentences of a column stand in quotation marks."""
        for column, (number, sentence) in self._first.items():
            if self._quoted[column]:
                warn(
                    f"warning: {self._name}, line {number}: every {column} stands in quotation marks, which are scored as text: "
                    f"{quoted(sentence[:_SHOWN])}; undo the quoting if it is that of CSV"
                )


def _tree_pairs(lines: Iterator[str], name: str) -> Iterator[MinimalPair]:
    rows = read_trees(lines, name)
    for number, (good, bad) in enumerate(zip_longest(rows, rows), start=1):
        if bad is None or not (good["trees"] and bad["trees"]):
            wrong = 2 * number - (not good["trees"])
            raise UserError(f"{name}: trees {2 * number - 1} and {2 * number} must be a pair, but tree {wrong} has no words")
        yield MinimalPair(f"{Path(name).name}:{number}", (good["source"], bad["source"]), trees=(good, bad))


def _read_summary(lines: Iterator[str], name: str) -> dict[str, dict[str, float]]:
    """Return the published accuracies of each paradigm by model. It leaves out the lines with totals."""
    found = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            found[row[_PARADIGM]] = {key: float(value) for key, value in row.items() if isinstance(value, int | float)}
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{name}, line {number}: expected an object with {_PARADIGM} and accuracies; restore it") from None
    found.pop(_TOTALS, None)
    return found


def encode_pairs(
    pairs: Sequence[MinimalPair], data: AnyPath, *, reads_trees: bool, words_only: bool = False
) -> Iterator[tuple[dict, list[str]]]:
    """Yield the row and the pieces' names of every sentence, the good one of a pair before the bad one.

    Row 2n and row 2n + 1 are a pair, whose random trees are drawn alike. With `words_only`, rows have leaves alone. Raises
    UserError as `LineEncoder` does.
    """
    trees = [row for pair in pairs for row in pair.trees or ()]
    if trees and len(trees) < 2 * len(pairs):
        raise UserError("pairs.files: some files have trees and others have none; score them one after the other")
    remedy = "set trees=beam for a grammar, or data=DIR, a data set of the same text with the parser's trees"
    encoder = LineEncoder(
        data,
        given_trees=bool(trees),
        reads_trees=reads_trees,
        words_only=words_only,
        instead_of_shuffled=remedy,
        instead_of_given="; give the pairs as trees in brackets, or a run whose data set has a parser",
    )
    rows = convert_rows(iter(trees), "none", read_index(data / "encoded").get("normalization", "none"))
    sentences = [sentence for pair in pairs for sentence in pair.sentences]
    encode = encoder.encode_leaves if words_only else encoder.encode_parsed
    name_of = cache(lambda piece: encoder.subwords.names([piece])[0])
    for first in range(0, len(sentences), _LINES):
        numbers = range(first, min(first + _LINES, len(sentences)))
        lines = [encoder.normalize(sentences[number]) for number in numbers]
        given = [Given(row["words"], row["trees"]) for row in islice(rows, len(numbers))]
        parsed = encoder.parse(lines, given or None)
        for number, row in zip(numbers, encode(lines, parsed, [n // 2 for n in numbers]), strict=True):
            yield row | {"example_id": number}, [*map(name_of, row["leaves"]["piece"].tolist())]
