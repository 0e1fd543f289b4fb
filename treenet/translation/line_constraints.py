"""Constraints on the translation of a line: its first pieces, phrases that it must contain, and strings that it must not contain.

Shapes: R decoded hypotheses, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.translation.forbidden import ForbiddenStrings, PieceTexts
from treenet.translation.required import RequiredPhrases
from treenet.translation.restrictions import Hypotheses, Restriction, restrictions_of
from treeproc.common.errors import UserError, as_list, check_string

# Columns of an example that hold constraints.
PREFIX, MUST_APPEAR, MUST_NOT_APPEAR = "prefix", "must_appear", "must_not_appear"
CONSTRAINTS = (PREFIX, MUST_APPEAR, MUST_NOT_APPEAR)
_NO_PIECE = -1


@dataclass(frozen=True)
class LineConstraints:
    """The constraints of one line."""

    prefix: tuple[int, ...] = ()  # pieces
    required: tuple[tuple[int, ...], ...] = ()  # phrases of pieces, none of them empty
    forbidden: tuple[str, ...] = ()

    @classmethod
    def of(cls, example: Mapping) -> "LineConstraints":
        """Read the constraints of an example, from columns that it may have beside those of a shard."""
        return cls(
            tuple(map(int, example.get(PREFIX, ()))),
            tuple(dict.fromkeys(tuple(map(int, phrase)) for phrase in example.get(MUST_APPEAR, ()))),
            tuple(dict.fromkeys(example.get(MUST_NOT_APPEAR, ()))),
        )

    def __bool__(self) -> bool:
        return bool(self.prefix or self.required or self.forbidden)


def constraint_columns(prefixes: Sequence[str] | None, *phrases: Sequence[Sequence[str]] | None) -> dict[str, Sequence[str]]:
    """Return constraints in the form of the lines of files. `phrases` are those that must appear, then those that must not.

    Raises UserError for phrases that this form cannot hold.
    """
    columns: dict[str, Any] = {} if prefixes is None else {PREFIX: prefixes}
    for name, given in zip((MUST_APPEAR, MUST_NOT_APPEAR), phrases, strict=True):
        if given is not None:
            columns[name] = []
            for number, own in enumerate(as_list(name, given, "phrases for each line")):
                read = as_list(f"{name}[{number}]", own, "phrases")
                for phrase in read:
                    check_string(f"{name}[{number}]: a phrase", phrase)
                    if "\t" in phrase:
                        raise UserError(f"{name}: a phrase must not have tabs")
                columns[name].append("\t".join(read))
    return columns


def unmet(decoding: DecodingConfig) -> str:
    """Return the problem of a line for which the search has found nothing, and what to do."""
    ways = ", ".join(["raise decoding.max_length_offset", *(one.way_out for one in restrictions_of(decoding))])
    return f"no translation within the limits of length meets the constraints; {ways}, or relax them"


def check_method(decoding: DecodingConfig) -> None:
    """Raise UserError if a search by these settings cannot make phrases appear."""
    if decoding.method != "beam":
        raise UserError(
            f"must_appear needs decoding.method = beam, but it is {decoding.method}: samples are drawn piece by piece, and may "
            "lack the phrases"
        )
    if decoding.diversity_groups > 1:
        raise UserError("must_appear needs decoding.diversity_groups = 1: the phrases and the groups would divide the same beam")


class BatchConstraints:
    """The constraints of a batch of sentences, in its order. `pieces` is needed only for forbidden strings."""

    def __init__(self, lines: Sequence[LineConstraints], pieces: PieceTexts | None, device: torch.device | str):
        self._device = torch.device(device)
        self.constrained = [bool(line) for line in lines]
        self._phrases = [line.required for line in lines]
        self.restrictions: list[Restriction] = []  # without required phrases, which need a beam
        if any(line.prefix for line in lines):
            self.restrictions.append(_Prefixes([line.prefix for line in lines], self._device))
        if any(line.forbidden for line in lines):
            if pieces is None:
                raise ValueError("forbidden strings need the texts of the pieces")
            self.restrictions.append(_Forbidden([line.forbidden for line in lines], pieces))

    def required(self, beam_size: int) -> RequiredPhrases | None:
        """Return the required phrases at the start of a beam search; None if no sentence has any."""
        return RequiredPhrases(self._phrases, self._device, beam_size) if self.have_phrases else None

    @property
    def have_phrases(self) -> bool:
        """Whether a sentence has a required phrase."""
        return any(self._phrases)


class _Prefixes:
    """Demands the first pieces of translations."""

    on_device = False

    def __init__(self, prefixes: Sequence[tuple[int, ...]], device: torch.device):
        longest = max(map(len, prefixes))
        padded = [[*prefix, *[_NO_PIECE] * (longest - len(prefix))] for prefix in prefixes]
        self._prefixes = torch.tensor(padded, dtype=torch.long, device=device)

    def apply(self, log_probs: Tensor, hypotheses: Hypotheses) -> None:
        if hypotheses.step < self._prefixes.shape[1]:
            wanted = self._prefixes[hypotheses.sentences, hypotheses.step]
            others = torch.arange(log_probs.shape[1], device=log_probs.device) != wanted[:, None]
            log_probs.masked_fill_(others & (wanted != _NO_PIECE)[:, None], -torch.inf)


class _Forbidden:
    """Forbids pieces that would complete a forbidden string."""

    on_device = False

    def __init__(self, strings: Sequence[tuple[str, ...]], pieces: PieceTexts):
        automata = {own: ForbiddenStrings(own, pieces) for own in set(strings) if own}
        self._automata = [automata.get(own) for own in strings]

    def apply(self, log_probs: Tensor, hypotheses: Hypotheses) -> None:
        pieces = hypotheses.pieces[:, : hypotheses.step].tolist()
        for row, (sentence, ids) in enumerate(zip(hypotheses.sentences.tolist(), pieces, strict=True)):
            if (strings := self._automata[sentence]) is not None:
                log_probs[row, torch.from_numpy(strings.banned(tuple(ids))).to(log_probs.device)] = -torch.inf


def batch_constraints(
    examples: Iterable[Mapping], pieces: PieceTexts | None, device: torch.device | str
) -> BatchConstraints | None:
    """Return the constraints of a batch of examples; None if there are none."""
    lines = [LineConstraints.of(example) for example in examples]
    return BatchConstraints(lines, pieces, device) if any(lines) else None
