"""The results of runs for lines: translations, and classes of lines and phrases."""

from dataclasses import dataclass, field


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
