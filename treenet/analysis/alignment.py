"""Alignments of words and nodes from cross-attention, and the alignment error rate (Och and Ney, 2003).

A word is what stands between blanks (U+0020), counted from 0. The attention of a target word is the mean over its pieces.
Weights of nodes go to the leaves of their spans in equal parts, and a source word has the sum over its leaves. Each target word
is linked to the source word with the most attention, the first of equal ones.

Links have Pharaoh form: `2-3` for source word 2 and target word 3. In references, `2-3` is a sure link, and `2p3` is only
possible.

Shapes: A decoder layers, H heads, T target positions, L leaves, N nodes, S = L + N positions (plain models: S = L), U source
words, W target words.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from treenet.analysis.attention_stats import SentenceAttention
from treenet.translation.reranking import leaf_attention

_LINK = re.compile(r"([0-9]{1,6})([-p])([0-9]{1,6})")

Link = tuple[int, int]  # source word, target word


@dataclass(frozen=True)
class NodeLink:
    """The node to which a target word attends most, as a span of source words."""

    target: int
    label: int
    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class ReferenceLinks:
    """The links of a line of a reference. Sure ones are also possible."""

    sure: frozenset[Link]
    possible: frozenset[Link]


def number_words(pieces: Sequence[str], line: str) -> np.ndarray:
    """Return the number of the word of each piece of a line. Blanks belong to the word after them.

    `▁` in a piece is a blank of the line, or this very character, which begins no word.
    """
    marks = (character == " " for character in f" {line}" if character in " ▁")
    numbers, word, only_blanks = [], 0, True  # so far in this word
    for piece in pieces:
        begins = [next(marks) for character in piece if character == "▁"][:1] == [True]
        word += begins and not only_blanks
        only_blanks = begins and piece == "▁"
        numbers.append(word)
    return np.array(numbers, dtype=np.int64)


def count_words(line: str) -> int:
    """Return the number of words of a line."""
    return sum(map(bool, line.split(" ")))


def mean_weights(attention: SentenceAttention, layer: int | None) -> np.ndarray:
    """Return weights [T - 1, S] of the pieces without EOS: the mean over heads of a layer, counted from 1, or of all layers."""
    weights = attention.weights if layer is None else attention.weights[layer - 1 : layer]
    return weights.mean((0, 1), dtype=np.float64)[:-1]


def word_attention(attention: SentenceAttention, source: np.ndarray, target: np.ndarray, layer: int | None) -> np.ndarray:
    """Return the attention [W, U] of target words to source words. `source` [L] and `target` [T - 1] are words of pieces."""
    leaves = leaf_attention(mean_weights(attention, layer), attention.example["spans"], attention.num_leaves)
    return _means(leaves, target) @ (source[:, None] == np.arange(source.max() + 1))


def link_words(words: np.ndarray) -> list[Link]:
    """Return one link for each target word, from attention [W, U]."""
    return [(int(row.argmax()), target) for target, row in enumerate(words)]


def link_nodes(attention: SentenceAttention, source: np.ndarray, target: np.ndarray, layer: int | None) -> list[NodeLink]:
    """Return for each target word the node with the highest weight; nothing for models without nodes."""
    if not attention.num_nodes or not len(target):
        return []
    nodes = _means(mean_weights(attention, layer)[:, attention.num_leaves :], target)
    best = nodes.argmax(1).tolist()
    labels, spans = attention.example["nodes"]["label"], attention.example["spans"]
    first, last = source[np.asarray(spans["start"])[best]], source[np.asarray(spans["end"])[best] - 1]
    return [
        NodeLink(word, int(labels[node]), int(start), int(end) + 1, float(nodes[word, node]))
        for word, (node, start, end) in enumerate(zip(best, first, last, strict=True))
    ]


def _means(weights: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return the means of rows of weights [T - 1, ...] over the pieces of each word."""
    members = words == np.arange(words.max(initial=-1) + 1)[:, None]
    return members @ weights / np.maximum(members.sum(1, keepdims=True), 1)


def format_links(links: Iterable[Link]) -> str:
    """Write links in Pharaoh form, in the order of the source."""
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def parse_links(line: str) -> ReferenceLinks:
    """Read a line of a reference. Raises ValueError if it has another form."""
    sure, possible = set(), set()
    for text in line.split():
        if not (found := _LINK.fullmatch(text)):
            raise ValueError(f"a link must have the form 2-3, or 2p3 if it is only possible, but is {text[:20]!r}")
        link = int(found[1]), int(found[3])
        possible.add(link)
        if found[2] == "-":
            sure.add(link)
    return ReferenceLinks(frozenset(sure), frozenset(possible))


def alignment_error_rate(found: Sequence[Iterable[Link]], references: Sequence[ReferenceLinks]) -> float | None:
    """Return 1 - (|A & S| + |A & P|) / (|A| + |S|) over all lines, lower is better; None without any link."""
    right = total = 0
    for links, reference in zip(map(frozenset, found), references, strict=True):
        right += len(links & reference.sure) + len(links & reference.possible)
        total += len(links) + len(reference.sure)
    return 1 - right / total if total else None
