"""Sentences cut into phrases: n-grams, the levels of a constituency tree, and the places where constituents may be split in two.

Level 0 is the root, or the roots. The next level divides every phrase that has phrases of several words below it. It becomes its
child nodes and the leaves that are its children. (The paper could also mean levels from the leaves.) So the pieces of a word stay
together, and the last levels repeat phrases that cannot be divided. Nodes over the same leaves (a unary chain) are one level,
with the label of the topmost.

Tree regularisation (Nandi, Manning and Murty, 2024) compares splits. Trees are made binary from the right: a node of children
c1, ..., cm is split after c1, the rest after c2, and so on. A span is split only between words. Spans with fewer than two
possible splits teach nothing, and are left out. Trees side by side are separate: no span crosses two roots.

Shapes: B batch, L leaves, N nodes, P phrases, C levels, S spans, M possible splits of all spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.config import PHRASE_LEVELS
from treenet.structure.base import Ragged, SpanTable, Structure, expand, find_parents

NO_TAG = -1  # of a phrase without a node (a single leaf), and of padding


@dataclass
class PhraseLevels(Structure):
    """The phrases of a batch at levels 1 to C = PHRASE_LEVELS; index 0 is level 1."""

    phrase: Tensor  # [C, B, L] int64, phrase of every leaf, from 0 in each sentence; padding is in phrase P
    counts: Tensor  # [C, B] int64, phrases of a sentence
    tags: Tensor  # [C, B, P] int64, label of a phrase's node, or NO_TAG
    widest: list[int]  # per level, the most phrases of a sentence; P is that of the last level

    @classmethod
    def build(cls, table: SpanTable, labels: Sequence[np.ndarray], words: Sequence[np.ndarray]) -> "PhraseLevels":
        """Build the levels from `labels[b]` [N_b] of the nodes and `words[b]` [L_b], the word of every leaf, ascending."""
        tree, index = np.nonzero(~table.node_pad_mask)
        start, end, depth = (x[tree, index] for x in (table.start, table.end, table.depth))
        parent, above_leaf = find_parents(table)
        top, level = _skip_chains(start, end, depth, parent)
        leaf_tree, leaf = np.nonzero(~table.leaf_pad_mask)
        over = top[above_leaf]

        word, _ = Ragged.of(words).padded(0, table.num_leaves)
        is_top = top[:-1] == np.arange(len(start))
        several = is_top & (parent >= 0) & (word[tree, start] != word[tree, end - 1])
        divided = np.zeros(len(top), dtype=bool)
        divided[top[parent[several]]] = True
        divided[-1] = True  # parts below no node exist from level 0 on
        is_phrase = is_top & divided[top[parent]]  # at its level; a phrase that is not divided is at all later levels, too

        begins = np.zeros((PHRASE_LEVELS, *word.shape), dtype=bool)
        label = np.full(begins.shape, NO_TAG)
        own_level, own_label = level[:-1], np.concatenate(labels)
        for number in range(1, PHRASE_LEVELS + 1):
            here = is_phrase & ((own_level == number) | ((own_level < number) & ~divided[:-1]))
            begins[number - 1, tree[here], start[here]] = True
            label[number - 1, tree[here], start[here]] = own_label[here]
            alone = divided[over] & (level[over] < number)
            begins[number - 1, leaf_tree[alone], leaf[alone]] = True
        counts = begins.sum(2)
        widest = np.maximum(counts.max(1), 1)
        phrase = np.where(table.leaf_pad_mask, widest[-1], begins.cumsum(2) - 1)
        tags = np.full((*counts.shape, widest[-1]), NO_TAG)
        c, b, first = np.nonzero(begins)
        tags[c, b, phrase[c, b, first]] = label[c, b, first]
        return cls(torch.from_numpy(phrase), torch.from_numpy(counts), torch.from_numpy(tags), widest.tolist())


@dataclass
class Partition:
    """One way to cut the sentences of a batch into phrases. P is the most phrases of a sentence."""

    phrase: Tensor  # [B, L] int64, phrase of every leaf, from 0 in each sentence; padding is in phrase P
    pad_mask: Tensor  # [B, P] bool, True = padding
    tags: Tensor | None = None  # [B, P] int64, label of a phrase's node, or NO_TAG

    @classmethod
    def ngrams(cls, leaf_pad_mask: Tensor, n: int) -> "Partition":
        """Cut into runs of n leaves. The last run of a sentence may be shorter."""
        num_phrases = -(-leaf_pad_mask.shape[1] // n)
        place = torch.arange(leaf_pad_mask.shape[1], device=leaf_pad_mask.device) // n
        return cls(torch.where(leaf_pad_mask, num_phrases, place), leaf_pad_mask[:, ::n])

    @classmethod
    def level(cls, levels: PhraseLevels, number: int, with_tags: bool = True) -> "Partition":
        """Return the phrases at a level of the trees, 1 to PHRASE_LEVELS."""
        width, at = levels.widest[number - 1], number - 1
        pad_mask = torch.arange(width, device=levels.counts.device) >= levels.counts[at, :, None]
        return cls(levels.phrase[at].clamp(max=width), pad_mask, levels.tags[at, :, :width] if with_tags else None)


def _skip_chains(start: np.ndarray, end: np.ndarray, depth: np.ndarray, parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the topmost node over the leaves of every node, and its number of larger ancestors.

    The last entry is -1, -1 for no node.
    """
    top, level = np.full((2, len(start) + 1), -1)
    same = (parent >= 0) & (start == start[parent]) & (end == end[parent])
    for d in range(int(depth.max(initial=-1)) + 1):
        here = np.flatnonzero(depth == d)
        top[here] = np.where(same[here], top[parent[here]], here)
        level[here] = level[parent[here]] + ~same[here]
    return top, level


