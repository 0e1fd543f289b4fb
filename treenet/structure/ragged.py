"""Rows of different lengths, one after the other in one array."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np


@dataclass(frozen=True)
class Ragged(Sequence[np.ndarray]):
    """A list of arrays, stored as two arrays."""

    flat: np.ndarray  # [sum of lengths, ...]
    lengths: np.ndarray  # [rows] int64

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "Ragged":
        """Build from the same rows."""
        if isinstance(rows, Ragged):
            return rows
        return cls(np.concatenate(rows), np.fromiter(map(len, rows), dtype=np.int64, count=len(rows)))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        return list(self)[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        edges = np.concatenate([[0], np.cumsum(self.lengths)]).tolist()
        return (self.flat[start:stop] for start, stop in pairwise(edges))

    def places(self, width: int) -> np.ndarray:
        """Return [sum of lengths]: the flat place of every item in rows that are padded to `width`."""
        before = np.cumsum(self.lengths) - self.lengths
        return np.arange(len(self.flat)) + np.repeat(np.arange(len(self)) * width - before, self.lengths)

    def padded(self, value: int, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of numbers as [rows, width] int64, filled up with `value`, and a mask of the padding."""
        padding = np.arange(width) >= self.lengths[:, None]
        out = np.full(padding.shape, value, dtype=np.int64)
        out[~padding] = self.flat
        return out, padding
