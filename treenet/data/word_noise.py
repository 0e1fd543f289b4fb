"""Noise on source words (Lample et al., 2018): words move a little, are left out, or become unknown.

Trees stay those of the clean words: phrases and arcs belong to places. A word takes its pieces and its tag to another place. If a
word is left out, its place goes too, and with it the nodes without words. Shapes: B examples, G words, N nodes, all of a batch.
"""

from dataclasses import replace

import numpy as np

from treenet.config import SamplingConfig
from treenet.data.hashed_sampling import keys_of_examples, keys_of_parts
from treenet.data.word_trees import WordTrees
from treeproc.shards.ragged import edges_of, take
from treeproc.shards.schema import UNK_ID
from treeproc.trees.flat_trees import FlatTrees

# The purposes of draws, besides those of `sampled.py`.
_MOVE, _DROP, _MASK = 2, 3, 4


class WordDraws:
    """Draws in [0, 1) for each word of examples with these ids, from seed, epoch, the purpose, and the word's number."""

    def __init__(self, example_ids: np.ndarray, words: np.ndarray, seed: int, epoch: int):
        self._ids, self._words, self._numbers = example_ids, words, (seed, epoch)

    def __call__(self, purpose: int) -> np.ndarray:
        keys = keys_of_parts(keys_of_examples(self._ids, *self._numbers, purpose), self._words)
        return (keys >> np.uint64(11)) / 2.0**53


def add_noise(words: WordTrees, config: SamplingConfig, draws: WordDraws, fixed: np.ndarray) -> WordTrees:
    """Return the words and trees with the noise of the settings. Words that are `fixed` [G], such as tags, stay as they are."""
    order = np.arange(len(words.counts))
    if config.shuffle_distance:
        row = np.repeat(np.arange(len(words.words)), words.words)
        place = order + np.where(fixed, 0.0, draws(_MOVE) * (config.shuffle_distance + 1))
        order = np.lexsort((place, row))
        words = _take_words(words, order)
    if config.word_mask:
        words = _mask(words, (draws(_MASK) < config.word_mask)[order] & ~fixed[order])
    if config.word_dropout:
        kept = _kept(draws(_DROP)[order], config.word_dropout, fixed[order], words.words)
        trees = _without_places(words.trees, kept)
        counts = np.diff(edges_of(kept.astype(np.int64))[edges_of(words.words)])
        words = replace(_take_words(words, np.flatnonzero(kept)), trees=trees, words=counts)
    return words


def _take_words(words: WordTrees, chosen: np.ndarray) -> WordTrees:
    """Return these words, with the trees as they are."""
    pieces, counts = take(words.pieces, edges_of(words.counts), chosen)
    return replace(words, pieces=pieces, counts=counts, tags=words.tags[chosen])


def _mask(words: WordTrees, masked: np.ndarray) -> WordTrees:
    """Return the words where each masked one is one unknown piece."""
    counts = np.where(masked, 1, words.counts)
    pieces = np.full(counts.sum(), UNK_ID, dtype=words.pieces.dtype)
    pieces[~np.repeat(masked, counts)] = words.pieces[~np.repeat(masked, words.counts)]
    return replace(words, pieces=pieces, counts=counts)


def _kept(drawn: np.ndarray, dropout: float, fixed: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return which words stay [G]. An example keeps at least one word that is not fixed: the one with the highest draw."""
    drawn = np.where(fixed, -1.0, drawn)
    begins = edges_of(words)[:-1][words > 0]
    highest = np.repeat(np.maximum.reduceat(drawn, begins), words[words > 0]) if len(begins) else drawn
    return fixed | (drawn >= dropout) | (drawn == highest)


def _without_places(trees: FlatTrees, kept: np.ndarray) -> FlatTrees:
    """Return the trees over the kept words. Nodes without words go. The lowest of nodes that now span the same words stays."""
    before = edges_of(kept.astype(np.int64))
    starts, ends = before[trees.starts], before[trees.ends]
    there = np.flatnonzero(starts < ends)
    old = trees.starts[there], trees.ends[there]
    trees = FlatTrees(trees.labels[there], starts[there], ends[there], trees.names)
    same = np.zeros(len(trees), dtype=bool)
    same[:-1] = (trees.starts[1:] == trees.starts[:-1]) & (trees.ends[1:] == trees.ends[:-1])
    was_same = np.zeros(len(trees), dtype=bool)
    was_same[:-1] = (old[0][1:] == old[0][:-1]) & (old[1][1:] == old[1][:-1])
    return trees.keep(~same | was_same)
