"""Constraints on the translation of a raw line: its beginning, and phrases that must or must not appear."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONSTRAINTS = ("prefix", "must_appear", "must_not_appear")  # columns of an encoded row
# Limits of a line. A search holds a table of the forbidden strings, and the state of each phrase for each of its hypotheses.
MOST_BYTES, MOST_PHRASES = 1000, 50


@dataclass(frozen=True)
class Constraints:
    """The constraints of one line, as text."""

    prefix: str = ""
    must_appear: tuple[str, ...] = ()
    must_not_appear: tuple[str, ...] = ()

    @classmethod
    def read(cls, prefix: str = "", must_appear: str = "", must_not_appear: str = "") -> "Constraints":
        """Make constraints from lines of files, whose phrases are separated by tabs; blank ones are left out.

        A blank before a forbidden string counts: a word begins there. Raises ValueError if a line has too many of them.
        """
        required = tuple(phrase.strip() for phrase in must_appear.split("\t") if phrase.strip())
        forbidden = tuple(phrase for phrase in must_not_appear.split("\t") if phrase.strip())
        size = sum(len(text.encode()) for text in forbidden)
        if size > MOST_BYTES:
            raise ValueError(f"must_not_appear: {size:,} bytes of strings are more than {MOST_BYTES:,}; give fewer strings")
        if len(required) > MOST_PHRASES:
            raise ValueError(f"must_appear: {len(required):,} phrases are more than {MOST_PHRASES}; give fewer phrases")
        return cls(prefix.strip(), required, forbidden)

    def __bool__(self) -> bool:
        return bool(self.prefix or self.must_appear or self.must_not_appear)

    @property
    def pieces_of(self) -> list[str]:
        """Return the texts that a search needs as pieces: the prefix, if there is one, and the phrases that must appear."""
        return [text for text in (self.prefix, *self.must_appear) if text]

    def columns(self, pieces: Sequence[np.ndarray]) -> dict:
        """Return the columns of an encoded row. `pieces` are of the texts in `pieces_of`."""
        prefix, phrases = (pieces[:1], pieces[1:]) if self.prefix else ([], pieces)
        return {
            "prefix": prefix[0] if prefix else np.zeros(0, dtype=np.int32),
            "must_appear": list(phrases),
            "must_not_appear": list(self.must_not_appear),
        }
