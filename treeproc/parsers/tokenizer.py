"""Stanza's tokeniser without documents: the same weights on lines that are arrays of character ids."""

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from treeproc.parsers.lines import Token, longest_first
from treeproc.parsers.weights import PAD, Layer, Packing, Vocabulary, Weights

_DIGIT = re.compile(r"\d")
_OF_A_CHARACTER = {
    "space_before": lambda character: character.startswith(" "),
    "capitalized": lambda character: character[0].isupper(),
    "numeric": lambda character: _DIGIT.match(character) is not None,
}
_OF_A_PLACE = ("end_of_para", "start_of_para")
_TOO_LONG = "<UNK>"  # as in Stanza, for tokens of hundreds of characters
_WHITESPACE = re.compile(r"[\s\u0080-\u009f]")
_SPACE = re.compile(r"\s")
# Stanza's own pattern for addresses is slow, and its import too; every match contains one of these.
_PERHAPS_ADDRESS = re.compile(r"@|://|www\.|\.(?:gov|org|edu|net|com|co)\.")
_WINDOW = 1000  # as in Stanza: longer paragraphs are read in windows that end at a sentence break
LONGEST_TOKEN = 1000  # as in Stanza


def supports(weights: Weights) -> bool:
    """Return whether a Stanza tokeniser reads only characters and Stanza's five plain features."""
    args = weights.args
    return bool(
        not args.get("charlm_forward_file")
        and not args["use_dictionary"]
        and set(args["feat_funcs"]) <= {*_OF_A_CHARACTER, *_OF_A_PLACE}
        and not args["skip_newline"]
        and args["shorthand"] != "la_ittb"
        and args["conv_res"] is None
        and "rnn.weight_ih_l1" not in weights.tensors
    )


class _Characters(dict):
    """Rows of characters in a table of the model's inputs. A key is (character, whether it begins, and ends, a line).

    The table grows with new characters. Its row 0 is the padding.
    """

    def __init__(self, embeddings: Tensor, vocab: Vocabulary, features: Sequence[str]):
        super().__init__()
        self._embeddings, self._vocab, self._names = embeddings, vocab, features
        self._inputs = [(PAD, [0.0] * len(features))]
        self._table: Tensor | None = None

    def __missing__(self, key: tuple[str, bool, bool]) -> int:
        character, begins, ends = key
        places = {"end_of_para": ends, "start_of_para": begins}
        features = [float(places[name] if name in places else _OF_A_CHARACTER[name](character)) for name in self._names]
        self._inputs.append((self._vocab.id_of(character), features))
        self[key] = len(self._inputs) - 1
        return len(self._inputs) - 1

    def table(self) -> Tensor:
        """Return the inputs of all rows so far [M, D]."""
        if self._table is None or len(self._table) < len(self._inputs):
            units, features = zip(*self._inputs, strict=True)
            vectors = self._embeddings[torch.tensor(units, device=self._embeddings.device)]
            self._table = torch.cat([vectors, torch.tensor(features).to(vectors)], 1)
        return self._table


class Tokenizer:
    """Returns sentences of tokens of every line."""

    def __init__(self, weights: Weights, max_token: int, split_sentences: bool):
        self._weights, self._max_token, self._split = weights, max_token, split_sentences
        args, tensors = weights.args, weights.tensors
        names = args["feat_funcs"]
        # As in Stanza: features of the character itself, then of its place.
        features = [name for name in names if name in _OF_A_CHARACTER]
        features += [name for name in _OF_A_PLACE if name in names]
        self._characters = _Characters(tensors["embeddings.weight"], weights.vocab["char"], features)
        self._layers = [Layer(tensors, name) for name in ("rnn.", "rnn2.") if f"{name}weight_ih_l0" in tensors]
        self._kinds = ["tok", "sent", *(["mwt"] if "mwt_clf.weight" in tensors else [])]
        # One product for all scores of a layer.
        parts = [[tensors[f"{kind}_clf{number}.weight"] for kind in self._kinds] for number in ("", "2")[: len(self._layers)]]
        self._scores = [torch.cat(part).T.contiguous() for part in parts]
        self._bias = torch.cat([tensors[f"{kind}_clf.bias"] for kind in self._kinds])

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
        rows = [self._rows(text) for text in texts]
        out: list[list[np.ndarray]] = [[] for _ in texts]
        todo = [(i, 0) for i, text in enumerate(texts) if text]
        while todo:
            again = []
            for chosen in longest_first([_size(rows[i], begin) for i, begin in todo], batch_chars):
                batch = [todo[number] for number in chosen]
                for (i, begin), labels in zip(batch, self._batch(batch, rows), strict=True):
                    end = begin + len(labels)
                    if end < len(rows[i]):
                        breaks = np.flatnonzero((labels == 2) | (labels == 4))
                        end = begin + (breaks[-1] + 1 if len(breaks) else len(labels))
                        again.append((i, end))
                    out[i].append(labels[: end - begin])
            todo = again
        return [np.concatenate(parts) if parts else np.zeros(0, np.int64) for parts in out]

    def _rows(self, text: str) -> np.ndarray:
        """Return the rows of the characters of a text in the table of inputs."""
        if not text:
            return np.zeros(0, np.int64)
        last = len(text) - 1
        keys = [(character, False, False) for character in text]
        keys[0] = (text[0], True, last == 0)
        keys[last] = (text[last], last == 0, True)
        return np.fromiter(map(self._characters.__getitem__, keys), np.int64, len(keys))

    def _batch(self, batch: list[tuple[int, int]], rows: list) -> list[np.ndarray]:
        """Return labels of the characters [begin, begin + window) of the given lines, longest first."""
        parts = [rows[i][begin : begin + _WINDOW] for i, begin in batch]
        sizes = [_size(rows[i], begin) for i, begin in batch]
        at = Packing.of(sizes)
        padded = [part if len(part) == size else np.append(part, 0) for part, size in zip(parts, sizes, strict=True)]
        table = self._characters.table()
        packed = torch.from_numpy(np.concatenate(padded)[at.taken]).to(table.device)
        labels = np.empty(len(at.taken), np.int64)
        labels[at.taken] = self._label(table, packed, at).cpu().numpy()
        ends = np.cumsum(sizes)
        return [labels[end - size : end - size + len(part)] for part, size, end in zip(parts, sizes, ends, strict=True)]

    def _label(self, table: Tensor, rows: Tensor, at: Packing) -> Tensor:
        """Return the labels [N] of packed characters."""
        states = self._layers[0](table, rows, at)
        scores = torch.addmm(self._bias, states, self._scores[0])
        if len(self._layers) > 1:
            sharpness = self._weights.args["hier_invtemp"]
            if sharpness > 0:
                states = states * (1 - torch.sigmoid(-scores[:, :1] * sharpness))
            scores = scores + self._layers[1](states, None, at) @ self._scores[1]
        yes, no = logsigmoid(scores).T, logsigmoid(-scores).T
        chances = [no[0], yes[0] + no[1], yes[0] + yes[1]]
        if len(self._kinds) > 2:
            chances = [chances[0], *(one + no[2] for one in chances[1:]), *(one + yes[2] for one in chances[1:])]
        return torch.stack(chances).argmax(0)

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
            token = _SPACE.sub(" ", piece.lstrip())
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
