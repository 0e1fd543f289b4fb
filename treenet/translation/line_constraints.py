"""Constraints on the translation of a line: its first pieces, phrases that it must contain, and strings that it must not contain.

Phrases that must appear: vectorised dynamic beam allocation (Post and Vilar, 2018; Hu et al., 2019). A phrase is a sequence of
pieces. It is met if the hypothesis contains it in one place. The bank of a hypothesis is the number of pieces of its met phrases,
and of the longest beginning of another phrase that it ends with. The places of a beam go to the banks in turn, the highest bank
first. Every hypothesis also proposes the pieces that lead on to phrases, however improbable. So the highest bank rises with every
piece, until all phrases are met. Only then may a hypothesis end.

Strings that must not appear, however they are cut into pieces, become one automaton over UTF-8 bytes for each line (Aho and
Corasick, 1975). A piece is banned if its text, after the text so far, completes one of them.

Shapes: B sentences, C hypotheses of a sentence, R decoded hypotheses, F proposals of a hypothesis, N extensions of a sentence.
P phrases, L pieces of the longest phrase, T pieces so far, V vocabulary, W bytes of the longest piece, S states.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from treenet.config import DecodingConfig
from treenet.translation.hypotheses import Hypotheses, Restriction, restrictions_of
from treenet.translation.settings import MUST_APPEAR, MUST_NOT_APPEAR, PREFIX
from treeproc.common.errors import UserError, as_list, check_string
from treeproc.shards.schema import EOS_ID

_NO_PIECE = -1

Phrases = Sequence[Sequence[int]]


class RequiredPhrases:
    """The phrases of a batch of sentences, and which of them each of `beam_width` hypotheses of a sentence has met."""

    on_device = False

    def __init__(self, phrases: Sequence[Phrases], device: torch.device, beam_width: int):
        most = max(len(own) for own in phrases)
        longest = max(len(phrase) for own in phrases for phrase in own)
        pieces = torch.full((len(phrases), most, longest), _NO_PIECE)
        for sentence, own in enumerate(phrases):
            for number, phrase in enumerate(own):
                pieces[sentence, number, : len(phrase)] = torch.tensor(phrase)
        self._pieces = pieces.to(device)  # [B, P, L]
        self._lengths = (self._pieces != _NO_PIECE).sum(2)  # [B, P], 0 where there is no phrase
        self._met = (self._lengths[:, None] == 0).expand(-1, beam_width, -1)  # [B, C, P]

    def apply(self, log_probs: Tensor, hypotheses: Any) -> None:
        """Forbid the end of hypotheses that lack a phrase."""
        log_probs[:, EOS_ID].masked_fill_(hypotheses.decoded(~self._met.all(2)), -torch.inf)

    def propose(
        self, log_probs: Tensor, values: Tensor, chosen: Tensor, grid: Tensor, decoded: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Add the next piece of each phrase to the proposals `chosen` [R, F] of probabilities `values`.

        `grid` [B, C, T] has the pieces so far, and `decoded` takes the decoded rows [R, ...] of a grid [B, C, ...]. Returns both
        as [R, F + P]. The value of a piece that was proposed already is -inf.
        """
        progress = self._matches(grid).int().mul(self._steps()).amax(3).long()  # [B, C, P]
        following = self._pieces[:, None].expand(-1, progress.shape[1], -1, -1).gather(3, progress[..., None])[..., 0]
        following = decoded(following.masked_fill(self._met, _NO_PIECE))  # [R, P]
        again = (following[:, :, None] == chosen[:, None, :]).any(2)
        again |= (following[:, :, None] == following[:, None, :]).tril(-1).any(2)
        found = log_probs.gather(1, following.clamp(min=0)).masked_fill(again | (following == _NO_PIECE), -torch.inf)
        return torch.cat([values, found], dim=1), torch.cat([chosen, following.clamp(min=0)], dim=1)

    def allocate(self, best: Tensor, chosen: Tensor, origin: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Order extensions [B, N], best first, by their rank within their bank, and then by bank, the highest first."""
        met, progress = self._extend(chosen, origin, grid)
        # An end has no progress, but all phrases.
        bank = (met * self._lengths[:, None]).sum(2) + progress.masked_fill(met, 0).amax(2)  # [B, N]
        bank = bank.masked_fill(best.isneginf(), -1)  # dead ones share a bank
        banks, by_bank = bank.sort(dim=1, descending=True, stable=True)
        place = torch.arange(bank.shape[1], device=bank.device).expand_as(bank)
        first = torch.cat([torch.ones_like(banks[:, :1], dtype=torch.bool), banks[:, 1:] != banks[:, :-1]], dim=1)
        rank = (place - place.masked_fill(~first, 0).cummax(1).values).masked_fill(banks < 0, bank.shape[1])
        order = by_bank.gather(1, rank.sort(dim=1, stable=True).indices)
        return best.gather(1, order), chosen.gather(1, order), origin.gather(1, order)

    def follow(self, chosen: Tensor, origin: Tensor, grid: Tensor) -> None:
        """Go on to hypotheses that extend those at `origin` [B, C'] of the grid by `chosen`."""
        self._met, _ = self._extend(chosen, origin, grid)

    def _extend(self, chosen: Tensor, origin: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether extensions [B, N] have met each phrase, and how much of it they end with: both [B, N, P]."""
        place = origin[:, :, None].expand(-1, -1, self._met.shape[2])
        progress = torch.zeros_like(place)
        for count, before in enumerate(self._matches(grid).unbind(3)):  # all at once would take L times the memory
            longer = before.gather(1, place) & (self._pieces[:, None, :, count] == chosen[:, :, None])
            progress = progress.masked_fill(longer, count + 1)
        return self._met.gather(1, place) | (progress == self._lengths[:, None]), progress

    def _matches(self, grid: Tensor) -> Tensor:
        """Return [B, C, P, L]: whether hypotheses end with the first 0, 1, ... L - 1 pieces of phrases."""
        out: list[Tensor] = []
        for count in range(self._pieces.shape[2]):
            if count > grid.shape[2]:
                out.append(torch.zeros_like(out[0]))
                continue
            ending = grid[:, :, None, grid.shape[2] - count :]
            out.append((ending == self._pieces[:, None, :, :count]).all(3) & (count < self._lengths)[:, None])
        return torch.stack(out, dim=3)

    def _steps(self) -> Tensor:
        return torch.arange(self._pieces.shape[2], dtype=torch.int32, device=self._pieces.device)


_STAY = 256  # the byte after the end of a piece


class PieceTexts:
    """The text of every piece of a vocabulary, as bytes. A line begins with a blank, as in sentencepiece."""

    def __init__(self, processor: SentencePieceProcessor):
        self._processor = processor
        self.texts = [self._text(piece) for piece in range(processor.vocab_size())]
        self.table = np.full((len(self.texts), max(map(len, self.texts), default=0)), _STAY, dtype=np.int16)  # [V, W]
        for row, text in zip(self.table, self.texts, strict=True):
            row[: len(text)] = list(text)

    def _text(self, piece: int) -> bytes:
        name = self._processor.id_to_piece(piece)
        if self._processor.is_byte(piece):  # <0x0A>
            return bytes([int(name[3:5], 16)])
        return b"" if self._processor.is_control(piece) else name.replace("▁", " ").encode()


class ForbiddenStrings:
    """The automaton of the forbidden strings of a line, which must not be empty."""

    def __init__(self, strings: Sequence[str], pieces: PieceTexts):
        self._pieces = pieces
        self._next = _build_automaton([string.encode() for string in strings])
        self._found = len(self._next) - 1
        self._states: dict[tuple[int, ...], int] = {(): int(self._next[0, ord(" ")])}  # by the pieces so far
        self._banned: dict[int, np.ndarray] = {}  # by state

    def banned(self, pieces: tuple[int, ...]) -> np.ndarray:
        """Return the ids of the pieces that must not follow `pieces`, ascending."""
        state = self._state(pieces)
        if state not in self._banned:
            states = np.full(len(self._pieces.table), state)
            for byte in self._pieces.table.T:
                states = self._next[states, byte]
            self._banned[state] = np.flatnonzero(states == self._found)
        return self._banned[state]

    def _state(self, pieces: tuple[int, ...]) -> int:
        known = len(pieces)
        while pieces[:known] not in self._states:
            known -= 1
        state = self._states[pieces[:known]]
        for place in range(known, len(pieces)):
            for byte in self._pieces.texts[pieces[place]]:
                state = int(self._next[state, byte])
            self._states[pieces[: place + 1]] = state
        return state


def _build_automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Return the next state [S + 1, 257] by state and byte. State 0 is the start, and S, which never ends, a found string."""
    children: list[dict[int, int]] = [{}]
    ends = {0: False}
    for string in strings:
        state = 0
        for byte in string:
            if byte not in children[state]:
                children[state][byte] = len(children)
                ends[len(children)] = False
                children.append({})
            state = children[state][byte]
        ends[state] = True
    found = len(children)
    table = np.zeros((found + 1, 257), dtype=np.int16)
    suffix = [0] * found  # the state of the longest proper suffix
    queue = deque([0])
    while queue:
        state = queue.popleft()
        if state:
            ends[state] |= ends[suffix[state]]
            table[state] = table[suffix[state]]
        for byte, child in children[state].items():
            suffix[child] = int(table[suffix[state], byte]) if state else 0
            table[state, byte] = child
            queue.append(child)
        table[state, _STAY] = state
    ending = np.array([*(ends[state] for state in range(found)), False])
    table[ending[table]] = found
    table[found] = found
    return table


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
