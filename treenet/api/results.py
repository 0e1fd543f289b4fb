"""The results of runs for lines: translations, classes of lines and phrases, and messages."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treenet.evaluation.line_classifier import EMPTY
from treeproc.common.errors import UserError
from treeproc.online.raw_lines import EncodedLine, RawLineEncoder


def line_messages(encoder: RawLineEncoder, lines: Sequence[EncodedLine]) -> Iterator[str]:
    """Yield the messages about the lines of a call, from 1, and those about all of them."""
    for number, line in enumerate(lines, start=1):
        empty = "" if line.row is None or len(line.row["leaves"]["piece"]) else EMPTY
        if message := line.problem or line.note or empty:
            yield f"line {number}: {message}"
    for notice in encoder.notices(lines).values():
        yield f"lines: {notice}"


# What keywords may have meant that are no settings of the search.
_MEANT = {
    "prefix": "prefixes",
    **dict.fromkeys(
        ("num_best", "nbest", "n_best", "num_return_sequences"), "run.candidates(lines, num_best=...), which returns several"
    ),
}


def check_keywords(keywords: Iterable[str]) -> None:
    """Raise UserError for a keyword of a search that has another name, or belongs to another method."""
    for name in keywords:
        if name in _MEANT:
            raise UserError(f"decoding: {name}: unknown key; did you mean {_MEANT[name]}?")


@dataclass(frozen=True)
class Translation:
    """One translation of a line."""

    text: str
    score: float  # log_prob over the length penalty, unless the method or the coverage penalty changes it; NaN of an empty line
    log_prob: float  # sum over pieces and the end of the sentence, in nats
    pieces: tuple[str, ...] = ()
    piece_log_probs: tuple[float, ...] = ()  # where a translation was given: of its pieces, and of the end


@dataclass(frozen=True)
class PhraseClasses:
    """The classes of a phrase of a line: its pieces [start, end), its text, and probabilities by the name of the class."""

    text: str
    start: int
    end: int
    label: str
    probabilities: dict[str, float] = field(repr=False)


@dataclass(frozen=True)
class LineClasses:
    """The most probable class of a line, its probability, all probabilities by name, and the phrases if they were asked for."""

    label: str
    probability: float
    probabilities: dict[str, float]
    phrases: tuple[PhraseClasses, ...] = ()
