"""Words of the training data that change in every epoch: BPE-dropout, and noise on source words.

BPE-dropout (Provilkov et al., 2020) divides words into pieces anew, from the merges of a sentencepiece model. A word starts as
characters. In each step, every possible merge is passed over with probability p, and the earliest learned of the others is
applied, from left to right. A word is finished when no merge is left. So p = 0 gives the usual pieces. All words of a batch take
their steps together. A draw is a hash of the word's key, the step, and the character that the left part begins at. So the pieces
of a word do not depend on other words.

Noise on source words (Lample et al., 2018): words move a little, are left out, or become unknown. Trees stay those of the clean
words: phrases and arcs belong to places. A word takes its pieces and its tag to another place. If a word is left out, its place
goes too, and with it the nodes without words.

In a shard, a word of several pieces has a node that is labelled with its tag (`split_words` of `treeproc.trees.flat_trees`). If
trees are binary, further nodes divide it. `over_words` removes these nodes, and `over_pieces` makes them for the new pieces.

Shapes: B examples, L leaves, G words, N nodes, all of a batch; P pieces, V vocabulary, M pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from treenet.config import SamplingConfig
from treenet.data.hashed_sampling import keys_of_examples, keys_of_parts
from treenet.data.input_kinds import RowLists
from treenet.structure.base import Ragged
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.piece_files import read_pieces
from treeproc.shards.rows import edges_of, flatten, hash_ids, take
from treeproc.shards.schema import SPLIT_WORD_PREFIX, UNK_ID, UNKNOWN_LABEL_ID
from treeproc.shards.shard import read_names
from treeproc.trees.controls import hidden_names
from treeproc.trees.flat_trees import BINARY_PREFIX, FlatTrees, binarise, split_words


@dataclass(frozen=True)
class WordTrees:
    """Words of a batch and the trees over them; leaves of the trees are words, numbered over the batch."""

    trees: FlatTrees  # labels are ids of the vocabulary of labels
    tags: np.ndarray  # [G] id of the tag of each word
    words: np.ndarray  # [B] words of each example
    pieces: np.ndarray  # [L] the pieces of all words
    counts: np.ndarray  # [G] pieces of each word


def over_words(rows: RowLists, *, every_word: bool = False) -> WordTrees:
    """Return the words and trees of examples that were read with their words and tags.

    Words of several pieces lose the node of their tag; with `every_word`, all words do. Raises UserError if one has none.
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
    has_node = counts > (0 if every_word else 1)
    in_word = (start_word == last_word) & has_node[start_word]
    complete = in_word & (end - start == counts[start_word])
    own = np.full(len(counts), -1)
    own[start_word[complete]] = np.flatnonzero(complete)  # the last one in pre-order, which is the lowest
    if (own[has_node] < 0).any():
        raise UserError("a word of several pieces has no node of its tag in the trees; run tree-attention preprocess again")
    kept = ~in_word | complete
    kept[own[has_node]] = False
    trees = FlatTrees(labels.flat[kept].astype(np.int64), start_word[kept], last_word[kept] + 1, [])
    words = np.diff(edges_of(begins.astype(np.int64))[leaf_edges])
    return WordTrees(trees, tags.flat[first[:-1]].astype(np.int64), words, pieces.flat, counts)


class PieceTrees:
    """Makes trees over pieces from trees over words, with the label ids of a vocabulary folder.

    `settings` are those of the trees of the data set. Raises UserError if a file of the vocabulary is missing.
    """

    def __init__(self, vocab: AnyPath, settings: Mapping):
        self._labels, self._tags = (read_names(vocab / f"{name}.txt") for name in ("labels", "pos_tags"))
        self._binarize, source = settings.get("binarize", "none"), settings.get("tree_source")
        self.every_word = source == "flat_tags"
        ids = {name: number for number, name in enumerate(self._labels)}
        names = [*self._labels, *(SPLIT_WORD_PREFIX + name for name in self._tags)]
        # The names in the order in which `split_words` and `binarise` number them.
        names += [BINARY_PREFIX + name for name in names]
        shown = hidden_names(names) if source == "unlabelled" else names
        self._ids = np.array([ids.get(name, UNKNOWN_LABEL_ID) for name in shown])

    def over_pieces(self, words: WordTrees) -> RowLists:
        """Return the rows of a batch, without its example ids and targets."""
        trees = FlatTrees(words.trees.labels, words.trees.starts, words.trees.ends, self._labels)
        trees = split_words(trees, words.tags, self._tags, words.counts, every_word=self.every_word)
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


BLANK = "\u2581"  # the mark of sentencepiece for a blank


