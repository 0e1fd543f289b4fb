"""Trees over pieces to trees over words, and back over other pieces.

In a shard, a word of several pieces has a node that is labelled with its tag (`split_words` of `treeproc.trees.flat_trees`). If
trees are binary, further nodes divide it. `over_words` removes these nodes, and `over_pieces` makes them for the new pieces.
Shapes: B examples, L leaves, G words, N nodes, all of a batch.
"""

from dataclasses import dataclass

import numpy as np

from treenet.data.row_lists import RowLists
from treenet.structure.span_table import Ragged
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.ragged import edges_of
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNKNOWN_LABEL_ID
from treeproc.shards.vocabulary_files import read_names
from treeproc.trees.flat_trees import BINARY_PREFIX, FlatTrees, binarise, split_words


@dataclass(frozen=True)
class WordTrees:
    """Words of a batch and the trees over them; leaves of the trees are words, numbered over the batch."""

    trees: FlatTrees  # labels are ids of the vocabulary of labels
    tags: np.ndarray  # [G] id of the tag of each word
    words: np.ndarray  # [B] words of each example
    pieces: np.ndarray  # [L] the pieces of all words
    counts: np.ndarray  # [G] pieces of each word


def over_words(rows: RowLists) -> WordTrees:
    """Return the words and trees of examples that were read with their words and tags.

    Raises UserError if a word of several pieces has no node.
    """
    pieces, word, tags = (Ragged.of(lists) for lists in (rows.pieces, rows.words, rows.pos_tags))
    labels, starts, ends = (Ragged.of(lists) for lists in (rows.labels, rows.starts, rows.ends))
    begins = np.diff(word.flat, prepend=-1) != 0
    leaf_edges = edges_of(pieces.lengths)
    begins[leaf_edges[:-1][pieces.lengths > 0]] = True
    first = np.append(np.flatnonzero(begins), len(begins))
    of_leaf = np.cumsum(begins) - 1
    counts, offset = np.diff(first), np.repeat(leaf_edges[:-1], starts.lengths)
    start, end = starts.flat + offset, ends.flat + offset
    start_word, last_word = of_leaf[start], of_leaf[end - 1]
    in_word = (start_word == last_word) & (counts[start_word] > 1)
    complete = in_word & (end - start == counts[start_word])
    own = np.full(len(counts), -1)
    own[start_word[complete]] = np.flatnonzero(complete)  # the last one in pre-order, which is the lowest
    if (own[counts > 1] < 0).any():
        raise UserError("a word of several pieces has no node of its tag in the trees; run workflows/preprocess.py again")
    kept = ~in_word | complete
    kept[own[counts > 1]] = False
    trees = FlatTrees(labels.flat[kept].astype(np.int64), start_word[kept], last_word[kept] + 1, [])
    words = np.diff(edges_of(begins.astype(np.int64))[leaf_edges])
    return WordTrees(trees, tags.flat[first[:-1]].astype(np.int64), words, pieces.flat, counts)


class PieceTrees:
    """Makes trees over pieces from trees over words, with the label ids of a vocabulary folder.

    `binarize` is the setting of that name of the data set. Raises UserError if a file of the vocabulary is missing.
    """

    def __init__(self, vocab: AnyPath, binarize: str):
        self._labels, self._tags = (read_names(vocab / f"{name}.txt") for name in ("labels", "pos_tags"))
        self._binarize = binarize
        ids = {name: number for number, name in enumerate(self._labels)}
        names = [*self._labels, *(SPLIT_WORD_PREFIX + name for name in self._tags)]
        made = [*names[len(self._labels) :], *(BINARY_PREFIX + name for name in names)]
        # The names in the order in which `split_words` and `binarise` number them.
        self._ids = np.array([*range(len(self._labels)), *(ids.get(name, UNKNOWN_LABEL_ID) for name in made)])

    def over_pieces(self, words: WordTrees) -> RowLists:
        """Return the rows of a batch, without its example ids and targets."""
        trees = FlatTrees(words.trees.labels, words.trees.starts, words.trees.ends, self._labels)
        trees = split_words(trees, words.tags, self._tags, words.counts)
        if self._binarize != "none":
            trees = binarise(trees, len(words.pieces), self._binarize)
        word_edges = edges_of(words.words)
        leaf_edges = edges_of(words.counts)[word_edges]
        node_edges = trees.node_edges(leaf_edges)
        nodes, leaves = np.diff(node_edges), np.diff(leaf_edges)
        leaf, node = np.repeat(leaf_edges[:-1], nodes), np.repeat(node_edges[:-1], nodes)
        number = np.arange(len(words.counts)) - np.repeat(word_edges[:-1], words.words)
        return RowLists(
            pieces=Ragged(words.pieces, leaves),
            labels=Ragged(self._ids[trees.labels], nodes),
            starts=Ragged(trees.starts - leaf, nodes),
            ends=Ragged(trees.ends - leaf, nodes),
            subtree_ends=Ragged(trees.subtree_ends() - node, nodes),
            words=Ragged(np.repeat(number, words.counts), leaves),
            pos_tags=Ragged(np.repeat(words.tags, words.counts), leaves),
        )
