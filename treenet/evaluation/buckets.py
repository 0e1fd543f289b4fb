"""Scores of parts of a text: by length and depth of the source, by the tag in front of it, and of words by their frequency.

Scores of words are those of compare-mt (Neubig et al., 2019): a word of a translation is right as often as its reference has it,
at any position. The F1 of a bucket is over all occurrences of its words. With m matches, h words of translations and r words of
references, it is 2 m / (h + r).
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from treenet.evaluation.settings import BucketConfig
from treenet.tasks.scores import score_columns
from treenet.tasks.tables import Column, align, numbers
from treenet.tasks.translation_metrics import INTERNATIONAL, MAIN, MAIN_OF_TOKENS, METRICS, OF_NO_BLANKS, SECOND, build_tokenizer
from treeproc.common.settings import UserError
from treeproc.shards.schema import SCORE_PLACES
from treeproc.trees.flat_trees import node_depths


def count_words(example: dict) -> int:
    """Count the words on the leaves' side of an encoded row. The pieces of one word count once."""
    return len(np.unique(example["leaves"]["word_index"]))


def tree_depth(example: dict) -> int:
    """Return the number of nonterminals on the longest path from a root down to a leaf; 0 without a tree.

    The roots of split words count too.
    """
    return 1 + int(node_depths(example["spans"]["subtree_end"]).max(initial=-1))


def measure_sources(examples: Iterable[dict]) -> dict[str, np.ndarray]:
    """Return `words` and `depth` of every example."""
    sizes = [(count_words(example), tree_depth(example)) for example in examples]
    return dict(zip(("words", "depth"), np.array(sizes, dtype=np.int64).reshape(-1, 2).T, strict=True))


def _bleu_of(tokenizer: str, *sides: Sequence[str]) -> tuple[str, Sequence[Sequence[str]]]:
    """Return the name of BLEU, and the sides as it reads them: lines, or tokens if the text has no blanks between words."""
    if tokenizer not in OF_NO_BLANKS:
        return MAIN, sides
    return MAIN_OF_TOKENS, [list(map(build_tokenizer(tokenizer), side)) for side in sides]


def score_buckets(
    sizes: dict[str, np.ndarray],
    config: BucketConfig,
    hypotheses: Sequence[str],
    references: Sequence[str],
    tokenizer: str = INTERNATIONAL,
) -> dict[str, list[dict]]:
    """Return the number of examples and corpus BLEU (13a) of every bucket with examples, for `words`, `depth`, `parse_score`.

    It is tokenised BLEU of text without blanks between words. BLEU of few sentences is noisy, and short sentences often have no
    matching 4-grams. So compare systems, not buckets.
    """
    bleu, (hypotheses, references) = _bleu_of(tokenizer, hypotheses, references)
    metric = METRICS[bleu].build(True)
    found: dict[str, list[dict]] = {}
    for name, values in sizes.items():
        if len(values) != len(references):
            raise UserError(f"the data set has {len(values)} examples, but there are {len(references)} references")
        lasts: tuple[float, ...] = getattr(config, name)
        least, step = (None, 10**-SCORE_PLACES) if name == "parse_score" else (0, 1)
        places = np.searchsorted(lasts, values)  # values up to and including lasts[i] are in bucket i
        found[name] = []
        for place in np.unique(places).tolist():
            rows = np.flatnonzero(places == place).tolist()
            found[name].append(
                {
                    "from": round(lasts[place - 1] + step, SCORE_PLACES) if place else least,
                    "to": lasts[place] if place < len(lasts) else None,
                    "num_examples": len(rows),
                    bleu: metric.corpus_score([hypotheses[i] for i in rows], [[references[i] for i in rows]]).score,
                }
            )
    return found


BUCKETS = {"words": "words of the source", "depth": "depth of the source's tree", "parse_score": "score of the source's parse"}


class Bucket(NamedTuple):
    """Examples of one bucket, and their scores in each of some results; empty where a result lacks the bucket."""

    name: str
    num_examples: int
    scores: list[Mapping]


def gather_buckets(results: Sequence[Sequence[Mapping]]) -> list[Bucket]:
    """Return the buckets of one kind in ascending order. Those of the results have the same sentences."""
    found = {(one["from"], one["to"]): one["num_examples"] for entries in results[::-1] for one in entries}
    of_results = [{(one["from"], one["to"]): one for one in entries} for entries in results]
    places = sorted(found, key=lambda place: -math.inf if place[0] is None else place[0])
    return [Bucket(_name(*one), found[one], [entries.get(one, {}) for entries in of_results]) for one in places]


def _name(first: float | None, last: float | None) -> str:
    if last is None:
        return f"{first} and more"
    return f"{first} to {last}" if first else f"up to {last}"


def bucket_columns(title: str, buckets: Sequence[Bucket], results: Sequence[str]) -> list[Column]:
    """Return the table of buckets. `results` are the names of the results, empty for a single one."""
    columns = [Column(title, [one.name for one in buckets]), numbers("sentences", [one.num_examples for one in buckets])]
    for place, name in enumerate(results):
        columns += score_columns([one.scores[place] for one in buckets], name)
    return columns


def format_buckets(found: Mapping[str, Sequence[Mapping]]) -> str:
    """Return a table for each kind of bucket."""
    tables = [align(bucket_columns(BUCKETS[kind], gather_buckets([entries]), [""])) for kind, entries in found.items()]
    return "\n".join(chain.from_iterable(tables))


UNTAGGED = "none"


def score_tags(
    sources: Sequence[str],
    tags: Collection[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    tokenizer: str = INTERNATIONAL,
) -> list[dict]:
    """Return the number of examples, BLEU as in `score_buckets` and chrF of the lines with each tag, and of those without one.

    Tags are in alphabetical order, with `UNTAGGED` last. A tag without lines is left out.
    """
    first = [source.partition(" ")[0] for source in sources]
    of_line = [word if word in tags else UNTAGGED for word in first]
    bleu, sides = _bleu_of(tokenizer, hypotheses, references)
    metrics, found = {bleu: sides, SECOND: (hypotheses, references)}, list[dict]()
    for tag in (*sorted(tags), UNTAGGED):
        rows = [row for row, own in enumerate(of_line) if own == tag]
        if rows:
            found.append({"tag": tag, "num_examples": len(rows)})
            for name, both in metrics.items():
                lines, correct = ([side[row] for row in rows] for side in both)
                found[-1][name] = METRICS[name].build(True).corpus_score(lines, [correct]).score
    return found


def format_tags(scores: Sequence[dict]) -> str:
    """Return a table with a line for each tag."""
    tags, counts = [row["tag"] for row in scores], [row["num_examples"] for row in scores]
    columns = [Column("tag of the source", tags), numbers("sentences", counts), *score_columns(scores)]
    return "\n".join(align(columns)) if scores else ""


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


def count_occurrences(lines: Iterable[Sequence[str]], wanted: Iterable[str]) -> dict[str, int]:
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
) -> list[FrequencyBucket]:
    """Return F1 of every bucket that has a word, from translations and references as lines of words.

    `counts` are those of the training text, for every word of both.
    """
    places = {word: int(np.searchsorted(LASTS, count)) for word, count in counts.items()}
    size = len(LASTS) + 1

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
        first = LASTS[place - 1] + 1 if place else 0
        last = LASTS[place] if place < len(LASTS) else None
        buckets.append(FrequencyBucket(first, last, int(in_references[place]), scores))
    return buckets
