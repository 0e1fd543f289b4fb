"""Tokens: the result of a tokeniser."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """A token of a line, [start, end), and the syntactic words that it stands for: one, or more (don't = do + n't)."""

    start: int
    end: int
    words: tuple[str, ...]
