"""Unlabelled bracket F1 as work on unsupervised parsing reports it, and trees that need no model.

A bracket is a half-open span of words. As in the evaluation of PRPN and ON-LSTM (Shen et al., 2018, 2019), punctuation is
taken out of both trees first; spans of one word, the whole sentence and spans that occur again do not count; precision,
recall and F1 are of a sentence, and the mean of F1 over sentences is the score. A sentence without gold brackets has the
recall 1, and the precision 1 where none was predicted, else 0. The F1 over all brackets of all sentences stands beside it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

Bracket = tuple[int, int]

SIGNATURE = "unlabelled, mean over sentences, without punctuation, trivial and repeated spans"
# The position at which a span of two words or more is split.
CUTS: dict[str, Callable[[int, int, np.random.Generator], int]] = {
    "left": lambda start, end, random: end - 1,
    "right": lambda start, end, random: start + 1,
    "balanced": lambda start, end, random: (start + end) // 2,
    "random": lambda start, end, random: int(random.integers(start + 1, end)),
}


def binary_tree(num_words: int, kind: str, random: np.random.Generator) -> list[Bracket]:
    """The spans of two words or more of a tree that is cut by one of CUTS; left is left-branching."""
    spans, uncut = [], [(0, num_words)]
    while uncut:
        start, end = uncut.pop()
        if end - start > 1:
            middle = CUTS[kind](start, end, random)
            spans.append((start, end))
            uncut += [(start, middle), (middle, end)]
    return spans


def over_kept_words(spans: Iterable[Bracket], kept: Sequence[bool]) -> list[Bracket]:
    """Spans [start, end) of words as spans of the words that are kept; empty ones too."""
    before = [0, *accumulate(map(int, kept))]
    return [(before[start], before[end]) for start, end in spans]


def counted(spans: Iterable[Bracket], num_words: int) -> set[Bracket]:
    """The brackets of a sentence that count: each once, none of one word or less, nor the whole sentence."""
    return {(start, end) for start, end in spans if 1 < end - start < num_words}


def score_brackets(gold: Sequence[Collection[Bracket]], predicted: Sequence[Collection[Bracket]]) -> dict[str, float]:
    """`sentence_f1`, the mean over sentences, and `precision`, `recall` and `f1` over all brackets, as fractions."""
    total, sentences = Counter(), []
    for wanted, found in zip(gold, predicted, strict=True):
        matched = len(set(wanted) & set(found))
        total.update(gold=len(wanted), predicted=len(found), matched=matched)
        precision = matched / len(found) if found else float(not wanted)
        recall = matched / len(wanted) if wanted else 1.0
        sentences.append(2 * precision * recall / (precision + recall) if matched or not (wanted or found) else 0.0)
    both = total["gold"] + total["predicted"]
    return {
        "sentence_f1": sum(sentences) / len(sentences) if sentences else 0.0,
        "precision": total["matched"] / total["predicted"] if total["predicted"] else 0.0,
        "recall": total["matched"] / total["gold"] if total["gold"] else 0.0,
        "f1": 2 * total["matched"] / both if both else 0.0,
    }


def recall_by_label(
    labelled: Sequence[Mapping[Bracket, Collection[str]]], predicted: Sequence[Collection[Bracket]]
) -> dict[str, dict[str, float]]:
    """`count` and `recall` of the gold brackets of a label, frequent labels first. Spans with several labels count for each."""
    count, matched = Counter(), Counter()
    for wanted, found in zip(labelled, predicted, strict=True):
        for span, labels in wanted.items():
            count.update(labels)
            if span in found:
                matched.update(labels)
    return {label: {"count": n, "recall": matched[label] / n} for label, n in sorted(count.items(), key=lambda x: (-x[1], x[0]))}
