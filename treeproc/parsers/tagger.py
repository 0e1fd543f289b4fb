"""Stanza's part-of-speech tagger without documents: the same weights on packed sentences.

The character LSTM reads every distinct word once per call. Only the two heads that the parser reads (UPOS, XPOS) are computed.
The dependency parser shares the packed order of words and the character LSTM.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from treeproc.parsers.lines import longest_first

_WORDS_AT_ONCE = 1024


@dataclass(frozen=True)
class Packing:
    """The positions of words in a packed sequence, ordered by step. A step has one word of each sentence that is long enough.

    Sentences are sorted by length, longest first. Shapes: B sentences, L words of the longest, N words in all.
    """

    sizes: np.ndarray  # [B] words
    batch_sizes: np.ndarray  # [L] number of sentences that have a step
    before: np.ndarray  # [L] number of words before a step
    taken: np.ndarray  # [N] index in the concatenated sentences of the word at a packed place
    sentence: np.ndarray  # [N] sentence of a packed place
    step: np.ndarray  # [N] index of its word in the sentence

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "Packing":
        lengths = np.array(sizes)
        begins = np.cumsum(lengths) - lengths
        batch_sizes = (lengths[None] > np.arange(lengths[0])[:, None]).sum(1)
        taken = np.concatenate([begins[:n] + step for step, n in enumerate(batch_sizes.tolist())])
        sentence = np.concatenate([np.arange(n) for n in batch_sizes.tolist()])
        step = np.repeat(np.arange(len(batch_sizes)), batch_sizes)
        return cls(lengths, batch_sizes, np.cumsum(batch_sizes) - batch_sizes, taken, sentence, step)

    def pad(self, data: Tensor) -> Tensor:
        """Pad [N, ...] to [B, L, ...]."""
        return pad_packed_sequence(PackedSequence(data, torch.from_numpy(self.batch_sizes)), batch_first=True)[0]


def spell(model: nn.Module, words: Sequence[Sequence[int]]) -> Tensor:
    """Return character representations [words, transformed dimensions] of words, given as the ids of their characters.

    `model` is a Stanza tagger or dependency parser. In training mode it applies the same dropout as Stanza's code.
    """
    order = sorted(range(len(words)), key=lambda i: -len(words[i]))
    parts = [_spell(model, [words[i] for i in order[at : at + _WORDS_AT_ONCE]]) for at in range(0, len(order), _WORDS_AT_ONCE)]
    places = torch.empty(len(order), dtype=torch.long)
    places[torch.tensor(order)] = torch.arange(len(order))
    spelled = torch.cat(parts)
    return spelled[places.to(spelled.device)]


def _spell(model: nn.Module, words: Sequence[Sequence[int]]) -> Tensor:
    """Spell words, which are given longest first."""
    chars = model.charmodel
    ids = pad_sequence([torch.tensor(word) for word in words], batch_first=True).to(chars.char_emb.weight.device)
    inputs = pack_padded_sequence(chars.dropout(chars.char_emb(ids)), [len(word) for word in words], batch_first=True)
    first = tuple(p.expand(-1, len(words), -1).contiguous() for p in (chars.charlstm_h_init, chars.charlstm_c_init))
    states = chars.charlstm(inputs, None, hx=first)[0]
    weighted = states.data * torch.sigmoid(chars.char_attn(chars.dropout(states.data)))
    summed = pad_packed_sequence(PackedSequence(weighted, states.batch_sizes), batch_first=True)[0].sum(1)
    return model.trans_char(model.drop(summed))


def supports(model: nn.Module) -> bool:
    """Return whether a Stanza tagger reads only words and characters, and has one UPOS and one simple XPOS head."""
    from stanza.models.common.vocab import CompositeVocab

    args = model.args
    return bool(
        args["word_emb_dim"] > 0
        and not args["pretrain"]
        and bool(args["char"])
        and args["char_emb_dim"] > 0
        and not args.get("charlm")
        and model.bert_model is None
        and not model.share_hid
        and model.link_mode == "tag_emb"
        and model.column_parents.get("xpos") == ("upos",)
        and not isinstance(model.vocab["xpos"], CompositeVocab)
        and model.charmodel.attn
        and model.charmodel.num_dir == 1
    )


class Tagger:
    """UPOS and XPOS of tokenised sentences."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._device = model.drop_replacement.device
        weight = model.tag_clf["xpos"].W_bilin.weight.detach()  # [tags, hidden + 1, upos + 1]
        upos = model.upos_emb.weight.detach()
        upos = torch.cat([upos, upos.new_ones(len(upos), 1)], 1)
        # There are few UPOS tags, so the bilinear form is one matrix for each of them: [UPOS, hidden + 1, tags].
        self._xpos = torch.einsum("tij,uj->uit", weight, upos).contiguous()
        self._xpos_bias = model.tag_clf["xpos"].W_bilin.bias.detach()

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
        model = self._model
        at = Packing.of([len(s) for s in sentences])
        rows = torch.from_numpy(np.concatenate(sentences)[at.taken]).to(self._device)
        packed = PackedSequence(inputs[rows], torch.from_numpy(at.batch_sizes))
        first = [p.expand(-1, len(sentences), -1).contiguous() for p in (model.taggerlstm_h_init, model.taggerlstm_c_init)]
        states = model.taggerlstm(packed, at.sizes.tolist(), hx=tuple(first))[0].data
        upos = model.upos_clf(torch.relu(model.upos_hid(states))).argmax(1)
        hidden = torch.relu(model.tag_hid["xpos"](states))
        hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1)
        xpos = torch.empty_like(upos)
        for tag in upos.unique().tolist():
            rows = (upos == tag).nonzero().squeeze(1)
            xpos[rows] = torch.addmm(self._xpos_bias, hidden[rows], self._xpos[tag]).argmax(1)
        tags = np.empty((len(at.taken), 2), np.int64)
        tags[at.taken] = torch.stack([upos, xpos], 1).cpu().numpy()
        upos_names, xpos_names = model.vocab["upos"], model.vocab["xpos"]
        names = [(upos_names.id2unit(u), xpos_names.id2unit(x)) for u, x in tags.tolist()]
        ends = np.cumsum(at.sizes).tolist()
        return [names[end - size : end] for end, size in zip(ends, at.sizes.tolist(), strict=True)]

    def _word_inputs(self, words: list[str]) -> Tensor:
        """Return the inputs of the word LSTM for distinct words: [words, D]."""
        from stanza.models.common.utils import simplify_punct

        model = self._model
        words = [word for ((word,),) in simplify_punct([[[word]] for word in words])]
        known = torch.tensor(model.vocab["word"].map(words), device=self._device)
        return torch.cat([model.word_emb(known), spell(model, [model.vocab["char"].map(word) for word in words])], 1)
