"""The LSTM decoder of Tree2Seq (Shi et al., 2018) and of its sequence baseline, over any encoder with hidden and cell states.

Shapes: B batch, S memory positions, T target positions, R hypotheses, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.layers.attention import BeamLayout, CrossAttention, KeysValues, padding_to_attend_mask
from treenet.layers.core import Dropout, build_linear
from treenet.layers.recurrent import build_lstm, run_layer
from treenet.models.decoders.transformer import Decoder, DecoderState
from treenet.models.encoders.base import LSTMEncoder, Memory, PieceEmbedding

# Width of the self-attentive pooling, as in the authors' code.
_POOLING_WIDTH = 128


@dataclass(kw_only=True)
class RecurrentMemory(Memory):
    """Memory, and the initial state of the decoder."""

    start: tuple[Tensor, ...]  # hidden state and cell [B, D]


class RecurrentDecoder(Decoder[LSTMEncoder, RecurrentMemory, DecoderState]):
    """LSTM layers that all start from one state of the source. They may attend to its positions.

    Attention is above the layers: o = tanh(W [h; attended]) (Luong et al., 2015, equation 5). There is no input feeding, so
    teacher forcing needs no loop here. It is the multi-head attention of the other decoders. Luong's "general" attention is its
    case with one head. Attention reads leaves and nodes. The decoder of the released code is a GRU that never attends. With
    `start: attention`, the state of the source has the weights softmax(w tanh(W h)), 128 wide.
    """

    def __init__(self, config: ModelConfig, embedding: PieceEmbedding):
        super().__init__()
        width = config.d_model
        self.embedding = embedding
        self.dropout = Dropout(config.dropout)
        self.layers = build_lstm(width, width, config.num_decoder_layers)
        self.begins_with = config.recurrent.start
        if self.begins_with == "attention":
            self.pooling = nn.Sequential(
                nn.Linear(width, _POOLING_WIDTH, bias=False), nn.Tanh(), nn.Linear(_POOLING_WIDTH, 1, bias=False)
            )
        self.cross_attention = None
        if config.recurrent.attend:
            self.cross_attention = CrossAttention(width, config.num_heads, config.attention_dropout)
            self.combine = build_linear(2 * width, width)

    def read(self, encoder: LSTMEncoder, batch: TreeBatch) -> RecurrentMemory:
        """Return the states of the source, and the initial state of the layers.

        That is the encoder's own state, or a pooled state over all positions.
        """
        states = encoder.run(batch, with_cells=True)
        assert states.cells is not None  # they are asked for
        both = states.hidden, states.cells
        ignored = states.pad_mask & ~states.pad_mask.all(1, keepdim=True)  # avoids NaN for rows of padding only
        if self.begins_with == "own":
            start = tuple(encoder.own_state(x, batch) for x in both)
        elif self.begins_with == "max":
            start = tuple(x.masked_fill(ignored[..., None], -torch.inf).amax(1) for x in both)
        else:
            scores = self.pooling(states.hidden) if self.begins_with == "attention" else torch.zeros_like(states.hidden[..., :1])
            weights = scores.masked_fill(ignored[..., None], -torch.inf).softmax(1)
            start = tuple((weights * x).sum(1) for x in both)
        return RecurrentMemory(encoder.drop(states), states.pad_mask, start=start)

    def forward(self, tgt_in: Tensor, memory: RecurrentMemory) -> Tensor:
        past = [memory.start] * len(self.layers)
        return self._run(tgt_in, past, self._project(memory), padding_to_attend_mask(memory.pad_mask))[0]

    def start(self, memory: RecurrentMemory) -> DecoderState:
        """Start with one empty hypothesis per sentence. The `past` is hidden state and cell of every layer."""
        return DecoderState.begin(memory.pad_mask, self._project(memory), [memory.start] * len(self.layers))

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        x, past = self._run(tokens[:, None], state.past, state.memory, state.memory_attend_mask, state.layout)
        return x[:, 0], replace(state, past=past, step=state.step + 1)

    def _project(self, memory: Memory) -> list[KeysValues]:
        """Return keys and values of the memory, or nothing if the decoder does not attend."""
        return [self.cross_attention.project_memory(memory.states)] if self.cross_attention else []

    def _run(
        self,
        tokens: Tensor,
        past: Sequence[tuple[Tensor, ...]],
        memory: Sequence[KeysValues],
        attend_mask: Tensor,
        layout: BeamLayout | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Run over tokens [R, T]. Returns the states [R, T, D] that give the logits, and the states after the last token."""
        x = self.dropout(self.embedding(tokens))
        states: list[tuple[Tensor, ...]] = []
        for layer, start in zip(self.layers, past, strict=True):
            x, (hidden, cell) = run_layer(layer, x, tuple(part[None].contiguous() for part in start))
            states.append((hidden[0], cell[0]))
            x = self.dropout(x)
        if self.cross_attention is not None:
            (keys_values,) = memory
            attended = self.cross_attention(x, keys_values, attend_mask, layout)
            x = self.combine(torch.cat([x, attended], dim=2)).tanh()
        return x, states
