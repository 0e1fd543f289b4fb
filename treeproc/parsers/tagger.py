"""Stanza's part-of-speech tagger without documents: the same weights on packed sentences.

The character LSTM reads every distinct word once per call. Only the two heads that the parser reads (UPOS, XPOS) are computed.
The dependency parser shares the character LSTM.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeproc.parsers.lines import longest_first
from treeproc.parsers.weights import Highway, Layer, Packing, Weights, with_one

_WORDS_AT_ONCE = 1024
# Stanza reads several marks of a question or an exclamation as one.
_MARKS = "?？︖﹖⁇!！︕﹗‼"
_QUESTION, _EXCLAMATION = (re.compile(f"[{first}][{_MARKS}]+") for first in (_MARKS[:5], _MARKS[5:]))


def simplify_marks(word: str) -> str:
    """Return the word as Stanza's taggers and dependency parsers look it up."""
    if _QUESTION.fullmatch(word):
        return "?"
    return "!" if _EXCLAMATION.fullmatch(word) else word


class Speller:
    """The character model of a tagger or a dependency parser."""

    def __init__(self, weights: Weights):
        self._weights, self._characters = weights, weights.vocab["char"]
        self._layer = Layer(weights.tensors, "charmodel.charlstm.lstm.")
        self._first = weights.tensors["charmodel.charlstm_h_init"], weights.tensors["charmodel.charlstm_c_init"]

    def spell(self, words: Sequence[Sequence[int]]) -> Tensor:
        """Return vectors [words, transformed dimensions] of words, given as the ids of their characters."""
        order = sorted(range(len(words)), key=lambda i: -len(words[i]))
        parts = [self._spell([words[i] for i in order[k : k + _WORDS_AT_ONCE]]) for k in range(0, len(order), _WORDS_AT_ONCE)]
        spelled = torch.cat(parts)
        return torch.empty_like(spelled).index_copy_(0, torch.tensor(order, device=spelled.device), spelled)

    def _spell(self, words: Sequence[Sequence[int]]) -> Tensor:
        """Spell words, which are given longest first."""
        weights, at = self._weights, Packing.of([len(word) for word in words])
        rows = torch.from_numpy(np.concatenate(words)[at.taken]).to(weights.device)
        states = self._layer(weights.tensors["charmodel.char_emb.weight"], rows, at, self._first)
        states = states * torch.sigmoid(weights.linear("charmodel.char_attn", states))
        return weights.linear("trans_char", at.pad(states).sum(1))


def reads_characters(weights: Weights, lstm: str) -> bool:
    """Return whether a tagger or a dependency parser reads words by a table and by its model of characters, and nothing else."""
    args, tensors, spelling = weights.args, weights.tensors, "charmodel.charlstm.lstm.weight_ih_l"
    return bool(
        args["word_emb_dim"] > 0
        and not args["pretrain"]
        and not args.get("charlm")
        and not args.get("bert_model")
        and {f"{lstm}.lstm.0.lstm.weight_ih_l0", f"{spelling}0", "charmodel.char_attn.weight"} <= set(tensors)
        and not {f"{spelling}0_reverse", f"{spelling}1"} & set(tensors)
        and weights.vocab["xpos"].is_plain
    )


def supports(weights: Weights) -> bool:
    """Return whether a Stanza tagger reads only words and characters, and has one UPOS and one simple XPOS head."""
    args = weights.args
    parents = dict(map(_parents, args.get("tag_columns") or ()))
    return (
        reads_characters(weights, "taggerlstm")
        and not args.get("share_hid")
        and args.get("tag_column_link", "tag_emb") == "tag_emb"
        and parents.get("xpos", ("upos",)) == ("upos",)
        and "tag_clf.xpos.W_bilin.weight" in weights.tensors
    )


def _parents(column: Any) -> tuple[str, tuple]:
    """Return a tag column of a file or a model of Stanza, and the columns that it reads."""
    name, parents = (column[0], column[5]) if isinstance(column, list) else (column.name, column.parents)
    return name, tuple(parents)


class Tagger:
    """UPOS and XPOS of tokenised sentences."""

    def __init__(self, weights: Weights):
        self._weights, tensors = weights, weights.tensors
        self._speller, self._lstm = Speller(weights), Highway(weights, "taggerlstm")
        weight = tensors["tag_clf.xpos.W_bilin.weight"]  # [tags, hidden + 1, upos + 1]
        upos = with_one(tensors["upos_emb.weight"])
        # There are few UPOS tags, so the bilinear form is one matrix for each of them: [UPOS, hidden + 1, tags].
        self._xpos = torch.einsum("tij,uj->uit", weight, upos).contiguous()
        self._xpos_bias = tensors["tag_clf.xpos.W_bilin.bias"]

    def knows(self, word: str) -> bool:
        """Return whether the training data had the word."""
        return word in self._weights.vocab["word"]

    @torch.inference_mode()
    def tag(self, sentences: Sequence[Sequence[str]], batch_words: int) -> tuple[list[list[tuple[str, str]]], None]:
        """Return (UPOS, XPOS) of every word of every sentence, and no arcs. A batch pads to at most `batch_words` words."""
        ids: dict[str, int] = {}
        words = [[ids.setdefault(word, len(ids)) for word in sentence] for sentence in sentences]
        inputs = self._word_inputs(list(ids))
        out: list[list[tuple[str, str]]] = [[] for _ in sentences]
        for batch in longest_first([len(sentence) for sentence in words], batch_words):
            for i, tags in zip(batch, self._tag_batch(inputs, [words[i] for i in batch]), strict=True):
                out[i] = tags
        return out, None

    def _tag_batch(self, inputs: Tensor, sentences: list[list[int]]) -> list[list[tuple[str, str]]]:
        """Tag sentences of word ids, longest first."""
        weights, at = self._weights, Packing.of([len(s) for s in sentences])
        rows = torch.from_numpy(np.concatenate(sentences)[at.taken]).to(inputs.device)
        states = self._lstm(inputs, rows, at)
        upos = weights.linear("upos_clf", torch.relu_(weights.linear("upos_hid", states))).argmax(1)
        hidden = with_one(torch.relu_(weights.linear("tag_hid.xpos", states)))
        xpos = torch.empty_like(upos)
        for tag in upos.unique().tolist():
            rows = (upos == tag).nonzero().squeeze(1)
            xpos[rows] = torch.addmm(self._xpos_bias, hidden[rows], self._xpos[tag]).argmax(1)
        tags = np.empty((len(at.taken), 2), np.int64)
        tags[at.taken] = torch.stack([upos, xpos], 1).cpu().numpy()
        upos_names, xpos_names = weights.vocab["upos"].names, weights.vocab["xpos"].names
        names = [(upos_names[u], xpos_names[x]) for u, x in tags.tolist()]
        ends = np.cumsum(at.sizes).tolist()
        return [names[end - size : end] for end, size in zip(ends, at.sizes.tolist(), strict=True)]

    def _word_inputs(self, words: list[str]) -> Tensor:
        """Return the inputs of the word LSTM for distinct words: [words, D]."""
        weights = self._weights
        words = list(map(simplify_marks, words))
        known = weights.tensors["word_emb.weight"][torch.tensor(weights.vocab["word"].map(words), device=weights.device)]
        return torch.cat([known, self._speller.spell([weights.vocab["char"].map(word) for word in words])], 1)
