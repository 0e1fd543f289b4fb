"""Stanza's part-of-speech tagger without documents: the same weights on packed sentences.

Every distinct word is spelled out by the character LSTM once per call, and only the two heads that the
parser reads (UPOS, XPOS) are computed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence


def supports(model: nn.Module) -> bool:
    """Whether a Stanza tagger reads words and characters alone, and has one UPOS and one simple XPOS head."""
    from stanza.models.common.vocab import CompositeVocab

    args = model.args
    return (
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
        # There are few UPOS tags, so the bilinear form is one matrix of all of them: [hidden + 1, UPOS * tags].
        self._xpos = torch.einsum("tij,uj->iut", weight, upos).reshape(weight.shape[1], -1).contiguous()
        self._xpos_bias = model.tag_clf["xpos"].W_bilin.bias.detach()

    @torch.inference_mode()
    def tag(self, sentences: Sequence[Sequence[str]], batch_words: int) -> tuple[list[list[tuple[str, str]]], None]:
        """(UPOS, XPOS) of every word of every sentence, and no arcs. A batch pads to at most `batch_words` words."""
        ids: dict[str, int] = {}
        words = [[ids.setdefault(word, len(ids)) for word in sentence] for sentence in sentences]
        inputs = self._word_inputs(list(ids))
        order = sorted(range(len(words)), key=lambda i: -len(words[i]))
        out: list[list[tuple[str, str]]] = [[] for _ in sentences]
        start = 0
        while start < len(order):
            size = max(1, batch_words // len(words[order[start]]))
            batch = order[start : start + size]
            for i, tags in zip(batch, self._tag_batch(inputs, [words[i] for i in batch]), strict=True):
                out[i] = tags
            start += size
        return out, None

    def _tag_batch(self, inputs: Tensor, sentences: list[list[int]]) -> list[list[tuple[str, str]]]:
        """Sentences of word ids, longest first."""
        model = self._model
        sizes = np.array([len(s) for s in sentences])
        begins = np.cumsum(sizes) - sizes
        alive = (sizes[None] > np.arange(sizes[0])[:, None]).sum(1)
        packed_at = np.concatenate([begins[:n] + step for step, n in enumerate(alive.tolist())])
        rows = torch.from_numpy(np.concatenate(sentences)[packed_at]).to(self._device)
        packed = PackedSequence(inputs[rows], torch.from_numpy(alive))
        first = [p.expand(-1, len(sentences), -1).contiguous() for p in (model.taggerlstm_h_init, model.taggerlstm_c_init)]
        states = model.taggerlstm(packed, sizes.tolist(), hx=tuple(first))[0].data
        upos = model.upos_clf(torch.relu(model.upos_hid(states))).argmax(1)
        hidden = torch.relu(model.tag_hid["xpos"](states))
        hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], 1)
        scores = (hidden @ self._xpos).view(len(hidden), -1, len(self._xpos_bias))
        xpos = (scores[torch.arange(len(upos), device=self._device), upos] + self._xpos_bias).argmax(1)
        tags = np.empty((len(packed_at), 2), np.int64)
        tags[packed_at] = torch.stack([upos, xpos], 1).cpu().numpy()
        upos_names, xpos_names = model.vocab["upos"], model.vocab["xpos"]
        names = [(upos_names.id2unit(u), xpos_names.id2unit(x)) for u, x in tags.tolist()]
        return [names[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]

    def _word_inputs(self, words: list[str]) -> Tensor:
        """What the word LSTM reads of distinct words: [words, D]."""
        from stanza.models.common.utils import simplify_punct

        model = self._model
        words = [word for ((word,),) in simplify_punct([[[word]] for word in words])]
        known = torch.tensor(model.vocab["word"].map(words), device=self._device)
        order = sorted(range(len(words)), key=lambda i: -len(words[i]))
        spelled = [self._spell([words[i] for i in order[at : at + 1024]]) for at in range(0, len(order), 1024)]
        out = torch.empty(len(words), spelled[0].shape[1], device=self._device)
        out[torch.tensor(order, device=self._device)] = torch.cat(spelled)
        return torch.cat([model.word_emb(known), model.trans_char(out)], 1)

    def _spell(self, words: list[str]) -> Tensor:
        """Character representations of words, longest first."""
        spelling, chars = self._model.charmodel, self._model.vocab["char"]
        ids = pad_sequence([torch.tensor(chars.map(word)) for word in words], batch_first=True).to(self._device)
        packed = pack_padded_sequence(spelling.char_emb(ids), [len(word) for word in words], batch_first=True)
        first = [p.expand(-1, len(words), -1).contiguous() for p in (spelling.charlstm_h_init, spelling.charlstm_c_init)]
        states = spelling.charlstm(packed, None, hx=tuple(first))[0]
        weighted = PackedSequence(states.data * torch.sigmoid(spelling.char_attn(states.data)), states.batch_sizes)
        return pad_packed_sequence(weighted, batch_first=True)[0].sum(1)
