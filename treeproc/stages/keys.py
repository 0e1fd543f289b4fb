"""Keys of examples and texts, 16 bytes of blake2b each: sorted sets, near copies, duplicates, and the hash of a split.

Equal keys lie in one hash partition, so that each partition is sorted by itself.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import IO

import numpy as np

from treeproc.common.storage import AnyPath
from treeproc.shards.rows import edges_of

KEY_BYTES = 16
# Arrays of keys as bytes: NumPy leaves out zeros at the end of such values, which changes neither order nor equality.
KEY_TYPE = f"S{KEY_BYTES}"
_EMPTY_KEY = hashlib.blake2b(digest_size=KEY_BYTES)
# Keys of a partition, on average: about 300 MiB of a task while they are sorted.
_PARTITION_KEYS = 4 << 20
# Fewer keys have smaller partitions, so that several tasks sort them.
_FEW_PARTITIONS, _LEAST_KEYS = 8, 1 << 19
# Keys that enter the hash of a split at once, unless duplicates are looked for: then all keys enter it at the end.
KEYS_AT_ONCE = 1 << 16
BEYOND = "beyond"
_READ_BYTES = 1 << 20


def key_of(text: str) -> bytes:
    """Return the key of a text."""
    state = _EMPTY_KEY.copy()  # far cheaper than a new one
    state.update(text.encode())
    return state.digest()


def example_key(row: Mapping) -> bytes:
    """Return the key of an example as the files have it: both sides, or text and class. `labels` renames classes later."""
    return key_of(f"{row['source']}\n{row.get('target', '')}\n{row.get('label', '')}")


def places_in(keys: Sequence[bytes], known: np.ndarray) -> list[int]:
    """Return the places of the keys that stand in `known`, which is ascending."""
    if not len(known) or not keys:
        return []
    asked = np.frombuffer(b"".join(keys), KEY_TYPE)
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.flatnonzero(known[at] == asked).tolist()


def normalised(lines: Sequence[str]) -> list[str]:
    """Return letters, their marks and digits of every line, in lower case: equal ones are near copies. Lines hold no line end."""
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
        elif character != "\n" and not _is_mark(character):
            codes[code] = 0
    return codes


def _is_mark(character: str) -> bool:
    """Return whether a character is a mark of a letter, such as a vowel of Hindi or Thai, and no choice between two pictures."""
    return unicodedata.category(character) in ("Mn", "Mc") and "VARIATION SELECTOR" not in unicodedata.name(character, "")


@cache
def _ascii() -> tuple[bytes, bytes]:
    """Return the same for ASCII, as `bytes.translate` takes it: the table, and the characters that go."""
    codes = _plain_codes()[:128]
    table = bytes([*codes.astype(np.uint8).tolist(), *range(128, 256)])
    return table, bytes(np.flatnonzero(codes == 0).tolist())


def later_duplicates(keys: bytes | bytearray | np.ndarray) -> np.ndarray:
    """Return for every key of 16 bytes whether an earlier one is equal. 10 million take about half a GB for a moment."""
    halves = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal keys stay in the order of the input
    duplicate = np.zeros(len(order), dtype=bool)
    equal = (halves[order[1:], 0] == halves[order[:-1], 0]) & (halves[order[1:], 1] == halves[order[:-1], 1])
    duplicate[order[1:][equal]] = True
    return duplicate


def number_of_partitions(keys: int) -> int:
    """Return the number of partitions of so many keys."""
    return max(1, -(-keys // _PARTITION_KEYS), min(_FEW_PARTITIONS, keys // _LEAST_KEYS))


def write_parts(file: IO[bytes], keys: bytes | bytearray, partitions: int) -> None:
    """Write keys of a block by partition, in the order of the block: edges [partitions + 1], keys, their numbers in the block."""
    halves = np.frombuffer(keys, dtype=np.uint64).reshape(-1, 2)
    partition = ((halves[:, 0] >> np.uint64(32)) * np.uint64(partitions)) >> np.uint64(32)
    order = np.argsort(partition.astype(np.uint32), kind="stable")
    edges = edges_of(np.bincount(partition.astype(np.int64), minlength=partitions))
    for array in (edges, halves[order], order.astype(np.uint32)):
        file.write(array.tobytes())


def read_part(file: IO[bytes], partition: int, partitions: int) -> tuple[np.ndarray, np.ndarray]:
    """Read keys [n, 2] of one partition of a block, and their numbers in the block [n]."""
    edges = _read(file, 0, np.int64, partitions + 1)
    start, stop, begin = int(edges[partition]), int(edges[partition + 1]), edges.nbytes
    keys = _read(file, begin + KEY_BYTES * start, np.uint64, 2 * (stop - start)).reshape(-1, 2)
    return keys, _read(file, begin + KEY_BYTES * int(edges[-1]) + 4 * start, np.uint32, stop - start)


def _read(file: IO[bytes], offset: int, dtype: type, count: int) -> np.ndarray:
    file.seek(offset)
    return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype, count)


def duplicates_of(parts: Sequence[tuple[np.ndarray, np.ndarray]], first_ids: Sequence[int]) -> np.ndarray:
    """Return ascending ids of the examples of one partition that an earlier one equals; `parts` are the blocks' in order."""
    if not parts:
        return np.zeros(0, dtype=np.int64)
    ids = np.concatenate([first + rows.astype(np.int64) for (_, rows), first in zip(parts, first_ids, strict=True)])
    return np.sort(ids[later_duplicates(np.ascontiguousarray(np.concatenate([keys for keys, _ in parts])))])


def keys_file(work: AnyPath, number: int, kind: str = "keys") -> AnyPath:
    """Return a file of a block in the work folder; its `json` is written last."""
    return work / f"block-{number:06d}.{kind}"


class BeyondKeys:
    """Writes the columns of examples that no key covers. `marks` are the places at which keys enter the hash.

    `first_id` is the number of the first example in its split.
    """

    def __init__(self, file: IO[bytes], names: Sequence[str], first_id: int):
        self._file, self._names, self._next, self._size = file, names, first_id, 0
        self.marks: list[int] = []

    def write(self, rows: Iterable[dict]) -> None:
        """Write those of more examples."""
        for row in rows:
            self._size += self._file.write(json.dumps([row[name] for name in self._names], separators=(",", ":")).encode())
            self._next += 1
            if self._next % KEYS_AT_ONCE == 0:
                self.marks.append(self._size)


class SplitHash:
    """The hash of a split whose blocks come in order: KEYS_AT_ONCE keys follow the columns of their examples that no key covers.

    With `keys_at_end`, all keys follow all columns.
    """

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
            more = KEY_BYTES * KEYS_AT_ONCE - len(self._held)
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
