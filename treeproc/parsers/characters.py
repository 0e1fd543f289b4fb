"""Stanza's language models of characters, read once for all models that want their states.

Of a published English model, they are most of the work. Tagger and parsers read the same two: one forwards, one backwards.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeproc.parsers.lines import longest_first
from treeproc.parsers.weights import Layer, Packing, Vocabulary, tensors_of

_START, _END = "\n", " "  # of a sentence; of a word
_CHARACTERS = 16_384  # of a batch
# In tagger and dependency parser, then in the constituency parser.
_PLACES = ("charmodel_forward", "charmodel_backward", "forward_charlm", "backward_charlm")


class CharacterReader:
    """The states of a language model of characters at the ends of words. A sentence is read once until `forget`."""

    def __init__(self, model: Any):
        tensors = tensors_of(model.state_dict())
        self._forwards = model.is_forward_lm
        self._characters = Vocabulary(vars(model.char_vocab()))
        self._table, self._layer = tensors["char_emb.weight"], Layer(tensors, "charlstm.lstm.")
        self._first = tensors["charlstm_h_init"], tensors["charlstm_c_init"]
        self._kept: dict[tuple[str, ...], Tensor] = {}

    @torch.no_grad()
    def read(self, sentences: Sequence[Sequence[str]]) -> list[Tensor]:
        """Return states [words, H] of every sentence."""
        keys = [tuple(sentence) for sentence in sentences]
        new = [key for key in dict.fromkeys(keys) if key not in self._kept]
        sizes = [1 + len(key) + sum(map(len, key)) for key in new]
        for batch in longest_first(sizes, _CHARACTERS):
            self._read([new[i] for i in batch])
        return [self._kept[key] for key in keys]

    def _read(self, sentences: list[tuple[str, ...]]) -> None:
        """Keep the states of sentences, which are given longest first."""
        texts, ends = [], []
        for words in sentences:
            ordered = words if self._forwards else [word[::-1] for word in reversed(words)]
            texts.append(self._characters.map(_START + "".join(word + _END for word in ordered)))
            last = np.cumsum([len(word) + 1 for word in ordered])
            ends.append(last if self._forwards else last[::-1])
        at = Packing.of([len(text) for text in texts])
        rows = torch.from_numpy(np.concatenate(texts)[at.taken]).to(self._table.device)
        states = self._layer(self._table, rows, at, self._first)
        for number, (words, last) in enumerate(zip(sentences, ends, strict=True)):
            self._kept[words] = states[torch.from_numpy(at.before[last] + number).to(states.device)]

    def forget(self) -> None:
        """Free the states that are kept."""
        self._kept.clear()


def share_readers(models: Iterable[Any]) -> list[CharacterReader]:
    """Make models of Stanza with the same language models of characters read each sentence once, and return the readers."""
    found = {id(one): one for model in models for place in _PLACES if (one := getattr(model, place, None)) is not None}
    readers = []
    for model in found.values():
        if model.args["char_num_layers"] == 1:
            readers.append(reader := CharacterReader(model))
            model.build_char_representation = reader.read
    return readers