@dataclass
class SplitPoints(Structure):
    """All possible splits of the spans of a batch, span after span. A split at k makes [start, k) and [k, end)."""

    example: Tensor  # [M] int64, example of the batch
    start: Tensor  # [M] int64, as the next two
    split: Tensor
    end: Tensor
    span: Tensor  # [M] int64, number of the span
    gold: Tensor  # [S] int64, place among the M of the split in the tree
    share: Tensor  # [S] float64, 1 / number of spans of the example
    owner: Tensor  # [S] int64, example of the batch

    @classmethod
    def build(cls, table: SpanTable, words: Sequence[np.ndarray]) -> "SplitPoints":
        """Build from `words[b]` [L_b], the word of every leaf, ascending."""
        example, start, gold, end = _binary_spans(table)
        word, _ = Ragged.of(words).padded(-1, table.num_leaves)
        begins = (np.diff(word, axis=1, prepend=-1) != 0) & ~table.leaf_pad_mask
        places = np.nonzero(begins)[1]  # of the first leaves of words, example after example
        before = np.concatenate([[0], begins.ravel().cumsum()])  # words that begin before a flat leaf
        flat = example * table.num_leaves
        first, last, right = before[flat + start + 1], before[flat + end], before[flat + gold]
        kept = begins[example, gold] & (last - first >= 2)
        example, start, end, first, last, right = (x[kept] for x in (example, start, end, first, last, right))
        span, index, first_row = expand(last - first)
        counts = np.bincount(example, minlength=len(table.leaf_counts))
        columns = (
            example[span],
            start[span],
            places[first[span] + index],
            end[span],
            span,
            first_row + right - first,
            1.0 / counts[example],
            example,
        )
        return cls(*map(torch.from_numpy, columns))


def _binary_spans(table: SpanTable) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return example, start, split and end of every split of the trees made binary from the right."""
    tree, node = np.nonzero(~table.node_pad_mask)
    leaf = np.nonzero(~table.leaf_pad_mask)[1]
    of_nodes, of_leaves = find_parents(table)
    parent = np.concatenate([of_nodes, of_leaves])
    start = np.concatenate([table.start[tree, node], leaf])
    order = np.lexsort((start, parent))
    order = order[parent[order] >= 0]
    parent, start = parent[order], start[order]
    later = np.flatnonzero(parent[1:] == parent[:-1]) + 1  # children that follow another one
    owner = parent[later]
    return tree[owner], start[later - 1], start[later], table.end[tree, node][owner]
