"""Stanza's part-of-speech tagger without documents: the same weights on packed sentences.

The character LSTM reads every distinct word once per call. Only the two heads that the parser reads (UPOS, XPOS) are computed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from treeproc.parsers.packing import Packing
from treeproc.parsers.spelling import spell


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
