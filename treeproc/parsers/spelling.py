"""Stanza's character LSTM over distinct words."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

_WORDS_AT_ONCE = 1024


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
