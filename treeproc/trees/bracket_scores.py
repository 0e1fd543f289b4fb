"""Bracket scores of constituency parses, counted as EVALB counts them.

A bracket is (label, first word, last word) of a nonterminal. ROOT and tags are not brackets. Words with a gold tag of punctuation
are first removed from both trees, and so are nodes that lose all their words. Brackets are a multiset: a node twice over the same
words counts twice. ADVP and PRT are two labels, unlike in EVALB's COLLINS.prm. As there, brackets (-LRB-) are words.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from treeproc.trees.spans import ROOT_LABELS, SpanTree, keep_leaves, plain_label

# Tags of punctuation: EVALB's (COLLINS.prm), UD's, and those of the German treebanks.
PUNCTUATION = frozenset({",", ".", ":", "``", "''", "PUNCT", "$,", "$.", "$("})
# Upper ends of sentence lengths, included, in words with punctuation.
LENGTHS = (10, 20, 30, 40)


@dataclass(frozen=True)
class BracketScore:
    """Counts over sentences, which can be added."""

    sentences: int = 0
    exact: int = 0  # sentences whose brackets are exactly the gold ones
    gold: int = 0
    predicted: int = 0
    matched: int = 0

    def __add__(self, other: "BracketScore") -> "BracketScore":
        return BracketScore(
            self.sentences + other.sentences,
            self.exact + other.exact,
            self.gold + other.gold,
            self.predicted + other.predicted,
            self.matched + other.matched,
        )

    @property
    def precision(self) -> float:
        return self.matched / self.predicted if self.predicted else float(not self.gold)

    @property
    def recall(self) -> float:
        return self.matched / self.gold if self.gold else float(not self.predicted)

    @property
    def f1(self) -> float:
        both = self.gold + self.predicted
        return 2 * self.matched / both if both else 1.0

    @property
    def exact_match(self) -> float:
        return self.exact / self.sentences if self.sentences else 0.0


def brackets(tree: SpanTree, words: Sequence[bool] | None = None, labelled: bool = True) -> Counter:
    """Count each (label, start, end) over the kept words. The label is empty unless `labelled`."""
    tree = tree if words is None else keep_leaves(tree, words)
    return Counter(
        (plain_label(label) if labelled else "", start, end)
        for label, start, end in zip(tree.labels, tree.starts, tree.ends, strict=True)
        if label not in ROOT_LABELS
    )


def score_sentence(
    tags: Sequence[str],
    gold: SpanTree,
    predicted: SpanTree | None,
    *,
    labelled: bool = True,
    punctuation: Collection[str] = PUNCTUATION,
) -> BracketScore:
    """Score one sentence. A failed parse (None) has no brackets. Raises ValueError for trees over other words."""
    for tree in (gold, predicted):
        if tree is not None and len(tree) and max(tree.ends) != len(tags):
            raise ValueError(f"the tree has {max(tree.ends)} words, but the sentence has {len(tags)}")
    kept = [tag not in punctuation for tag in tags]
    wanted = brackets(gold, kept, labelled)
    found = brackets(predicted, kept, labelled) if predicted is not None else Counter()
    exact = predicted is not None and wanted == found
    return BracketScore(1, int(exact), wanted.total(), found.total(), (wanted & found).total())


def score(
    gold: Sequence[tuple[Sequence[str], SpanTree]],
    predicted: Sequence[SpanTree | None],
    *,
    labelled: bool = True,
    punctuation: Collection[str] = PUNCTUATION,
) -> BracketScore:
    """Score all sentences; gold are (gold tags, tree)."""
    return sum(_scores(gold, predicted, labelled, punctuation), BracketScore())


def score_by_length(
    gold: Sequence[tuple[Sequence[str], SpanTree]],
    predicted: Sequence[SpanTree | None],
    *,
    labelled: bool = True,
    punctuation: Collection[str] = PUNCTUATION,
    lengths: Sequence[int] = LENGTHS,
) -> dict[str, BracketScore]:
    """Return the scores of sentences of 1-10, 11-20, ... words and of longer ones, in that order; also for empty classes."""
    lows = [1, *(length + 1 for length in lengths)]
    names = [f"{low}-{high}" for low, high in zip(lows, lengths, strict=False)] + [f"{lows[-1]}+"]
    out = dict.fromkeys(names, BracketScore())
    for (tags, _), sentence in zip(gold, _scores(gold, predicted, labelled, punctuation), strict=True):
        out[names[sum(len(tags) > length for length in lengths)]] += sentence
    return out


def _scores(
    gold: Sequence[tuple[Sequence[str], SpanTree]],
    predicted: Sequence[SpanTree | None],
    labelled: bool,
    punctuation: Collection[str],
) -> list[BracketScore]:
    return [
        score_sentence(tags, tree, answer, labelled=labelled, punctuation=punctuation)
        for (tags, tree), answer in zip(gold, predicted, strict=True)
    ]
