"""The inputs of probing: the pieces of the sentences, and copies with two adjacent words exchanged.

Only pieces are exchanged. Tree, tags and arcs stay those of the original sentence, for every model. The two words have the same
number of pieces, so that nothing except the pieces differs.

Shapes: n sentences, w chosen words, k copies, B batch, L leaves.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treenet.data.batch import TreeBatch, pad
from treenet.data.batch_cuts import cut_batches
from treenet.data.examples import ExampleSource
from treenet.data.input_kinds import InputKind
from treenet.probing.sentences import ProbeSentences, keys
from treeproc.common.errors import check_choice
from treeproc.common.storage import AnyPath

# Random draws for a sentence or a word, each from a separate stream.
_EXCHANGED, _PAIR, _WORD = 1, 2, 3
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class ProbeInputs:
    """The rows of states of a split: one for each sentence, then one for each copy; and one for each chosen word."""

    source: ExampleSource
    sentences: ProbeSentences
    word_of_leaf: list[np.ndarray]  # of each sentence, [leaves]
    pair: np.ndarray  # [n, 2] first leaf of the two words that may be exchanged, and leaves of each; 0, 0 without such a pair
    copies: np.ndarray  # [k] sentences that have a copy with the pair exchanged: about half of those with a pair
    words: np.ndarray  # [w] chosen words among those of `sentences.syntax`, ascending
    word_leaves: np.ndarray  # [w, 2] first leaf of each in its sentence, and number of its leaves

    @classmethod
    def build(
        cls, data: AnyPath, split: str, reads: InputKind, sentences: ProbeSentences, most_words: int, seed: int
    ) -> "ProbeInputs":
        """Build the inputs for a model that reads `reads`. Words and pairs depend only on ids and `seed`."""
        source = ExampleSource(data / "encoded", split, reads)
        picked = source.pick(sentences.rows)
        pieces, words = (list(source.lists(picked, "leaves", name)) for name in ("piece", "word_index"))
        ids = sentences.example_ids
        pair = np.zeros((len(ids), 2), dtype=np.int64)
        for i, draw in enumerate(keys(ids, seed, _PAIR).tolist()):
            if len(pairs := exchangeable_pairs(pieces[i], words[i])):
                pair[i] = pairs[draw % len(pairs)]
        exchanged = (keys(ids, seed, _EXCHANGED) & np.uint64(1)).astype(bool)

        firsts = [np.flatnonzero(np.diff(one, prepend=-1)) for one in words]
        numbers = [one[first] for one, first in zip(words, firsts, strict=True)]
        sizes = [np.diff(first, append=len(one)) for one, first in zip(words, firsts, strict=True)]
        word = np.concatenate(numbers)
        sentence = np.repeat(np.arange(len(ids)), [len(one) for one in numbers])
        chosen = np.sort(np.argsort(keys(ids[sentence], seed, _WORD, word), kind="stable")[:most_words])
        return cls(
            source=source,
            sentences=sentences,
            word_of_leaf=words,
            pair=pair,
            copies=np.flatnonzero(exchanged & (pair[:, 1] > 0)),
            words=(sentences.syntax.word_edges[sentence] + word)[chosen],
            word_leaves=np.stack([np.concatenate(firsts), np.concatenate(sizes)], axis=1)[chosen],
        )

    @property
    def num_rows(self) -> int:
        """Return the number of rows, n + k."""
        return len(self.word_of_leaf) + len(self.copies)

    def batches(self) -> list[np.ndarray]:
        """Yield all rows of sentences and copies once, in batches of similar length."""
        leaves = np.array([len(self.word_of_leaf[sentence]) for sentence in self._sentence(np.arange(self.num_rows))])
        order = np.argsort(leaves, kind="stable")
        return np.split(order, cut_batches(leaves[order], _BATCH_TOKENS)[1:-1])

    def batch(self, rows: np.ndarray) -> tuple[TreeBatch, Tensor]:
        """Return rows of sentences and copies as a batch in the form that the model reads, and the word of every leaf [B, L]."""
        sentence = self._sentence(rows)
        batch = self.source.batch(self.sentences.rows[sentence])
        for place in np.flatnonzero(rows >= len(self.word_of_leaf)).tolist():
            batch.leaf_pieces[place] = exchange(batch.leaf_pieces[place], *self.pair[sentence[place]].tolist())
        words = [self.word_of_leaf[one] for one in sentence]
        padded, _ = pad(words, 0, self.source.reads.width_multiple)
        return batch, torch.from_numpy(padded)

    def leaves_of_words(self, rows: np.ndarray, width: int, word_state: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the chosen words of a batch of `width` leaves, by their place in `words`, and the leaves of their states.

        Both have an entry for each leaf: (word, b * width + leaf). Copies have no entries.
        """
        check_choice("word_state", word_state, ("first", "mean"))
        sentence_of_word = np.searchsorted(self.sentences.syntax.word_edges, self.words, side="right") - 1
        row_of_sentence = np.full(len(self.word_of_leaf), -1)
        own = rows < len(self.word_of_leaf)
        row_of_sentence[rows[own]] = np.flatnonzero(own)
        word = np.flatnonzero(row_of_sentence[sentence_of_word] >= 0)
        first, size = self.word_leaves[word].T
        size = np.ones_like(size) if word_state == "first" else size
        offset = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        row = row_of_sentence[sentence_of_word[word]]
        return np.repeat(word, size), np.repeat(row * width + first, size) + offset

    def _sentence(self, rows: np.ndarray) -> np.ndarray:
        """Return the sentence of each row."""
        return np.concatenate([np.arange(len(self.word_of_leaf)), self.copies])[rows]


def exchangeable_pairs(pieces: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Return [pairs, 2] for adjacent, different words with the same number of pieces: the first leaf, and the leaves of each."""
    first = np.flatnonzero(np.diff(words, prepend=-1))
    size = np.diff(first, append=len(words))
    alike = np.flatnonzero((size[1:] == size[:-1]) & (words[first[1:]] == words[first[:-1]] + 1))
    differ = [i for i in alike.tolist() if (pieces[first[i] : first[i + 1]] != pieces[first[i + 1] :][: size[i]]).any()]
    return np.stack([first[differ], size[differ]], axis=1)


def exchange(pieces: Tensor, first: int, size: int) -> Tensor:
    """Copy pieces [L], and exchange `size` of them from `first` with the next `size` pieces."""
    middle, end = first + size, first + 2 * size
    return torch.cat([pieces[:first], pieces[middle:end], pieces[first:middle], pieces[end:]])
