"""Pairs of sentences with a score of relatedness: SICK."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from treeproc.common.settings import UserError
from treeproc.readers.numbered_lines import read_lines
from treeproc.readers.unicode_form import is_blank

_COLUMNS = ("sentence_A", "sentence_B", "relatedness_score")
_SPLIT = "SemEval_set"
_SCORE = re.compile(r"[1-4](\.[0-9]{1,9})?|5(\.0{1,9})?")


def read_sick(source: Sequence[Path], target: Sequence[Path]) -> Iterator[dict]:
    """Return two rows per pair, sentence A and sentence B, both with the score of the pair, from 1 to 5.

    A path is a tab-separated table with a header, such as SICK.txt or the SemEval files. It may also be a part of one:
    `SICK.txt/TRAIN` takes the rows with TRAIN in the column SemEval_set.
    """
    for path in source:
        is_part = isinstance(path, Path) and path.parent.is_file()
        yield from _read_table(path.parent, path.name) if is_part else _read_table(path, None)


def _read_table(path: Path, part: str | None) -> Iterator[dict]:
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
