"""Lines of a file as pieces, and where in them the words begin that stand between blanks.

The parser's words are others: it cuts `don't` and full stops without a blank.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeproc.common.messages import warn
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.online.line_encoder import LineEncoder
from treeproc.pretrained_pieces import TokenizerPieces
from treeproc.readers import read_lines
from treeproc.readers.labelled import refuse_table
from treeproc.readers.line_forms import is_blank
from treeproc.shards.schema import line_end_in
from treeproc.stages.text_warnings import SideNotices, Wanted, is_noticed

_MARK = "\u2581"  # stands for a blank in the names of pieces, and is read as one in texts
_BLANKS = re.compile(f"[ {_MARK}]+")
_LINES = 8192  # encoded at once
_SEVERAL = 0.05  # a larger share of lines of train with several sentences: its lines are no single sentences


@dataclass(frozen=True)
class SpacedLine:
    """A line with its words, its pieces, and the first piece of each word, which has the blank before it."""

    number: int  # from 1
    words: list[str]
    pieces: list[int]
    names: list[str]  # of the pieces
    starts: list[int]
    parsed: np.ndarray  # the parser's word of each piece


def encode_spaced(path: AnyPath, data: AnyPath) -> tuple[list[SpacedLine], list[int]]:
    """Return the lines of a file that are not empty, and all pieces that begin a word.

    Raises UserError with the line for a tab, which a table of words cannot hold, for a table, if no line has words, and as
    `LineEncoder` does. Warns of lines with several sentences if the data set has one sentence a line.
    """
    refuse_table(path)
    lines = list(read_lines([path], "texts"))
    instead_of_given = ", but surprisal reads text alone; give a run whose data set has a parser"
    encoder = LineEncoder(data, reads_trees=False, words_only=True, instead_of_given=instead_of_given)
    if isinstance(encoder.subwords, TokenizerPieces):
        raise UserError(f"surprisal: needs pieces with the blank before a word, but {data} has those of a pretrained tokenizer")
    every = list(enumerate(map(encoder.normalize, lines), start=1))
    for number, line in every:
        if "\t" in line or line_end_in([line]):
            raise UserError(f"{path}, line {number}: expected words between blanks, but found a tab or line end; write a blank")
    full = [(number, line) for number, line in every if not is_blank(line)]
    if not full:
        raise UserError(f"{path} has no words; give a file with one sentence a line")
    _say_sentences(path, full, encoder)
    found = []
    for first in range(0, len(full), _LINES):
        part = full[first : first + _LINES]
        for (number, line), row in zip(part, encoder.encode([line for _, line in part]), strict=True):
            pieces = row["leaves"]["piece"].tolist()
            words, names = [word for word in _BLANKS.split(line) if word], encoder.subwords.names(pieces)
            starts = _starts(names)
            if len(words) != len(starts):
                raise UserError(f"{path}, line {number}: expected pieces of {len(words)} words, but found {len(starts)}")
            found.append(SpacedLine(number, words, pieces, names, starts, row["leaves"]["word_index"]))
    every_name = encoder.subwords.names(range(len(encoder.subwords)))
    return found, [piece for piece, name in enumerate(every_name) if name.startswith(_MARK)]


def _say_sentences(path: AnyPath, lines: Sequence[tuple[int, str]], encoder: LineEncoder) -> None:
    """Warn of lines with several sentences, unless those of train had them too, or the data set did not look for them."""
    learned = encoder.learned
    if learned is None or "sentences" not in learned or learned["sentences"]["count"] > _SEVERAL * learned["lines"]:
        return
    side = SideNotices(Wanted(("sentences",), tags=encoder.tags))
    side.add([line for _, line in lines], lambda place: lines[place][0])
    facts = side.facts()
    if is_noticed("sentences", facts):
        found = facts["sentences"]
        warn(
            f"warning: {path}: several sentences on a line: {found['count']:,} of {len(lines):,} lines, for example line "
            f"{found['line']:,}: {found['text']!r}; each line is scored as one sentence; write one sentence a line"
        )


def _starts(names: Sequence[str]) -> list[int]:
    """Return the places of the pieces that begin words. Further blanks before a word belong to it."""
    starts: list[int] = []
    has_text = True
    for place, name in enumerate(names):
        if name.startswith(_MARK) and has_text:
            starts.append(place)
            has_text = False
        has_text = has_text or bool(name.strip(_MARK))
    return starts
