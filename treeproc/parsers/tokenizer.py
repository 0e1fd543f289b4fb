"""Stanza's tokeniser without documents: the same weights on lines that are arrays of character ids."""

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from treeproc.parsers.lines import Token

_OF_A_CHARACTER = ("space_before", "capitalized", "numeric")
_OF_A_PLACE = ("end_of_para", "start_of_para")
_TOO_LONG = "<UNK>"  # as in Stanza, for tokens of hundreds of characters
_WHITESPACE = re.compile(r"[\s\u0080-\u009f]")
# Stanza's own pattern for addresses is slow; every match contains one of these.
_PERHAPS_ADDRESS = re.compile(r"@|\.\S\S")
_WINDOW = 1000  # as in Stanza: longer paragraphs are read in windows that end at a sentence break


def supports(trainer, config: dict) -> bool:
    """Return whether a Stanza tokeniser reads only characters and Stanza's five plain features."""
    args = trainer.args
    return (
        trainer.model.charmodel is None
        and not args["use_dictionary"]
        and set(args["feat_funcs"]) <= {*_OF_A_CHARACTER, *_OF_A_PLACE}
        and not args["skip_newline"]
        and args["shorthand"] != "la_ittb"
        and not config.get("postprocessor")
    )


class _Characters(dict):
    """Rows of characters in a table of (unit, features). The table grows with new characters."""

    def __init__(self, vocab, features: Sequence[str]):
        from stanza.models.tokenization.data import PER_CHAR_FEAT_FUNCS

        super().__init__()
        self._unit, self._functions = vocab.unit2id, [PER_CHAR_FEAT_FUNCS[name] for name in features]
        self.units: list[int] = []
        self.features: list[list[float]] = []

    def __missing__(self, character: str) -> int:
        self.units.append(self._unit(character))
        self.features.append([function(character) for function in self._functions])
        self[character] = len(self)
        return len(self) - 1


class Tokenizer:
    """Returns sentences of tokens of every line."""

    def __init__(self, trainer, vocab, max_token: int, split_sentences: bool):
        self._model: nn.Module = trainer.model.eval()
        self._normalise = vocab.normalize_token
        self._max_token, self._split = max_token, split_sentences
        names = trainer.args["feat_funcs"]
        # As in Stanza: features of the character itself, then of its position.
        self._characters = _Characters(vocab, [name for name in names if name in _OF_A_CHARACTER])
        self._ends = [name for name in ("end_of_para", "start_of_para") if name in names]
        self._pad = vocab.unit2id("<PAD>")
        self._device = self._model.tok_clf.weight.device

    @torch.inference_mode()
    def tokenize(self, lines: Sequence[str], batch_chars: int) -> list[list[list[Token]]]:
        """Return sentences of tokens of every line, with offsets in the line.

        A batch pads to at most `batch_chars` characters.
        """
        texts, places = [], []
        for line in lines:
            blank = _WHITESPACE.sub(" ", line.rstrip())
            place = [i for i, c in enumerate(blank) if c != " " or i == 0 or blank[i - 1] != " "] if "  " in blank else None
            texts.append(blank if place is None else "".join([blank[i] for i in place]))
            places.append(place)
        return [
            self._decode(text, place, breaks) if text else []
            for text, place, breaks in zip(texts, places, self._breaks(texts, batch_chars), strict=True)
        ]

    def _breaks(self, texts: list[str], batch_chars: int) -> list[np.ndarray]:
        """Return Stanza's label of every character: 0 continues, 1 ends a token, 2 a sentence; 3 and 4 the same after several
        words.
        """
        look_up = self._characters.__getitem__
        rows = [np.fromiter(map(look_up, text), np.int64, len(text)) for text in texts]
        units, features = np.array(self._characters.units), np.array(self._characters.features, np.float32)
        out: list[list[np.ndarray]] = [[] for _ in texts]
        todo = [(i, 0) for i, text in enumerate(texts) if text]
        while todo:
            todo.sort(key=lambda job: -_size(rows[job[0]], job[1]))
            again, start = [], 0
            while start < len(todo):
                longest = _size(rows[todo[start][0]], todo[start][1])
                batch = todo[start : start + max(1, batch_chars // longest)]
                start += len(batch)
                for (i, begin), labels in zip(batch, self._batch(batch, rows, units, features), strict=True):
                    end = begin + len(labels)
                    if end < len(rows[i]):
                        breaks = np.flatnonzero((labels == 2) | (labels == 4))
                        end = begin + (breaks[-1] + 1 if len(breaks) else len(labels))
                        again.append((i, end))
                    out[i].append(labels[: end - begin])
            todo = again
        return [np.concatenate(parts) if parts else np.zeros(0, np.int64) for parts in out]

    def _batch(self, batch: list[tuple[int, int]], rows: list, units: np.ndarray, features: np.ndarray) -> list[np.ndarray]:
        """Return labels of the characters [begin, begin + window) of the given lines, longest first."""
        parts = [rows[i][begin : begin + _WINDOW] for i, begin in batch]
        sizes = [_size(rows[i], begin) for i, begin in batch]
        width = features.shape[1]
        chars = np.full((len(parts), max(sizes)), self._pad)
        seen = np.zeros((*chars.shape, width + len(self._ends)), np.float32)
        for k, (part, (i, begin)) in enumerate(zip(parts, batch, strict=True)):
            chars[k, : len(part)] = units[part]
            seen[k, : len(part), :width] = features[part]
            if "end_of_para" in self._ends and begin + len(part) == len(rows[i]):
                seen[k, len(part) - 1, width] = 1
            if "start_of_para" in self._ends and begin == 0:
                seen[k, 0, -1] = 1
        chars, seen = torch.from_numpy(chars).to(self._device), torch.from_numpy(seen).to(self._device)
        labels = self._model(chars, seen, sizes).argmax(2).cpu().numpy()
        return [row[: len(part)] for row, part in zip(labels, parts, strict=True)]

    def _decode(self, text: str, place: list[int] | None, labels: np.ndarray) -> list[list[Token]]:
        labels = labels.copy()
        # The end of a line ends a sentence.
        labels[-1] = 4 if labels[-1] > 2 else 2
        if _PERHAPS_ADDRESS.search(text):
            from stanza.models.tokenization.utils import update_pred_regex

            labels = update_pred_regex(list(text), labels)
        sentences: list[list[Token]] = [[]]
        begin = 0
        for last in np.flatnonzero(labels).tolist():
            piece = text[begin : last + 1]
            token = self._normalise(piece)
            if token:
                start = begin + len(piece) - len(piece.lstrip())
                start, end = (start, last + 1) if place is None else (place[start], place[last] + 1)
                token = token if len(token) <= self._max_token else _TOO_LONG
                sentences[-1].append(Token(start, end, (token,)))
                if self._split and labels[last] in (2, 4):
                    sentences.append([])
            begin = last + 1
        return [sentence for sentence in sentences if sentence]


def _size(row: np.ndarray, begin: int) -> int:
    """Return the number of characters that the model reads from `begin` on.

    As in Stanza, a padding character ends a line that is read at once; windows have none.
    """
    return len(row) + 1 if len(row) < _WINDOW else min(len(row) - begin, _WINDOW)
