"""Scores of parses: brackets, counted as EVALB counts them; tags, arcs and tokens, as in the CoNLL 2018 shared task.

A bracket is (label, first word, last word) of a nonterminal. ROOT and tags are not brackets. Words with a gold tag of punctuation
are first removed from both trees, and so are nodes that lose all their words. Brackets are a multiset: a node twice over the
same words counts twice. ADVP and PRT are two labels, unlike in EVALB's COLLINS.prm. As there, brackets (-LRB-) are words. A
relation is compared up to its colon: `nsubj:pass` is `nsubj`.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import astuple, dataclass

from treeproc.trees.arcs import plain_relation
from treeproc.trees.spans import ROOT_LABELS, SpanTree, keep_leaves, plain_label

# Tags of punctuation: EVALB's (COLLINS.prm), UD's, and those of the German treebanks. In brackets, `$(` is `$*LRB*` or `$_`.
PUNCTUATION = frozenset({",", ".", ":", "``", "''", "PUNCT", "$,", "$.", "$(", "$*LRB*", "$_"})
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
        return BracketScore(*map(sum, zip(astuple(self), astuple(other), strict=True)))

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


def score_sentence(tags: Sequence[str], gold: SpanTree, predicted: SpanTree | None, *, labelled: bool = True) -> BracketScore:
    """Score one sentence. A failed parse (None) has no brackets. Raises ValueError for trees over other words."""
    for tree in (gold, predicted):
        if tree is not None and len(tree) and max(tree.ends) != len(tags):
            raise ValueError(f"the tree has {max(tree.ends)} words, but the sentence has {len(tags)}")
    kept = [tag not in PUNCTUATION for tag in tags]
    wanted = brackets(gold, kept, labelled)
    found = brackets(predicted, kept, labelled) if predicted is not None else Counter()
    exact = predicted is not None and wanted == found
    return BracketScore(1, int(exact), wanted.total(), found.total(), (wanted & found).total())


def score(
    gold: Sequence[tuple[Sequence[str], SpanTree]], predicted: Sequence[SpanTree | None], *, labelled: bool = True
) -> BracketScore:
    """Score all sentences; gold are (gold tags, tree)."""
    sides = zip(gold, predicted, strict=True)
    return sum((score_sentence(tags, tree, answer, labelled=labelled) for (tags, tree), answer in sides), BracketScore())


def score_by_length(
    gold: Sequence[tuple[Sequence[str], SpanTree]], predicted: Sequence[SpanTree | None]
) -> dict[str, BracketScore]:
    """Return the scores of sentences of 1-10, 11-20, ... words and of longer ones, in that order; also for empty classes."""
    lows = [1, *(length + 1 for length in LENGTHS)]
    names = [f"{low}-{high}" for low, high in zip(lows, LENGTHS, strict=False)] + [f"{lows[-1]}+"]
    out = dict.fromkeys(names, BracketScore())
    for (tags, tree), answer in zip(gold, predicted, strict=True):
        out[names[sum(len(tags) > length for length in LENGTHS)]] += score_sentence(tags, tree, answer)
    return out


@dataclass(frozen=True)
class Share:
    """A count out of a total."""

    correct: int = 0
    total: int = 0

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
            labelled += governor == other and plain_relation(relation) == plain_relation(other_relation)
    return ArcScore(Share(unlabelled, total), Share(labelled, total))


def span_f1(gold: Sequence[Sequence[Hashable]], predicted: Sequence[Sequence[Hashable]]) -> tuple[float, float, float]:
    """Return precision, recall and F1 of tokens, or sentences, given as (first character, end) of every text."""
    wanted = found = matched = 0
    for spans, answer in zip(gold, predicted, strict=True):
        a, b = Counter(spans), Counter(answer)
        wanted, found, matched = wanted + a.total(), found + b.total(), matched + (a & b).total()
    precision = matched / found if found else 0.0
    recall = matched / wanted if wanted else 0.0
    return precision, recall, 2 * matched / (wanted + found) if wanted + found else 0.0
