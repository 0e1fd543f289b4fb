"""The hash of a split, as `scan` computes it, from the files that the blocks of its examples leave.

`scan` also hashes the columns of trees and words, which no key covers. A block leaves them in a file, and the driver
hashes the files in order.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import IO

from treeproc.common.storage import AnyPath
from treeproc.stages.example_keys import KEY_BYTES
from treeproc.stages.text import KEYS_AT_ONCE, text_beyond_key

BEYOND = "beyond"
_ROWS_AT_ONCE = KEYS_AT_ONCE // KEY_BYTES
_READ_BYTES = 1 << 20


def keys_file(work: AnyPath, number: int, kind: str = "keys") -> AnyPath:
    """Return a file of a block in the work folder; its `json` is written last."""
    return work / f"block-{number:06d}.{kind}"


class BeyondKeys:
    """Writes the columns of examples that no key covers. `marks` are the places at which `scan` hashes keys.

    `first_id` is the number of the first example in its split.
    """

    def __init__(self, file: IO[bytes], names: Sequence[str], first_id: int):
        self._file, self._names, self._next, self._size = file, names, first_id, 0
        self.marks: list[int] = []

    def write(self, rows: Iterable[dict]) -> None:
        for row in rows:
            self._size += self._file.write(text_beyond_key(row, self._names))
            self._next += 1
            if self._next % _ROWS_AT_ONCE == 0:
                self.marks.append(self._size)


class SplitHash:
    """The hash of a split whose blocks come in order. With `keys_at_end`, all keys follow all other columns."""

    def __init__(self, work: AnyPath, *, keys_at_end: bool):
        self._work, self._keys_at_end, self._state = work, keys_at_end, hashlib.sha256()
        self._held = b""
        self._later: list[int] = []

    def add(self, number: int, marks: Sequence[int] | None) -> None:
        """Hash what a block left; `marks` are those of `BeyondKeys`, None of formats without such columns."""
        if marks is None:
            self._add_keys(number)
            return
        with keys_file(self._work, number, BEYOND).open("rb") as file:
            if self._keys_at_end:
                self._later.append(number)
            else:
                self._mix(file, marks, keys_file(self._work, number).read_bytes())
            self._feed(file)

    def hexdigest(self) -> str:
        """Return the hash after all blocks."""
        self._state.update(self._held)
        for number in self._later:
            self._add_keys(number)
        return self._state.hexdigest()

    def _mix(self, file: IO[bytes], marks: Sequence[int], keys: bytes) -> None:
        place = used = 0
        for mark in marks:
            self._feed(file, mark - place)
            more = KEYS_AT_ONCE - len(self._held)
            self._state.update(self._held + keys[used : used + more])
            self._held, place, used = b"", mark, used + more
        self._held += keys[used:]

    def _add_keys(self, number: int) -> None:
        with keys_file(self._work, number).open("rb") as file:
            self._feed(file)

    def _feed(self, file: IO[bytes], count: int | None = None) -> None:
        """Hash so many bytes of a file, or its rest."""
        while content := file.read(_READ_BYTES if count is None else min(_READ_BYTES, count)):
            self._state.update(content)
            count = None if count is None else count - len(content)
