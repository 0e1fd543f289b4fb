"""BPE-dropout: words divided into pieces anew, from the merges of a sentencepiece model (Provilkov et al., 2020).

A word starts as characters. In each step, every possible merge is passed over with probability p, and the earliest learned of the
others is applied, from left to right. A word is finished when no merge is left. So p = 0 gives the usual pieces.

All words of a batch take their steps together. A draw is a hash of the word's key, the step, and the character that the left part
begins at. So the pieces of a word do not depend on other words. Shapes: P pieces, G words, V vocabulary, M pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from treenet.data.hashed_sampling import hash_ids
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.ragged import edges_of, flatten, take
from treeproc.shards.vocabulary_files import read_pieces

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
