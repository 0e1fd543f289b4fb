"""Near copies between splits: texts that are equal after lower-casing and taking punctuation, symbols and blanks out."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from treeproc.stages.example_keys import key_of


def normalised(lines: Sequence[str]) -> list[str]:
    """Return the letters and digits of every line, in lower case. Lines hold no line end."""
    joined = "\n".join(lines)
    if joined.isascii():
        return joined.encode().translate(*_ascii()).decode().split("\n")
    codes = _plain_codes()[np.frombuffer(joined.encode("utf-32-le"), np.uint32)]
    return codes[codes > 0].tobytes().decode("utf-32-le").split("\n")


@cache
def _plain_codes() -> np.ndarray:
    """Return the replacement of every character, by code: 0 removes it. Characters beyond the basic plane are kept."""
    codes = np.arange(0x110000, dtype=np.uint32)
    for code in range(0x10000):
        character = chr(code)
        if character.isalnum():
            codes[code] = ord(character.lower()[0])
        elif character != "\n":
            codes[code] = 0
    return codes


@cache
def _ascii() -> tuple[bytes, bytes]:
    """Return the same for ASCII, as `bytes.translate` takes it: the table, and the characters that go."""
    codes = _plain_codes()[:128]
    table = bytes([*codes.astype(np.uint8).tolist(), *range(128, 256)])
    return table, bytes(np.flatnonzero(codes == 0).tolist())


class NearCopies:
    """The sources of a split, to find near copies of them in another: 16 bytes a line, and a short hash that most lines fail."""

    def __init__(self) -> None:
        self._short: set[int] = set()
        self._keys: set[bytes] = set()

    def add(self, line: str) -> None:
        """Add a line of the split. Lines without letters and digits are left out, because they would all be equal."""
        if text := normalised([line])[0]:
            self._short.add(hash(text))
            self._keys.add(key_of(text))

    def find(self, lines: Sequence[str]) -> list[int]:
        """Return the places of the lines, which are `normalised`, that stand in the split."""
        hashes = enumerate(map(hash, lines))
        return [place for place, short in hashes if short in self._short and key_of(lines[place]) in self._keys]
