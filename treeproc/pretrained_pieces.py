"""Pieces of a pretrained encoder's tokenizer, cut at the parser's words.

The tokenizer reads the whole line. A piece lies where its characters lie, so a piece that holds characters of two words crosses
a border: `don` of `don't`, which the parser reads as `do` + `n't`. Words that such a piece touches are cut again, each by
itself. All other pieces are the tokenizer's own.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from treeproc.common.storage import AnyPath
from treeproc.shards.piece_files import blamed_on_tokenizer, decode_tokens, read_tokenizer, tokenizer_names
from treeproc.shards.rows import WordEnds
from treeproc.shards.schema import FIRST_PIECE, UNK_ID

# Number of words in the cache of words that are cut by themselves. When it is full, the cache is emptied.
_MOST_KNOWN = 200_000

# Begins the names of special pieces while a text is cut. It is no character of Unicode.
_NO_TEXT = "\uffff"


class TokenizerPieces:
    """The fast tokenizer of a pretrained encoder. Raises UserError if the file is missing, or refused.

    Every word has a piece. A word without one (U+200B, an accent alone) gets the unknown piece.
    """

    def __init__(self, path: AnyPath):
        tokenizer = read_tokenizer(path)
        self._names, spec = tokenizer_names(tokenizer), json.loads(tokenizer.to_str())
        self._unknown = _unknown_id(spec["model"], tokenizer)
        _hide_special_pieces(spec)
        # Cuts whole lines and first words, words after a blank, and words that touch the one before them.
        self._tokenizer = _of_text(spec)
        after_blank, inside = (_without_first_blank(spec, touches=touches) for touches in (False, True))
        self._after_blank = self._tokenizer if after_blank == spec else _of_text(after_blank)
        self._inside = self._after_blank if inside == after_blank else _of_text(inside)
        self._known: dict[tuple[str, bool, bool], list[int]] = {}

    def __len__(self) -> int:
        return len(self._names)

    @blamed_on_tokenizer()
    def facts(self) -> dict[str, int | list[int] | None]:
        """Return what an encoder needs, in the tokenizer's numbers: how many there are, the unknown one, and those around a text.

        `before` and `after` are those of one text: [CLS] and [SEP] of BERT.
        """
        with_ends = self._tokenizer.encode("a", add_special_tokens=True)
        real = np.flatnonzero(np.array(with_ends.special_tokens_mask) == 0)
        first, last = (int(real[0]), int(real[-1]) + 1) if len(real) else (len(with_ends.ids), len(with_ends.ids))
        around = {"before": with_ends.ids[:first], "after": with_ends.ids[last:]}
        return {"pieces": len(self) - FIRST_PIECE, "unknown": self._unknown, **around}

    @blamed_on_tokenizer()
    def encode_lines(self, lines: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces of whole lines, as the tokenizer cuts them: (pieces of all lines, pieces per line)."""
        found = [self._numbers(one.ids) for one in self._tokenizer.encode_batch(lines.to_pylist(), add_special_tokens=False)]
        return _joined(found), np.array([len(one) for one in found], dtype=np.int64)

    @blamed_on_tokenizer()
    def encode_words(self, lines: pa.Array, words: WordEnds, counts: Counter | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces of every word of every line: (pieces of all words, pieces per word).

        A word includes the characters before it, and the last word also those after it. `counts`, if given, takes up the
        tokenizer's pieces, those that cross a border and their lines, the unknown pieces, and the words that had none.
        """
        texts, per_line = lines.to_pylist(), np.diff(words.edges)
        full = np.flatnonzero(per_line)
        cut = self._tokenizer.encode_batch([texts[row] for row in full], add_special_tokens=False)
        row = np.repeat(full, [len(one.ids) for one in cut])
        ids = self._numbers(_joined([np.array(one.ids, dtype=np.int64) for one in cut]))
        spans = _joined([np.array(one.offsets, dtype=np.int64).reshape(-1, 2) for one in cut], (0, 2))
        first, last = (_word_at(words, row, place) for place in (spans[:, 0], np.maximum(spans[:, 1] - 1, spans[:, 0])))
        crossing = first != last
        edges = np.bincount(first[crossing], minlength=len(words.ends) + 1)
        edges = edges - np.bincount(last[crossing] + 1, minlength=len(words.ends) + 1)
        again = np.flatnonzero(np.cumsum(edges)[: len(words.ends)])
        kept = ~np.isin(first, again) & ~crossing
        own = [np.array(self._word(texts, words, word), dtype=np.int64) for word in again.tolist()]
        word_of = np.concatenate([first[kept], np.repeat(again, [len(one) for one in own])])
        pieces = np.concatenate([ids[kept], _joined(own)])
        missing = np.setdiff1d(np.arange(len(words.ends)), word_of)
        word_of, pieces = np.concatenate([word_of, missing]), np.concatenate([pieces, np.full(len(missing), UNK_ID)])
        order = np.argsort(word_of, kind="stable")
        if counts is not None:
            counts["tokenizer_pieces"] += len(ids)
            counts["crossing_pieces"] += int(crossing.sum())
            counts["lines_with_crossing"] += len(np.unique(row[crossing]))
            counts["words_without_piece"] += len(missing)
            counts["unknown_pieces"] += int((pieces == UNK_ID).sum())
        return pieces[order], np.bincount(word_of, minlength=len(words.ends))

    def decode(self, pieces: Sequence[Sequence[int]]) -> list[str]:
        """Return the text that the tokenizer makes of sequences of piece ids. It need not be the original one."""
        return [text.replace(_NO_TEXT, "") for text in decode_tokens(self._tokenizer, self._unknown, pieces)]

    def names(self, pieces: Sequence[int]) -> list[str]:
        """Return the pieces as in the vocabulary."""
        return [self._names[int(piece)] for piece in pieces]

    def _word(self, texts: Sequence[str], words: WordEnds, word: int) -> list[int]:
        """Return the pieces of a word that is cut by itself."""
        row = int(np.searchsorted(words.edges, word, side="right")) - 1
        text, inner = texts[row], word > words.edges[row]
        start = int(words.ends[word - 1]) if inner else 0
        part = text[start : int(words.ends[word])] if word + 1 < words.edges[row + 1] else text[start:]
        touches = bool(inner and not part[:1].isspace())
        key = part, bool(inner), touches
        if key not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            tokenizer = self._inside if touches else self._after_blank if inner else self._tokenizer
            ids = np.array(tokenizer.encode(part, add_special_tokens=False).ids, dtype=np.int64)
            self._known[key] = self._numbers(ids).tolist()
        return self._known[key]

    def _numbers(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return ids of the tokenizer as pieces of our vocabularies."""
        pieces = np.asarray(ids, dtype=np.int64) + FIRST_PIECE
        return pieces if self._unknown is None else np.where(pieces == FIRST_PIECE + self._unknown, UNK_ID, pieces)


def _word_at(words: WordEnds, row: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Return the word that holds character `place` of line `row`: the first one that ends behind it, or the last one."""
    width = 2 + int(max(words.ends.max(initial=0), place.max(initial=0)))
    ends = np.repeat(np.arange(len(words.edges) - 1), np.diff(words.edges)) * width + words.ends
    found = np.searchsorted(ends, row * width + place, side="right")
    return np.minimum(found, words.edges[row + 1] - 1)


def _joined(parts: Sequence[np.ndarray], shape: tuple[int, ...] = (0,)) -> np.ndarray:
    return np.concatenate([np.zeros(shape, dtype=np.int64), *parts])


def _unknown_id(model: dict, tokenizer: Any) -> int | None:
    """Return the number of the unknown piece; None for tokenizers of bytes, which have none."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    return None if model.get("unk_token") is None else tokenizer.token_to_id(model["unk_token"])


def _of_text(spec: object) -> Any:
    """Return the tokenizer of a description, which reads the names of added special pieces as text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _hide_special_pieces(spec: dict) -> None:
    """Give special pieces names in the description of a tokenizer that occur in no text, and keep their numbers.

    Otherwise its model would find `</s>` of a text, or `[MASK]`, among its pieces.
    """
    model, added = spec["model"], [token for token in spec["added_tokens"] if token["special"]]
    hidden = {token["content"]: f"{_NO_TEXT}{token['content']}" for token in added}
    for token in added:
        token["content"] = hidden[token["content"]]
    if unknown := model.get("unk_token"):
        model["unk_token"] = hidden.setdefault(unknown, f"{_NO_TEXT}{unknown}")
    if model["type"] == "Unigram":
        if (unknown := model["unk_id"]) is not None:
            hidden.setdefault(name := model["vocab"][unknown][0], f"{_NO_TEXT}{name}")
        model["vocab"] = [[hidden.get(name, name), score] for name, score in model["vocab"]]
        return
    model["vocab"] = {hidden.get(name, name): number for name, number in model["vocab"].items()}
    if model["type"] == "BPE":
        mark = len(model["continuing_subword_prefix"] or "")
        model["merges"] = [pair for pair in model["merges"] if hidden.keys().isdisjoint([*pair, pair[0] + pair[1][mark:]])]


def _without_first_blank(spec: object, *, touches: bool) -> object:
    """Return the description of a tokenizer for words inside of a line, which writes no blank that the line does not have.

    `Prepend` writes one before each text, and a left `Strip` removes those before it. The others write one only before a text
    that has none, so they change only for a word that `touches` the one before it.
    """
    if isinstance(spec, list):
        kept = [one for one in spec if not (isinstance(one, dict) and one.get("type") == "Prepend")]
        return [_without_first_blank(one, touches=touches) for one in kept]
    if not isinstance(spec, dict):
        return spec
    kind = spec.get("type")
    if kind == "Prepend":
        return None
    changes: dict[str, object] = {"strip_left": False} if kind == "Strip" and "strip_left" in spec else {}
    if touches and kind == "ByteLevel":
        changes = {"add_prefix_space": False}
    if touches and kind == "Metaspace":
        changes = {"prepend_scheme": "never"} | ({"add_prefix_space": False} if "add_prefix_space" in spec else {})
    parts = spec | changes
    return {name: value if name == "model" else _without_first_blank(value, touches=touches) for name, value in parts.items()}
