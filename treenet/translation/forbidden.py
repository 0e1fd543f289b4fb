"""Strings that a translation must not contain, however it is cut into pieces.

The strings of a line become one automaton over UTF-8 bytes (Aho and Corasick, 1975). A piece is banned if its text, after the
text so far, completes one of them. Shapes: V vocabulary, W bytes of the longest piece, S states.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from sentencepiece import SentencePieceProcessor

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
        self._states = {(): int(self._next[0, ord(" ")])}  # by the pieces so far
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
