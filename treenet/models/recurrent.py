"""The LSTM decoder of Tree2Seq (Shi et al., 2018) and of its sequence baseline, over any encoder with hidden and cell states.

Shapes: B batch, S memory positions, T target positions, R hypotheses, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import CrossAttention, KeysValues, Readers, padding_to_attend_mask
from treenet.layers.dropout import Dropout
from treenet.layers.linear import build_linear
from treenet.models.encoders import Memory, VocabSizes, build_embedding
from treenet.models.seq2seq import DecoderState, EncoderDecoder

LSTMState = tuple[Tensor, Tensor]  # hidden state and cell [B, D], or [R, D]

# Width of the self-attentive pooling, as in the authors' code.
_POOLING_WIDTH = 128


@dataclass(kw_only=True)
class RecurrentMemory(Memory):
    """Memory, and what the decoder begins with."""

    start: LSTMState


class RecurrentDecoder(EncoderDecoder):
    """LSTM layers that all start from one state of the source; they may attend to its positions.

    Attention is above the layers, o = tanh(W [h; attended]) (Luong et al., 2015, equation 5, without input feeding, so that
    teacher forcing needs no loop here), and is the multi-head attention of the other decoders, of which Luong's "general" is a
    case with one head.
    Encoder leaves, decoder input and output softmax share one table.
    """

    def __init__(self, config: ModelConfig, vocab: VocabSizes):
        super().__init__()
        width = config.d_model
        self.piece_embedding = build_embedding(vocab.pieces, width)
        self.embedding_scale = width**0.5
        self.dropout = Dropout(config.dropout)
        self.decoder_layers = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(config.num_decoder_layers)])
        self.start = config.recurrent.start
        if self.start == "attention":
            self.pooling = nn.Sequential(
                nn.Linear(width, _POOLING_WIDTH, bias=False), nn.Tanh(), nn.Linear(_POOLING_WIDTH, 1, bias=False)
            )
        self.cross_attention = None
        if config.recurrent.attend:
            self.cross_attention = CrossAttention(width, config.num_heads, config.attention_dropout)
            self.combine = build_linear(2 * width, width)

    def embed_pieces(self, pieces: Tensor) -> Tensor:
        """pieces [B, T] -> [B, T, D]."""
        return self.dropout(self.embedding_scale * self.piece_embedding(pieces))

    def remember(
        self, hidden: Tensor, cells: Tensor, pad_mask: Tensor, own: LSTMState, num_leaves: int | None = None
    ) -> RecurrentMemory:
        """Memory of hidden states and cells [B, S, D]; `own` is where the decoder starts unless they are pooled.

        With `num_leaves`, positions from there on are nodes.
        """
        ignored = pad_mask & ~pad_mask.all(1, keepdim=True)  # of padding alone: no NaN
        if self.start == "own":
            start = own
        elif self.start == "max":
            start = tuple(x.masked_fill(ignored[..., None], -torch.inf).amax(1) for x in (hidden, cells))
        else:
            scores = self.pooling(hidden) if self.start == "attention" else torch.zeros_like(hidden[..., :1])
            weights = scores.masked_fill(ignored[..., None], -torch.inf).softmax(1)
            start = tuple((weights * x).sum(1) for x in (hidden, cells))
        return RecurrentMemory(self.dropout(hidden, num_leaves), pad_mask, start=start)

    def decode(self, batch: TreeBatch) -> Tensor:
        memory = self.encode(batch)
        past = [memory.start] * len(self.decoder_layers)
        return self._run(batch.tgt_in, past, self._project(memory), padding_to_attend_mask(memory.pad_mask))[0]

    def start_decoding(self, memory: RecurrentMemory) -> DecoderState:
        """One empty hypothesis a sentence. The `past` is hidden state and cell of every layer."""
        return DecoderState.begin(memory.pad_mask, self._project(memory), [memory.start] * len(self.decoder_layers))

    def decode_step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """The last token of each hypothesis [R] -> logits [R, V] of the next one, and the new state."""
        x, past = self._run(tokens[:, None], state.past, state.memory, state.memory_attend_mask, state.readers)
        return self.compute_logits(x[:, 0]), replace(state, past=past, step=state.step + 1)

    def _project(self, memory: Memory) -> list[KeysValues]:
        """Keys and values of the memory, or nothing where the decoder does not attend."""
        return [self.cross_attention.project_memory(memory.states)] if self.cross_attention else []

    def _run(
        self,
        tokens: Tensor,
        past: Sequence[LSTMState],
        memory: Sequence[KeysValues],
        attend_mask: Tensor,
        readers: Readers | None = None,
    ) -> tuple[Tensor, list[LSTMState]]:
        """tokens [R, T] -> what logits are computed from [R, T, D], and the states after the last of them."""
        x = self.embed_pieces(tokens)
        states = []
        for layer, start in zip(self.decoder_layers, past, strict=True):
            x, (hidden, cell) = layer(x, tuple(part[None].contiguous() for part in start))
            states.append((hidden[0], cell[0]))
            x = self.dropout(x)
        for keys_values in memory:
            attended = self.cross_attention(x, keys_values, attend_mask, readers)
            x = self.combine(torch.cat([x, attended], dim=2)).tanh()
        return x, states
