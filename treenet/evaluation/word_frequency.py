"""Scores of single words by their frequency in the training text, as compare-mt (Neubig et al., 2019) counts them.

A word of a translation is right as often as its reference has it, at any position. The F1 of a bucket is over all occurrences of
its words. With m matches, h words of translations and r words of references, it is 2 m / (h + r).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Upper ends of the buckets, included: words that training never had, had once, 2 to 4 times, and so on.
LASTS = (0, 1, 4, 9, 99, 999)


@dataclass(frozen=True)
class FrequencyBucket:
    """Words that occur `first` to `last` times in the training text. `last` is None in the open bucket."""

    first: int
    last: int | None
    words: int  # occurrences in the references
    f1: list[float | None]  # of each system, 0 to 100; None if neither it nor the references have such a word

    @property
    def name(self) -> str:
        if self.last is None:
            return f"{self.first:,} and more"
        return f"{self.first}" if self.first == self.last else f"{self.first}–{self.last}"


def count_words(lines: Iterable[Sequence[str]], wanted: Iterable[str]) -> dict[str, int]:
    """Count how often each of the words `wanted` occurs in the lines of words. Memory grows with `wanted`, not with the lines."""
    counts = dict.fromkeys(wanted, 0)
    for line in lines:
        for word in line:
            if word in counts:
                counts[word] += 1
    return counts


def score_by_frequency(
    systems: Sequence[Sequence[Sequence[str]]],
    references: Sequence[Sequence[str]],
    counts: dict[str, int],
    lasts: Sequence[int] = LASTS,
) -> list[FrequencyBucket]:
    """Return F1 of every bucket that has a word, from translations and references as lines of words.

    `counts` are those of the training text, for every word of both.
    """
    places = {word: int(np.searchsorted(lasts, count)) for word, count in counts.items()}
    size = len(lasts) + 1

    def add(totals: np.ndarray, words: Counter[str]) -> None:
        for word, count in words.items():
            totals[places[word]] += count

    in_references, found = np.zeros(size, dtype=np.int64), np.zeros((len(systems), 2, size), dtype=np.int64)
    for row, reference in enumerate(references):
        expected = Counter(reference)
        add(in_references, expected)
        for number, lines in enumerate(systems):
            own = Counter(lines[row])
            add(found[number, 0], own & expected)
            add(found[number, 1], own)
    buckets = []
    for place in range(size):
        totals = [int(words[place] + in_references[place]) for _, words in found]
        if not any(totals) and not in_references[place]:
            continue
        scores = [200.0 * int(right[place]) / total if total else None for (right, _), total in zip(found, totals, strict=True)]
        first = lasts[place - 1] + 1 if place else 0
        last = lasts[place] if place < len(lasts) else None
        buckets.append(FrequencyBucket(first, last, int(in_references[place]), scores))
    return buckets