@dataclass(frozen=True)
class Merges:
    """The merges of a byte-pair model as tables of piece ids."""

    characters: np.ndarray  # flat: the characters of every piece; a special piece or a byte is its own character
    edges: np.ndarray  # [V + 1] of `characters`
    pairs: np.ndarray  # [M] int64, left * V + right, ascending
    merged: np.ndarray  # [M] the piece that a pair becomes
    priority: np.ndarray  # [V] int64, lower for pieces that were learned earlier
    blank: int  # the piece of a blank alone; -1 if there is none
    is_tag: np.ndarray  # [V] bool, whether a piece is a tag in front of lines

    @classmethod
    def load(cls, path: AnyPath) -> "Merges":
        """Read the model `pieces.model`. Raises UserError if it is broken, or not a byte-pair model."""
        model, _ = read_pieces(path)
        if model.trainer_spec.model_type != model.trainer_spec.BPE:
            raise UserError(f"{path} is not a byte-pair model, but sampling needs its merges; leave sampling out")
        return cls._of_pieces(model.pieces)

    @classmethod
    def _of_pieces(cls, pieces: list) -> "Merges":
        ids = {piece.piece: number for number, piece in enumerate(pieces) if piece.type == piece.NORMAL}
        names: Mapping[int, str] = {number: name for name, number in ids.items()}
        characters, pairs = [], {}
        for number in range(len(pieces)):
            name = names.get(number, "")
            known = bool(name) and all(character in ids for character in name)
            characters.append([ids[character] for character in name] if known else [number])
            for cut in range(1, len(name)) if known else ():
                left, right = ids.get(name[:cut]), ids.get(name[cut:])
                if left is not None and right is not None:
                    pairs[left * len(pieces) + right] = number
        flat, lengths = flatten(characters)
        keys = np.array(sorted(pairs), dtype=np.int64)
        merged = np.array([pairs[key] for key in keys.tolist()], dtype=np.int64)
        _, priority = np.unique([-piece.score for piece in pieces], return_inverse=True)
        is_tag = np.array([piece.type == piece.USER_DEFINED for piece in pieces])
        return cls(flat, edges_of(lengths), keys, merged, priority.astype(np.int64), ids.get(BLANK, -1), is_tag)

    def begins_word(self, pieces: np.ndarray) -> np.ndarray:
        """Return whether each piece begins with a blank, [P] bool."""
        return self.characters[self.edges[pieces]] == self.blank

    def divide(self, pieces: np.ndarray, counts: np.ndarray, keys: np.ndarray, dropout: float) -> tuple[np.ndarray, np.ndarray]:
        """Divide words anew: (pieces of all words, pieces per word).

        `pieces` [P] are the pieces of all words now, and `counts` [G] their number in each word. `keys` [G] uint64 are the keys
        of the words. `dropout` is the probability p, at least 0 and below 1.
        """
        symbols, per_piece = take(self.characters, self.edges, pieces)
        word = np.repeat(np.repeat(np.arange(len(counts)), counts), per_piece)
        sizes = np.bincount(word, minlength=len(counts))
        place = (np.arange(len(symbols)) - np.repeat(edges_of(sizes)[:-1], sizes)).astype(np.uint64)
        stays = np.ones(len(symbols), dtype=bool)
        # The symbols of unfinished words, by their numbers among all symbols.
        at, result = np.arange(len(symbols)), np.full(len(symbols), -1, dtype=np.int64)
        result[:-1] = np.where(word[:-1] == word[1:], self._merge(symbols[:-1], symbols[1:]), -1)
        threshold, step = np.uint64(int(dropout * 2**64)), 0
        while True:
            found = np.flatnonzero(result >= 0)
            drawn = hash_ids(keys[word[at[found]]] ^ (np.uint64(step << 32) | place[at[found]]))
            found = found[drawn >= threshold]
            if not len(found):
                break
            first = np.flatnonzero(np.diff(word[at[found]], prepend=-1))
            best = np.minimum.reduceat(self.priority[result[found]] << 32 | found, first) & 0xFFFFFFFF
            symbols[at[best]] = result[best]
            stays[at[best + 1]] = False
            unfinished = np.zeros(len(counts), dtype=bool)
            unfinished[word[at[best]]] = True
            kept = unfinished[word[at]] & stays[at]
            at, result, best = at[kept], result[kept], (np.cumsum(kept) - 1)[best]
            self._renew(result, symbols[at], word[at], np.concatenate([best[best > 0] - 1, best]))
            step += 1
        return symbols[stays], np.bincount(word[stays], minlength=len(counts))

    def _renew(self, result: np.ndarray, symbols: np.ndarray, word: np.ndarray, changed: np.ndarray) -> None:
        """Look up the merges again, in place, of the symbols `changed` with the symbols after them."""
        result[changed] = -1
        inner = changed[changed + 1 < len(symbols)]
        inner = inner[word[inner] == word[inner + 1]]
        result[inner] = self._merge(symbols[inner], symbols[inner + 1])

    def _merge(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the piece that each pair becomes; -1 if there is none."""
        if not len(self.pairs):
            return np.full(len(left), -1, dtype=np.int64)
        wanted = left * (len(self.edges) - 1) + right
        near = np.minimum(np.searchsorted(self.pairs, wanted), len(self.pairs) - 1)
        return np.where(self.pairs[near] == wanted, self.merged[near], -1)


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
    old = trees.keep(there)
    trees = replace(old, starts=starts[there], ends=ends[there])
    return trees.keep(~trees.above_same_span() | old.above_same_span())
