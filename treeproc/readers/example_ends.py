"""Where examples end in the bytes of a file: at a line end, at the last bracket of a tree, or at the blank line after a sentence.

A task looks at some chunks of a file, without the chunks before them. `join` puts the findings of all chunks together. It gives
the number of ends in each chunk, and the state at its start. `find` reaches the start of any example from these two.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

import numpy as np

from treeproc.common.settings import UserError
from treeproc.readers import numbered_lines

_READ_BYTES = 1 << 20
_LINE_END, _OPEN, _CLOSE = b"\n()"
_NEVER_BLANK = frozenset(bytes([code]) for code in b"#0123456789")


class NotCut(UserError):
    """The examples of a file cannot be counted. The reader of its format gives the message."""


@dataclass(frozen=True)
class Joined:
    """Ends and states by chunk: `ends` in each, `states` at the start of each; whether the last example has no end."""

    ends: list[int]
    states: list[int]
    unended: bool


class Ends(Protocol):
    """The ends of one kind of example."""

    def look(self, file: IO[bytes], start: int, stop: int, chunk: int) -> list:
        """Return what each chunk of bytes [start, stop) holds, as JSON. `file` is buffered."""

    def join(self, found: Sequence) -> Joined:
        """Join the findings of all chunks. Raises NotCut if the file is not of this kind."""

    def find(self, file: IO[bytes], offset: int, state: int, ends: int) -> int | None:
        """Return the place after so many ends from the start of a chunk; None if the file has fewer."""


class LineEnds:
    """Every line is an example."""

    def look(self, file: IO[bytes], start: int, stop: int, chunk: int) -> list[int]:
        return [int(np.count_nonzero(codes == _LINE_END)) for codes in _chunks(file, start, stop, chunk)]

    def join(self, found: Sequence[int]) -> Joined:
        return Joined(list(found), [0] * len(found), unended=False)  # the caller looks at the last byte

    def find(self, file: IO[bytes], offset: int, state: int, ends: int) -> int | None:
        return _find(file, offset, ends, lambda codes: np.flatnonzero(codes == _LINE_END))


class TreeEnds:
    """Every tree in brackets is an example. The state is the number of open brackets."""

    def look(self, file: IO[bytes], start: int, stop: int, chunk: int) -> list[list[int]]:
        """Return for each chunk: its change of depth, its lowest depth, and the brackets that close to there.

        Depths count from the start of the chunk. The lowest is at most 0.
        """
        found = []
        for codes in _chunks(file, start, stop, chunk):
            depths = _depths(codes)
            low = int(depths.min(initial=0))
            last = int(depths[-1]) if len(depths) else 0
            found.append([last, low, int(np.count_nonzero((codes == _CLOSE) & (depths == low)))])
        return found

    def join(self, found: Sequence[list[int]]) -> Joined:
        ends, states, depth = [], [], 0
        for change, low, closed in found:
            if depth + low < 0:
                raise NotCut("a bracket closes nothing")
            states.append(depth)
            ends.append(closed if depth + low == 0 else 0)
            depth += change
        if depth:
            raise NotCut("a bracket is not closed")
        return Joined(ends, states, unended=False)

    def find(self, file: IO[bytes], offset: int, state: int, ends: int) -> int | None:
        depth = state

        def closing(codes: np.ndarray) -> np.ndarray:
            nonlocal depth
            depths = depth + _depths(codes)
            depth = int(depths[-1])
            return np.flatnonzero((codes == _CLOSE) & (depths == 0))

        return _find(file, offset, ends, closing)


class SentenceEnds:
    """Every block of lines up to a blank line is an example. The state is 1 if the line before the chunk is not blank.

    A line belongs to the chunk in which it begins.
    """

    def look(self, file: IO[bytes], start: int, stop: int, chunk: int) -> list[list[int]]:
        """Return for each chunk its ends after its first line, and whether its first and its last line are blank.

        A chunk in which no line begins has an empty list.
        """
        found: list[list[int]] = [[] for _ in range(start, stop, chunk)]
        for place, _, blank in _lines(file, start):
            if place >= stop:
                break
            if one := found[(place - start) // chunk]:
                one[0] += blank and not one[2]
                one[2] = blank
            else:
                one += [0, blank, blank]
        return found

    def join(self, found: Sequence[list[int]]) -> Joined:
        ends, states, inside = [], [], 0
        for one in found:
            states.append(inside)
            ends.append(one[0] + (inside and one[1]) if one else 0)
            inside = 1 - one[2] if one else inside
        return Joined(ends, states, unended=bool(inside))

    def find(self, file: IO[bytes], offset: int, state: int, ends: int) -> int | None:
        inside, left = state, ends
        for _, stop, blank in _lines(file, offset):
            left -= inside and blank
            inside = 1 - blank
            if not left:
                return stop
        return None


ENDS: dict[str, Ends] = {"lines": LineEnds(), "trees": TreeEnds(), "sentences": SentenceEnds()}


def _chunks(file: IO[bytes], start: int, stop: int, chunk: int) -> Iterator[np.ndarray]:
    """Yield the bytes of each chunk."""
    file.seek(start)
    for begin in range(start, stop, chunk):
        yield np.frombuffer(file.read(min(chunk, stop - begin)), np.uint8)


def _depths(codes: np.ndarray) -> np.ndarray:
    """Return the number of open brackets after each byte; it is 0 before the first."""
    return np.cumsum((codes == _OPEN).astype(np.int8) - (codes == _CLOSE), dtype=np.int32)


def _find(file: IO[bytes], offset: int, ends: int, ends_in: Callable[[np.ndarray], np.ndarray]) -> int | None:
    left = ends
    file.seek(offset)
    while left:
        codes = np.frombuffer(file.read(_READ_BYTES), np.uint8)
        if not len(codes):
            return None
        places = ends_in(codes)
        if len(places) >= left:
            return offset + int(places[left - 1]) + 1
        left -= len(places)
        offset += len(codes)
    return offset


def _lines(file: IO[bytes], start: int) -> Iterator[tuple[int, int, int]]:
    """Yield the lines that begin at `start` or later: their first byte, the byte after them, and whether they are blank.

    Raises NotCut for a line that no reader takes.
    """
    place = max(0, start - 1)
    file.seek(place)
    while line := file.readline(numbered_lines.MOST_LINE_BYTES + 1):
        if len(line) > numbered_lines.MOST_LINE_BYTES:
            raise NotCut("a line is too long")
        if place >= start:
            text = line.removeprefix(numbered_lines.UTF8_BOM) if place == 0 else line
            # The first test is fast, and true for nearly all lines.
            yield place, place + len(line), int(text[:1] not in _NEVER_BLANK and not text.decode("utf-8", "replace").strip())
        place += len(line)
