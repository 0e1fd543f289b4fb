"""Scores of tags, arcs and tokens, counted as in the CoNLL 2018 shared task for given words.

A relation is compared up to its colon: `nsubj:pass` is `nsubj`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from treeproc.trees.bracket_scores import PUNCTUATION


@dataclass(frozen=True)
class Share:
    """A count out of a total. Shares can be added."""

    correct: int = 0
    total: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.correct + other.correct, self.total + other.total)

    @property
    def value(self) -> float:
        return self.correct / self.total if self.total else 0.0


def tag_accuracy(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Share:
    """Return the share of words with the gold tag. Words without a gold tag do not count."""
    pairs = [pair for sides in zip(gold, predicted, strict=True) for pair in zip(*sides, strict=True) if pair[0]]
    return Share(sum(a == b for a, b in pairs), len(pairs))


@dataclass(frozen=True)
class ArcScore:
    """Unlabelled and labelled attachment."""

    unlabelled: Share
    labelled: Share


def attachment(
    gold: Sequence[tuple[Sequence[int], Sequence[str]]],
    predicted: Sequence[tuple[Sequence[int], Sequence[str]]],
    tags: Sequence[Sequence[str]] | None = None,
) -> ArcScore:
    """Score arcs of sentences given as (governors, relations). With gold tags, words that are punctuation do not count."""
    total = unlabelled = labelled = 0
    for number, (sides, answer) in enumerate(zip(gold, predicted, strict=True)):
        for i, (governor, relation, other, other_relation) in enumerate(zip(*sides, *answer, strict=True)):
            if tags is not None and tags[number][i] in PUNCTUATION:
                continue
            total += 1
            unlabelled += governor == other
            labelled += governor == other and universal(relation) == universal(other_relation)
    return ArcScore(Share(unlabelled, total), Share(labelled, total))


def universal(relation: str) -> str:
    """Return a relation without its subtype."""
    return relation.partition(":")[0]


def span_f1(gold: Sequence[Sequence[Hashable]], predicted: Sequence[Sequence[Hashable]]) -> tuple[float, float, float]:
    """Return precision, recall and F1 of tokens, or sentences, given as (first character, end) of every text."""
    wanted = found = matched = 0
    for spans, answer in zip(gold, predicted, strict=True):
        a, b = Counter(spans), Counter(answer)
        wanted, found, matched = wanted + a.total(), found + b.total(), matched + (a & b).total()
    precision = matched / found if found else 0.0
    recall = matched / wanted if wanted else 0.0
    return precision, recall, 2 * matched / (wanted + found) if wanted + found else 0.0
