"""Published corpora with a class or a score: IMDB reviews, subject-verb agreement, and SICK's pairs of sentences."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.readers.line_forms import is_blank, join_with_blanks
from treeproc.readers.numbered_lines import read_lines, read_texts
from treeproc.readers.packed_files import plain_name

_LINE_BREAK = re.compile(r"(?:<br\s*/?>|[\r\n])+", re.IGNORECASE)
_SENTIMENT = {"neg": 0, "pos": 1}
# The number of the verb: singular 0, plural 1.
_NUMBER = {"VBZ": 0, "VBP": 1}
_TABLE_COLUMNS = ("sentence", "verb_pos", "verb_index")
_COLUMNS = ("sentence_A", "sentence_B", "relatedness_score")
_SPLIT = "SemEval_set"
_SCORE = re.compile(r"[1-4](\.[0-9]{1,9})?|5(\.0{1,9})?")


def read_imdb(source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Iterator[dict]:
    """Read reviews of a part of aclImdb (`aclImdb/train`, `aclImdb_v1.tar.gz/aclImdb/test`), by file name.

    The folder gives the class: neg 0, pos 1. Other folders have no labels and are left out.
    """
    found = False
    for name, lines in read_texts(source):
        folder = re.split(r"[\\/]", name)[-2:-1]
        if plain_name(name).endswith(".txt") and folder and folder[0] in _SENTIMENT:
            found = True
            yield {"source": _LINE_BREAK.sub(" ", "\n".join(lines)).strip(), "label": _SENTIMENT[folder[0]]}
    if not found:
        raise UserError(f"{source[0]}: expected pos/*.txt and neg/*.txt below it, as in aclImdb/train, but found no review")


def read_prefixes(lines: Iterator[str], name: str) -> Iterator[dict]:
    """Return the rows of lines of VBZ or VBP, a tab, and the words before the verb. Raises UserError with file and line."""
    for number, line in enumerate(lines, start=1):
        label, _, prefix = line.partition("\t")
        if label not in _NUMBER:
            raise UserError(f"{name}, line {number}: expected VBZ or VBP, a tab and the words before the verb: {line[:40]!r}")
        yield _prefix_row(prefix.split(), _NUMBER[label])


def read_linzen(source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Iterator[dict]:
    """Read the full table of Linzen et al. (2016), tab-separated with a header: the words before the verb and its number."""
    for name, lines in read_texts(source):
        places: dict[str, int] | None = None
        for number, line in enumerate(lines, start=1):
            try:
                fields = next(csv.reader([line], delimiter="\t"), [])
            except csv.Error as error:
                raise UserError(f"{name}, line {number}: not a row of a tab-separated table: {error}") from None
            if places is None:
                if missing := [column for column in _TABLE_COLUMNS if column not in fields]:
                    raise UserError(f"{name}, line {number}: the header has no column {missing[0]!r}")
                places = {column: fields.index(column) for column in _TABLE_COLUMNS}
                width = len(fields)
                continue
            # Outer tabs are stripped with the line end, so empty fields at the end may be missing.
            if not max(places.values()) < len(fields) <= width:
                raise UserError(f"{name}, line {number}: expected {width} fields, but there are {len(fields)}")
            sentence, tag, index = (fields[places[column]] for column in _TABLE_COLUMNS)
            words = sentence.split()
            if tag not in _NUMBER or not re.fullmatch(r"[0-9]{1,9}", index) or not 1 <= int(index) <= len(words):
                raise UserError(
                    f"{name}, line {number}: verb_pos must be VBZ or VBP and verb_index one of the {len(words)} words, "
                    f"but they are {tag!r} and {index!r}"
                )
            yield _prefix_row(words[: int(index) - 1], _NUMBER[tag])


def _prefix_row(words: list[str], label: int) -> dict:
    source, spans = join_with_blanks(words)
    return {"source": source, "words": spans, "label": label}


def read_sick(source: Sequence[AnyPath], target: Sequence[AnyPath]) -> Iterator[dict]:
    """Return two rows per pair, sentence A and sentence B, both with the score of the pair, from 1 to 5.

    A path is a tab-separated table with a header, such as SICK.txt or the SemEval files. It may also be a part of one:
    `SICK.txt/TRAIN` takes the rows with TRAIN in the column SemEval_set.
    """
    for path in source:
        is_part = isinstance(path, Path) and path.parent.is_file()
        yield from _read_table(path.parent, path.name) if is_part else _read_table(path, None)


def _read_table(path: AnyPath, part: str | None) -> Iterator[dict]:
    lines, others = read_lines([path], "any"), set()
    header, found = next(lines, "").split("\t"), False
    wanted = [*_COLUMNS, *([_SPLIT] if part is not None else [])]
    if missing := [column for column in wanted if column not in header]:
        raise UserError(f"{path}, line 1: the header has no column {missing[0]!r}, but {', '.join(header)[:80]!r}")
    places = [header.index(column) for column in wanted]
    for number, line in enumerate(lines, start=2):
        fields = line.split("\t")
        if len(fields) != len(header):
            raise UserError(f"{path}, line {number}: expected {len(header)} fields, but there are {len(fields)}")
        first, second, score, *split = (fields[place] for place in places)
        if split and split[0] != part:
            others.add(split[0])
            continue
        if not _SCORE.fullmatch(score):
            raise UserError(f"{path}, line {number}: relatedness_score must be a number from 1 to 5, but is {score!r}")
        if is_blank(first) or is_blank(second):
            raise UserError(f"{path}, line {number}: a sentence is empty")
        found = True
        yield {"source": first, "score": float(score)}
        yield {"source": second, "score": float(score)}
    if not found and others:
        raise UserError(f"{path} has no row with {_SPLIT} {part}, but with {', '.join(sorted(others))}")
