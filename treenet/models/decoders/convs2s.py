"""The decoder of convolutional sequence to sequence learning (Gehring et al., 2017).

Shapes: B batch, S source positions, T target positions, D model, R live hypotheses.
"""

from dataclasses import dataclass, field, replace

from torch import Tensor

from treenet.config import ModelConfig
from treenet.layers.attention import KeysValues, padding_to_attend_mask
from treenet.layers.blocks import LearnedPositions
from treenet.layers.convolution import EMBEDDING_STD, MultiStepAttentionLayer, build_normalised_linear
from treenet.layers.core import Dropout, Modules
from treenet.models.decoders.transformer import Decoder, DecoderState
from treenet.models.encoders.base import Encoder, Memory, PieceEmbedding


@dataclass
class ConvMemory(Memory):
    """Encoder outputs z as `states`, and z + e, which attention reads as values; e is the embedded leaf (equation 2)."""

    values: Tensor = field(kw_only=True)  # [B, S, D]

    def keys_values(self) -> KeysValues:
        """Return keys and values [B, 1, S, D] for all layers."""
        return self.states[:, None], self.values[:, None]


@dataclass
class ConvDecoderState(DecoderState):
    """All layers share one memory. `past` has the last inputs of each layer's convolution [R, W - 1, D]."""

    weights: list[tuple[Tensor, ...]]  # of each layer, normalised


class ConvS2SDecoder(Decoder[Encoder, ConvMemory, ConvDecoderState]):
    """Gated convolutions over target pieces with learned positions; every layer attends to the source."""

    def __init__(self, config: ModelConfig, embedding: PieceEmbedding):
        super().__init__()
        d_model, dropout = config.d_model, config.dropout
        self.embedding = embedding
        self.dropout = Dropout(dropout)
        self.positions = LearnedPositions(config.convs2s.position_rows, d_model, EMBEDDING_STD)
        self.input = build_normalised_linear(d_model, d_model, dropout)
        self.layers = Modules([MultiStepAttentionLayer(config) for _ in range(config.num_decoder_layers)])
        self.output = build_normalised_linear(d_model, d_model, 0.0)

    def forward(self, tgt_in: Tensor, memory: ConvMemory) -> Tensor:
        attend_mask = padding_to_attend_mask(memory.pad_mask)
        x, embedded = self._embed(tgt_in)
        for layer in self.layers:
            x, _ = layer(x, embedded, memory.keys_values(), attend_mask)
        return self.dropout(self.output(x))

    def start(self, memory: ConvMemory) -> ConvDecoderState:
        past = [(layer.convolution.start(memory.states),) for layer in self.layers]
        weights = [layer.weights() for layer in self.layers]
        return ConvDecoderState.begin(memory.pad_mask, [memory.keys_values()], past, weights=weights)

    def step(self, tokens: Tensor, state: ConvDecoderState) -> tuple[Tensor, ConvDecoderState]:
        x, embedded = self._embed(tokens[:, None], first=state.step)
        pasts = []
        for layer, weights, (past,) in zip(self.layers, state.weights, state.past, strict=True):
            x, past = layer(x, embedded, state.memory[0], state.memory_attend_mask, past, state.layout, weights)
            pasts.append((past,))
        return self.output(x[:, 0]), replace(state, past=pasts, step=state.step + 1)

    def _embed(self, pieces: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Embed target pieces [B, T] from position `first`: inputs of the first layer, and embedded pieces, each [B, T, D]."""
        embedded = self.dropout(self.positions(self.embedding(pieces), first))
        return self.input(embedded), embedded
