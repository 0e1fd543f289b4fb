"""Unlabelled bracket F1 as work on unsupervised parsing reports it, and trees that need no model.

A bracket is a half-open span of words. The rules are those of the evaluation of PRPN and ON-LSTM (Shen et al., 2018, 2019).
Punctuation is first removed from both trees. Spans of one word, the whole sentence and repeated spans do not count.

Precision, recall and F1 are per sentence. The score is the mean of F1 over sentences. A sentence without gold brackets has the
recall 1; its precision is 1 if no bracket was predicted, else 0. The F1 over all brackets of all sentences is a second figure.
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
    """Return the spans of two words or more of a tree cut by one of CUTS; left is left-branching."""
    spans, uncut = [], [(0, num_words)]
    while uncut:
        start, end = uncut.pop()
        if end - start > 1:
            middle = CUTS[kind](start, end, random)
            spans.append((start, end))
            uncut += [(start, middle), (middle, end)]
    return spans


def over_kept_words(spans: Iterable[Bracket], kept: Sequence[bool]) -> list[Bracket]:
    """Convert spans [start, end) of words to spans of the kept words; some may be empty."""
    before = [0, *accumulate(map(int, kept))]
    return [(before[start], before[end]) for start, end in spans]


def counted(spans: Iterable[Bracket], num_words: int) -> set[Bracket]:
    """Return the brackets of a sentence that count, each once. Spans of one word or less and the whole sentence do not count."""
    return {(start, end) for start, end in spans if 1 < end - start < num_words}


def score_brackets(gold: Sequence[Collection[Bracket]], predicted: Sequence[Collection[Bracket]]) -> dict[str, float]:
    """Return `sentence_f1`, the mean over sentences, and `precision`, `recall` and `f1` over all brackets, as fractions."""
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
    """Return `count` and `recall` of the gold brackets of each label, frequent labels first.

    A span with several labels counts for each.
    """
    count, matched = Counter(), Counter()
    for wanted, found in zip(labelled, predicted, strict=True):
        for span, labels in wanted.items():
            count.update(labels)
            if span in found:
                matched.update(labels)
    return {label: {"count": n, "recall": matched[label] / n} for label, n in sorted(count.items(), key=lambda x: (-x[1], x[0]))}
